"""Campaign days: billed spend and outcomes equal brute force; curves of the lake's campaigns."""

import gzip
import itertools
import json
import random
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from benchmarks.system.warm_start import changed_spec
from etl.errors import UserError
from etl.labels import label_impressions
from etl.reports import SPEND_REPORTS, load_reports
from etl.spec import DataSpec
from etl.spec.report_sources import SpendColumns
from etl.spec.units import date_range
from etl.tables import arrow, label_schemas, roi_schemas, schemas
from etl.tables.lake import Lake
from etl.tables.maintenance import upgrade_lake
from features.roi import campaign_days as roi_tables
from features.roi.campaign_days import build_campaign_days, first_changed_day
from gemline import main
from ranking.roi.campaign_days import read_campaign_days, usable_campaigns
from tests.conftest import FIRST, LAST
from tests.world import copy_of, link_tables

pytestmark = pytest.mark.spark
DAYS = (FIRST, LAST)


@pytest.fixture(scope="module")
def billed(lake: Lake, raw: Path, spark: object, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    own = copy_of(lake, tmp_path_factory.mktemp("roi") / "lake")
    load_reports(own, str(raw), DAYS, SPEND_REPORTS)
    build_campaign_days(own, DAYS)
    return own


def campaign_days(lake: Lake) -> pd.DataFrame:
    rows: pd.DataFrame = (
        arrow.snapshot(lake, roi_schemas.campaign_days(lake.spec)).read().to_pandas()
    )
    return rows.set_index(["campaign", "day"]).sort_index()


def logged_spend(raw: Path) -> dict[tuple[str, date], float]:
    """Spend by campaign and day as in the raw files."""
    spend = {}
    for file in sorted((raw / "spend").glob("*.gz")):
        day = date.fromisoformat(file.name.split("=")[1][:10])
        for line in gzip.decompress(file.read_bytes()).decode().splitlines():
            row = json.loads(line)
            spend[row["campaign"], day] = row["spend"]
    return spend


def expected_days(lake: Lake, raw: Path) -> pd.DataFrame:
    """The table, one impression after the other."""
    spec = lake.spec
    impressions = arrow.snapshot(lake, label_schemas.impressions(spec)).read().to_pandas()
    items = arrow.snapshot(lake, schemas.attributes(spec, "item")).read().to_pandas()
    first = items.sort_values(["valid_from", "day"]).groupby("item_id").first()
    empty = {"spend": 0.0, "impressions": 0, "final": 0, "conversions": 0, "value": 0.0}
    rows = {key: empty | {"spend": spend} for key, spend in logged_spend(raw).items()}
    categories: dict[tuple[str, date], Counter[str]] = defaultdict(Counter)
    for row in impressions.itertuples():
        key = first.attr_advertiser_id[row.item_id], row.day
        found = rows.setdefault(key, {**empty})
        categories[key][first.attr_category[row.item_id]] += 1
        found["impressions"] += 1
        if not np.isnan(row.label_conversion):
            found["final"] += 1
            found["conversions"] += row.label_conversion
            found["value"] += row.value_conversion
    table = pd.DataFrame.from_dict(rows, orient="index")
    modes = {
        key: min(name for name, n in counts.items() if n == max(counts.values()))
        for key, counts in categories.items()
    }
    return table.assign(category=[modes.get(key, "unknown") for key in rows])


def test_campaign_days_equal_brute_force(billed: Lake, raw: Path) -> None:
    found, expected = campaign_days(billed), expected_days(billed, raw)
    assert len(found) == len(expected) > 30 and expected.spend.sum() > 0
    expected.index = pd.MultiIndex.from_tuples(expected.index, names=["campaign", "day"])
    expected = expected.sort_index()
    for name in ("spend", "impressions", "conversions", "value"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, err_msg=name)
    arrived = expected.final / expected.impressions.clip(1)
    np.testing.assert_allclose(found.arrived, arrived)
    assert set(found.currency) == {"USD"} and found.category.str.startswith("c").any()
    assert found.category.tolist() == expected.category.tolist()


def test_of_equally_frequent_groups_a_campaign_has_the_first(
    spark: SparkSession, lake_spec: DataSpec
) -> None:
    rng, expected, rows = random.Random(0), {}, []
    for number in range(30):
        groups = [f"c{group}" for group in rng.sample(range(9), 4)]
        expected[f"b{number}"] = min(groups)
        rows += [(f"b{number}", group, FIRST, 0, None, None) for group in groups]
    columns = "item_advertiser_id string, item_category string, day date, surface int"
    labels = "label_conversion int, value_conversion double"
    impressions = spark.createDataFrame(rows, f"{columns}, {labels}")
    spend = spark.createDataFrame([], "campaign string, day date, spend double")
    found = roi_tables.campaign_days(lake_spec, impressions, spend).collect()
    assert {row["campaign"]: row["category"] for row in found} == expected


REFUNDED_DAYS = 5


def with_refunds(spec: dict[str, Any]) -> None:
    spec["events"]["refund"] = {"role": "retraction"}
    conversion = spec["objectives"]["conversion"]
    conversion["retracted_by"] = {"event": "refund", "within": f"{REFUNDED_DAYS}d"}
    spec["sources"]["events"]["columns"]["retracts"] = "refunded_event"


def test_conversions_and_value_are_net_of_retracted_outcomes(spark: SparkSession) -> None:
    """Of b1's three outcomes one is retracted completely, and one in part."""
    spec = changed_spec(with_refunds)
    rows: list[tuple[str, str, int | None, float | None]]
    rows = [("i1", "b1", 1, 10.0), ("i2", "b1", 1, 30.0), ("i3", "b1", 1, 5.0)]
    rows += [("i4", "b2", 1, 7.0), ("i5", "b1", None, None)]
    columns = "impression_id string, item_advertiser_id string, label_conversion int"
    impressions = spark.createDataFrame(
        [(*row, "c0", FIRST, spec.surface_codes["feed"]) for row in rows],
        f"{columns}, value_conversion double, item_category string, day date, surface int",
    )
    late = [
        ("i1", "conversion", 0, 10.0),
        ("i2", "conversion", 1, 12.0),
        ("i2", "conversion", 1, 3.0),
    ]
    late += [("i3", "click", 0, 5.0), ("i9", "conversion", 0, 1.0)]
    retractions = spark.createDataFrame(
        late, "impression_id string, objective string, outcomes_left int, value double"
    )
    spend = spark.createDataFrame([], "campaign string, day date, spend double")
    net = roi_tables.net_of_retractions(spec, impressions, retractions)
    found = {row["campaign"]: row for row in roi_tables.campaign_days(spec, net, spend).collect()}
    assert (found["b1"]["conversions"], found["b1"]["value"]) == (2, 20.0)
    assert (found["b1"]["impressions"], found["b1"]["arrived"]) == (4, 0.75)
    assert (found["b2"]["conversions"], found["b2"]["value"]) == (1, 7.0)


def test_impressions_on_surfaces_without_the_objective_are_not_waited_for(
    spark: SparkSession,
) -> None:
    """Their labels are never known: with them, expected conversions would be scaled up for ever."""

    def only_on_feed(spec: dict[str, Any]) -> None:
        spec["objectives"]["conversion"]["surfaces"] = ["feed"]

    spec = changed_spec(only_on_feed)
    feed, reels = (spec.surface_codes[name] for name in ("feed", "reels"))
    rows = [("b1", feed, 1), ("b1", feed, None), ("b1", reels, None), ("b2", reels, None)]
    impressions = spark.createDataFrame(
        [(*row, 1.0, "c0", FIRST) for row in rows],
        "item_advertiser_id string, surface int, label_conversion int, value_conversion double, "
        "item_category string, day date",
    )
    spend = spark.createDataFrame([], "campaign string, day date, spend double")
    found = roi_tables.campaign_days(spec, impressions, spend).collect()
    assert {row["campaign"]: row["arrived"] for row in found} == {"b1": 0.5, "b2": 0.0}
    assert {row["campaign"]: row["impressions"] for row in found} == {"b1": 3, "b2": 1}


def test_days_are_built_again_as_long_as_their_outcomes_may_be_retracted(lake: Lake) -> None:
    by_day = dict.fromkeys(date_range(FIRST - timedelta(days=60), LAST), 1)
    first_days = []
    for spec in (lake.spec, changed_spec(with_refunds)):
        own = SimpleNamespace(spec=spec, rows_by_day=lambda _: by_day)
        first_days.append(first_changed_day(own, (LAST, LAST)))  # type: ignore[arg-type]
    assert first_days[0] - first_days[1] >= timedelta(days=REFUNDED_DAYS)


def test_days_can_be_loaded_and_built_again(billed: Lake, raw: Path, spark: object) -> None:
    before = campaign_days(billed)
    load_reports(billed, str(raw), (LAST, LAST), SPEND_REPORTS)
    build_campaign_days(billed, (LAST, LAST))
    pd.testing.assert_frame_equal(campaign_days(billed), before)


@pytest.mark.proof
def test_days_one_by_one_equal_all_days_at_once(
    billed: Lake, raw: Path, tmp_path: Path, spark: object
) -> None:
    """Labels of a day are final on later days; each run writes again what its labels change."""
    own = copy_of(billed, tmp_path / "lake")
    for name in ("campaign_days", "campaign_spend", "impressions"):
        shutil.rmtree(own.table_uri(name))
    complete = own.version("events")
    for day in date_range(*DAYS):
        events = own.open("events")
        if events.version() > complete:
            events.restore(complete)
        events.delete(f"day > '{day}'")
        label_impressions(own, (day, day))
        load_reports(own, str(raw), (day, day), SPEND_REPORTS)
        build_campaign_days(own, (day, day))
    pd.testing.assert_frame_equal(campaign_days(own), campaign_days(billed))


def test_curves_and_a_plan_of_the_same_total_are_written_and_the_table_is_read_as_a_file(
    lake: Lake, tmp_path: Path, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Campaigns whose conversions are known; one of them has no spend of late."""
    own = link_tables(lake, tmp_path)
    write_campaign_days(own, num_days=12)
    until = FIRST + timedelta(days=11)
    flags = ["--spec", str(spec_path), "--lake", own.root]
    assert main(["roi", "report", *flags, "--data-until", str(until)]) == 0
    assert "curves of 7 campaigns; a plan of the same total" in capsys.readouterr().out
    schema = roi_schemas.response_curves(own.spec)
    curves = arrow.snapshot(own, schema).read().to_pandas()
    assert len(curves) == 7 and (curves.low < curves.conversions).all()
    assert (curves.conversions < curves.high).all()
    assert curves.planned_spend.sum() == pytest.approx(curves.current_spend.sum())
    change = curves.planned_spend / curves.current_spend
    assert change.between(0.8 - 1e-9, 1.2 + 1e-9).all()
    value_before = (curves.value_per_conversion * curves.conversions).sum()
    assert (curves.value_per_conversion * curves.planned_conversions).sum() >= value_before
    table = read_campaign_days(Path(own.table_uri("campaign_days")), ("category",), None)
    assert table.currency == "USD" and {*curves.campaign} == {*table.days.campaigns}

    # A day that has no curves any more loses the rows of the earlier run.
    write_campaign_days(own, num_days=1)
    assert main(["roi", "report", *flags, "--data-until", str(until)]) == 0
    assert "no curves yet" in capsys.readouterr().out
    assert arrow.snapshot(own, schema).read().num_rows == 0


def test_campaigns_are_those_of_the_latest_days_with_spend_not_with_impressions() -> None:
    """Spend may be billed later than impressions are logged."""
    days = [FIRST + timedelta(days=number) for number in range(20)]
    rows = [
        {"campaign": name, "day": day, "spend": 1.0 if day < days[last] else 0.0}
        for name, last in (("early", 3), ("late", 12))
        for day in days
    ]
    usable = usable_campaigns(pa.Table.from_pylist(rows))
    assert set(usable["campaign"].to_pylist()) == {"late"}


def write_campaign_days(lake: Lake, num_days: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for campaign, day in itertools.product(range(8), range(num_days)):
        spend = 10.0 * (campaign + 1) * rng.uniform(0.7, 1.3)
        is_over = campaign == 7 and day > 3
        conversions = float(rng.poisson(spend / 4))
        rows.append({
            "campaign": f"b{campaign}", "spend": 0.0 if is_over else spend,
            "conversions": 0.0 if is_over else conversions, "value": 20.0 * conversions,
            "arrived": 1.0, "impressions": 100, "currency": "USD", "category": f"c{campaign % 2}",
            "day": FIRST + timedelta(days=day),
        })  # fmt: skip
    schema = roi_schemas.campaign_days(lake.spec)
    arrow.replace_rows(lake, schema, pa.Table.from_pylist(rows), "day IS NOT NULL", {})


def test_a_daily_run_goes_on_without_conversions(
    billed: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--spec", str(spec_path), "--lake", billed.root]
    assert main(["roi", "report", *flags, "--data-until", str(LAST)]) == 0
    assert "no campaign has a conversion" in capsys.readouterr().out
    assert not billed.exists("response_curves")


def with_incremental_shares(lake: Lake) -> Lake:
    """The lake after an upgrade to a spec with a column of the spend for incremental shares."""
    sources = lake.spec.sources
    columns = SpendColumns(campaign="campaign", spend="spend", incremental_share="lift")
    spend = sources["spend"].model_copy(update={"columns": columns})
    spec = lake.spec.model_copy(update={"sources": {**sources, "spend": spend}})
    upgrade_lake(lake.root, lake.spec, spec)
    return replace(lake, spec=spec)


def test_the_latest_incremental_share_of_a_campaign_multiplies_its_values(
    billed: Lake, raw: Path, tmp_path: Path, spark: object
) -> None:
    """b1 has a result on the first day and one on the last, whose labels are not final."""
    shutil.copytree(raw / "spend", tmp_path / "raw" / "spend")
    shares = {("b1", FIRST): "0.9", ("b1", LAST): "0.25", ("b2", FIRST): "0.5", ("b3", FIRST): " "}
    for (campaign, day), share in shares.items():
        file = tmp_path / "raw" / "spend" / f"day={day}.json.gz"
        line = json.dumps({"campaign": campaign, "spend": 1.0, "lift": share})
        file.write_bytes(file.read_bytes() + gzip.compress(f"{line}\n".encode()))
    own = with_incremental_shares(copy_of(billed, tmp_path / "lake"))
    load_reports(own, str(tmp_path / "raw"), DAYS, SPEND_REPORTS)
    build_campaign_days(own, DAYS)
    found = campaign_days(own).incremental_share.dropna()
    assert found.to_dict() == {key: float(share) for key, share in shares.items() if share != " "}
    table = read_campaign_days(Path(own.table_uri("campaign_days")), (), None)
    by_name = dict(zip(table.days.campaigns, table.incremental_share, strict=True))
    assert (by_name["b1"], by_name["b2"], by_name["b3"]) == (0.25, 0.5, 1.0)
    assert table.is_incremental.sum() == 2


def test_an_incremental_share_that_is_not_a_number_is_quarantined(
    lake: Lake, tmp_path: Path, spark: object
) -> None:
    own = with_incremental_shares(copy_of(lake, tmp_path / "lake"))
    file = tmp_path / "raw" / "spend" / f"day={FIRST}.json.gz"
    file.parent.mkdir(parents=True)
    lines = [json.dumps({"campaign": f"b{k}", "spend": 1.0}) for k in range(200)]
    lines += [json.dumps({"campaign": "b999", "spend": 1.0, "lift": x}) for x in ("high", -0.5)]
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    load_reports(own, str(tmp_path / "raw"), (FIRST, FIRST), SPEND_REPORTS)
    assert own.count_rows("campaign_spend") == 200
    rows = arrow.snapshot(own, schemas.quarantine(own.spec)).read().to_pylist()
    reasons = [row["reasons"] for row in rows if "b999" in (row["payload"] or "")]
    assert reasons == [["incremental_share is negative or not a number"]] * 2


def test_wrong_spend_is_quarantined_or_refused_and_nothing_is_written(
    lake: Lake, tmp_path: Path, spark: object
) -> None:
    own = copy_of(lake, tmp_path / "lake")
    sources = own.spec.sources
    spend = sources["spend"].model_copy(update={"path": "spend/day={day}.json"})
    own = replace(own, spec=own.spec.model_copy(update={"sources": {**sources, "spend": spend}}))
    file = tmp_path / "raw" / "spend" / f"day={FIRST}.json"
    file.parent.mkdir(parents=True)
    lines = [json.dumps({"campaign": f"b{k}", "spend": 1.0}) for k in range(200)]
    bad = json.dumps({"campaign": "b999", "spend": -1.0})
    file.write_text("\n".join([*lines, bad]))
    load_reports(own, str(tmp_path / "raw"), (FIRST, FIRST), SPEND_REPORTS)
    assert own.count_rows("campaign_spend") == 200
    version = own.version("campaign_spend")
    file.write_text("\n".join([bad] * 50 + lines))
    with pytest.raises(UserError, match="spend is negative or not finite: 50"):
        load_reports(own, str(tmp_path / "raw"), (FIRST, FIRST), SPEND_REPORTS)
    file.write_text("\n".join(lines))
    next_day = FIRST + timedelta(days=1)
    (file.parent / f"day={next_day}.json").write_text("\n".join([bad] * 5))
    with pytest.raises(UserError, match=rf"5 of 5 rows of .* of {next_day} are bad"):
        load_reports(own, str(tmp_path / "raw"), (FIRST, next_day), SPEND_REPORTS)
    assert own.version("campaign_spend") == version
