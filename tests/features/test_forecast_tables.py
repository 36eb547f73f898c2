"""The tables of a forecast: what is sampled and counted equals brute force, and leaks nothing."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable

from etl.errors import UserError
from etl.spec.units import DAY, MICROS, DaySplit
from etl.tables import (
    arrow,
    audience_schemas,
    forecast_schemas,
    label_schemas,
    model_schemas,
    roi_schemas,
    schemas,
)
from etl.tables.forecast_schemas import (
    provider_labels,
    targeting_attributes,
    user_categories,
)
from etl.tables.lake import Lake, arrow_schema
from etl.tables.maintenance import upgrade_lake
from features.forecast.build import (
    _latest_attributes,
    _latest_labels,
    build_forecast,
    scored_days,
)
from gemline import main
from ranking.forecast.tables import read_sample, read_tables, table_versions
from ranking.report.build import build_report
from tests.conftest import FIRST, LAST
from tests.world import copy_of
from training.evaluation.predictions import Predictions, evaluation_path

pytestmark = pytest.mark.spark
EVE = LAST - timedelta(days=1)
EVERYONE = 1_000_000
USER_ATTRIBUTES = ("age_band", "country", "tier")


def with_forecast(lake: Lake, **changes: Any) -> Lake:
    """The same lake with other settings of the forecast, which the tables' hash leaves out."""
    assert lake.spec.forecast
    forecast = lake.spec.forecast.model_copy(update=changes)
    return replace(lake, spec=lake.spec.model_copy(update={"forecast": forecast}))


@pytest.fixture(scope="module")
def scored(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The shared tables with drawn scores of the last two days."""
    own = copy_of(lake, tmp_path_factory.mktemp("forecast") / "lake")
    write_scores(own, [EVE, LAST], seed=0)
    return with_forecast(own, sample_rows=EVERYONE, min_users=5)


def write_scores(lake: Lake, days: list[date], seed: int) -> None:
    """Scores whose request ids number the requests of each user, so that users share ids."""
    rng = np.random.default_rng(seed)
    impressions = (
        arrow.snapshot(lake, label_schemas.impressions(lake.spec)).read(day=days).to_pandas()
    )
    names = {code: name for name, code in lake.spec.surface_codes.items()}
    rows = impressions[["impression_id", "user_id", "request_id", "item_id", "day"]].copy()
    rows["surface"] = impressions.surface.map(names)
    of_user = rows.groupby(["surface", "day", "user_id"]).request_id
    rows["request_id"] = of_user.rank("dense").astype(int).astype(str)
    for name in lake.spec.objectives:
        rows[f"p_{name}"] = rng.uniform(0.01, 0.2, len(rows))
        if lake.spec.objectives[name].value:
            rows[f"value_{name}"] = 20.0
    rows["ranker"], rows["bid"] = "drawn", 1.0
    rows["expected_value"] = rng.uniform(0.001, 0.01, len(rows))
    request = rows.groupby(["surface", "day", "user_id", "request_id"]).expected_value
    rows["rank"] = request.rank(ascending=False, method="first").astype(int) - 1
    rows["price"] = rows.expected_value
    is_excluded = rng.random(len(rows)) < 0.05
    rows.loc[is_excluded & (request.transform("size") == rows["rank"] + 1), ["rank", "price"]] = (
        None
    )
    table = pa.Table.from_pandas(rows.drop(columns="user_id"), preserve_index=False)
    arrow.replace_rows(lake, model_schemas.scores(lake.spec), table, "day IS NOT NULL", {})


@pytest.fixture(scope="module")
def built(spark: object, scored: Lake) -> Lake:
    build_forecast(scored, LAST)
    return scored


def test_tables_that_an_upgrade_keeps_can_be_read(built: Lake, tmp_path: Path) -> None:
    own = copy_of(built, tmp_path / "lake")
    assert own.spec.roi
    window = own.spec.roi.window + DAY
    roi = own.spec.roi.model_copy(update={"window": window})
    new = own.spec.model_copy(update={"roi": roi})
    plan = upgrade_lake(own.root, own.spec, new)
    assert new.hash != own.spec.hash and "forecast_sample" in plan.kept_tables
    upgraded = Lake(own.root, new)
    versions = table_versions(upgraded)
    sample = read_sample(upgraded, versions["forecast_sample"])
    assert sample.equals(read_sample(built, table_versions(built)["forecast_sample"]))
    assert read_tables(upgraded, sample, versions)


def sample_of(lake: Lake) -> pd.DataFrame:
    rows: pd.DataFrame = read_sample(lake, lake.version("forecast_sample")).to_pandas()
    return rows.sort_values([*rows.columns]).reset_index(drop=True)


def expected_rows(lake: Lake, until: date) -> pd.DataFrame:
    """The ranked impressions with their users' latest attributes, one row after the other."""
    spec = lake.spec
    events = arrow.snapshot(lake, schemas.events(spec)).read().to_pandas()
    events = events[events.type == spec.event_codes[spec.impression_type]]
    scores = arrow.snapshot(lake, model_schemas.scores(spec)).read().to_pandas()
    scores = scores[scores["rank"].notna() & (scores.day <= until)]
    versions = arrow.snapshot(lake, schemas.attributes(spec, "user")).read().to_pandas()
    versions = versions[versions.valid_from < spec.day_end(until) * MICROS["s"]]
    labels = arrow.snapshot(lake, audience_schemas.audience_labels(spec)).read().to_pandas()
    labels = labels[labels.valid_from < spec.day_end(until) * MICROS["s"]]
    latest = versions.sort_values("valid_from").groupby("user_id").last()
    rows = scores.merge(events, on=["impression_id", "day"], suffixes=("", "_event"))
    rows = rows.merge(latest, left_on="user_id", right_index=True, how="left", suffixes=("", "_u"))
    found = pd.DataFrame({"user": rows.user_id, "target_surface": rows.surface})
    for name in USER_ATTRIBUTES:
        found[f"target_{name}"] = rows[f"attr_{name}"].fillna("unknown")
    for name in ("device", "connection"):
        found[f"target_{name}"] = rows[f"ctx_{name}"].fillna("unknown")
    found["target_hour"] = (rows.event_ts // MICROS["s"] // 3600 % 24).astype(int)
    found["impression_day"], found["value"] = rows.day, rows.expected_value
    keys = ["surface", "day", "user_id", "request_id"]
    for name, of in provider_labels(spec).items():
        known = labels[(labels.audience == of.audience) & (labels.provider == of.provider)]
        latest_label = known.sort_values("valid_from").groupby("user_id").label.last()
        found[f"target_{name}"] = rows.user_id.map(latest_label).fillna("unknown")
    by_request = rows.groupby(keys)
    for name in spec.objectives:
        found[f"p_{name}"] = by_request[f"p_{name}"].transform("mean")
    ordered = rows.sort_values([*keys, "rank"])
    found["value_above"] = ordered.groupby(keys).expected_value.shift(1)
    return found


def test_a_sample_of_everyone_has_each_ranked_impression_as_brute_force_does(built: Lake) -> None:
    sample, expected = sample_of(built), expected_rows(built, LAST)
    assert len(sample) == len(expected) > 500 and (sample.probability == 1).all()
    assert sample.sampled_user.nunique() == expected.user.nunique()
    columns = [name for name in expected.columns if name != "user"]
    order = ["value", "target_hour"]
    pd.testing.assert_frame_equal(
        sample[columns].sort_values(order).reset_index(drop=True),
        expected[columns].sort_values(order).reset_index(drop=True),
        check_dtype=False,
    )


def test_counts_of_pairs_and_sketches_equal_brute_force(built: Lake) -> None:
    sample = sample_of(built)
    margins = (
        arrow.snapshot(built, forecast_schemas.forecast_margins(built.spec)).read().to_pandas()
    )
    names = list(targeting_attributes(built.spec))
    pairs = margins.set_index(["attribute_a", "value_a", "attribute_b", "value_b"])
    of_users, seen = user_categories(built.spec), 0
    for a, b in itertools.combinations_with_replacement(names, 2):
        keys = list(dict.fromkeys([f"target_{a}", f"target_{b}"]))
        for values, group in sample.groupby(keys):
            found = pairs.loc[a, str(values[0]), b, str(values[-1])]
            assert found.impressions == len(group)
            if {a, b} <= {*of_users}:
                assert found.users == group.sampled_user.nunique()
            else:
                assert pd.isna(found.users)
            seen += 1
    assert seen == len(margins) > 200
    tables = read_tables(
        built, read_sample(built, built.version("forecast_sample")), table_versions(built)
    )
    for device, group in sample.groupby("target_device"):
        estimate = tables.sketches.users({"device": frozenset({str(device)})})
        assert estimate and estimate.value == group.sampled_user.nunique()


def test_a_day_needs_no_scores_of_surfaces_without_impressions(
    scored: Lake, tmp_path: Path
) -> None:
    own = copy_of(scored, tmp_path / "lake")
    surface, *_ = own.spec.ad_surfaces
    DeltaTable(own.table_uri("scores")).delete(f"surface = '{surface}' AND day = '{EVE}'")
    shown = {*itertools.product((EVE, LAST), own.spec.ad_surfaces)}
    assert scored_days(own, LAST, shown) == [LAST]
    assert scored_days(own, LAST, shown - {(EVE, surface)}) == [EVE, LAST]
    assert scored_days(own, LAST + timedelta(days=90), set()) == [LAST], "no counts of these days"


def test_a_small_sample_has_all_rows_of_its_users_whose_weights_add_up_to_everyone(
    built: Lake, tmp_path: Path
) -> None:
    everyone = sample_of(built)
    own = replace(copy_of(built, tmp_path / "lake"), spec=built.spec)
    small = with_forecast(own, sample_rows=300)
    build_forecast(small, LAST)
    sample = sample_of(small)
    assert 200 < len(sample) < 450 and sample.probability.between(1e-9, 1).all()
    assert sample.probability.nunique() > 5  # users are not sampled alike
    rows_of_users = everyone.groupby("sampled_user").size()
    assert (
        sample.groupby("sampled_user").size() == rows_of_users[sample.sampled_user.unique()]
    ).all()
    assert (1 / sample.probability).sum() == pytest.approx(len(everyone), rel=0.25)
    build_forecast(small, LAST)
    pd.testing.assert_frame_equal(sample_of(small), sample)  # the same users every time


def test_attributes_of_too_many_values_are_refused(
    built: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of pairs of values are a square matrix in memory."""
    versions = table_versions(built)
    monkeypatch.setattr("features.forecast.build.MAX_VALUES", 30)
    with pytest.raises(
        UserError, match=r"hour 2\d of them.* leave hour out of forecast.attributes"
    ):
        build_forecast(built, LAST)
    assert table_versions(built) == versions


def test_nothing_after_the_window_is_seen(scored: Lake, spark: object, tmp_path: Path) -> None:
    """Attributes that become valid when the window ends are unseen, as are later scores."""
    lake = copy_of(scored, tmp_path / "lake")
    lake = replace(lake, spec=scored.spec)
    build_forecast(lake, EVE)
    before = sample_of(lake)
    assert set(before.impression_day) == {EVE}
    schema = schemas.attributes(lake.spec, "user")
    stored = arrow.snapshot(lake, schema).read().to_pandas()
    later = stored.drop_duplicates("user_id").assign(
        valid_from=lake.spec.day_end(EVE) * MICROS["s"], attr_country="ZZ", day=LAST
    )
    both = pa.Table.from_pandas(pd.concat([stored, later]), preserve_index=False)
    arrow.replace_rows(lake, schema, both, "day IS NOT NULL", {})
    write_scores(lake, [EVE, LAST], seed=0)
    build_forecast(lake, EVE)
    pd.testing.assert_frame_equal(sample_of(lake), before)
    build_forecast(lake, LAST)
    assert "ZZ" in set(sample_of(lake).target_country)


def test_of_attributes_and_labels_of_one_time_those_of_the_latest_day_count(
    scored: Lake, spark: object, tmp_path: Path
) -> None:
    lake = replace(copy_of(scored, tmp_path / "lake"), spec=scored.spec)
    for schema, key, column in (
        (schemas.attributes(lake.spec, "user"), ["user_id"], "attr_country"),
        (
            audience_schemas.audience_labels(lake.spec),
            ["user_id", "audience", "provider"],
            "label",
        ),
    ):
        stored = arrow.snapshot(lake, schema).read().to_pandas()
        users = stored.drop_duplicates(key)
        time = lake.spec.day_end(LAST) * MICROS["s"] - 1
        late, early = (
            users.assign(**{"valid_from": time, column: value, "day": day})
            for value, day in (("55+", LAST), ("18-24", EVE))
        )
        half = len(users) // 2  # in both orders
        parts = [stored, late[:half], early, late[half:]]
        table = pa.Table.from_pandas(pd.concat(parts), preserve_index=False)
        arrow.replace_rows(lake, schema, table, "day IS NOT NULL", {})
    attributes = _latest_attributes(lake, LAST, lake.version("attributes_user")).toPandas()
    assert set(attributes.attr_country) == {"55+"}
    labels = _latest_labels(lake, LAST, lake.version("audience_labels")).toPandas()
    for name in provider_labels(lake.spec):
        assert set(labels[f"label_{name}"].dropna()) == {"55+"}


def test_readers_follow_the_versions_of_one_build(built: Lake, tmp_path: Path) -> None:
    own = replace(copy_of(built, tmp_path / "lake"), spec=built.spec)
    versions = table_versions(own)
    assert versions["forecast_margins"] == own.version("forecast_margins")
    schema = forecast_schemas.forecast_margins(own.spec)
    rows = arrow.snapshot(own, schema).read()
    arrow.replace_rows(own, schema, rows, "day IS NOT NULL", {})  # as a build that was cut off
    assert table_versions(own) == versions


def test_reach_in_the_target_by_labels_is_that_by_the_simulated_ages(
    built: Lake, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels are bought for two ages each, which 37 and 47 % of 73 users have.

    The audits estimate the rates within 0.12, on average within 0.06, and the intervals of the
    rates and of the users in the target contain the truth.
    """
    own = copy_of(built, tmp_path / "lake")
    spec = yaml.safe_load(spec_path.read_text())
    spec["forecast"]["min_users"] = 5
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    flags = ["--spec", str(path), "--lake", own.root]
    assert main(["audience", "fit", *flags, "--data-until", str(LAST)]) == 0
    users, errors = expected_rows(built, LAST).drop_duplicates("user"), []
    classes = own.spec.audiences["age_band"].classes
    for name, target in itertools.product(provider_labels(own.spec), (classes[:2], classes[3:])):
        capsys.readouterr()
        targeting = f"{name} in ('{target[0]}', '{target[1]}')"
        ask = ["forecast", "ask", *flags, "--targeting", targeting, "--in-target", *target]
        assert main([*ask, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        is_in_target = users[users[f"target_{name}"].isin(target)].target_age_band.isin(target)
        rate, in_target = answer["in_target_rate"], answer["users_in_target"]
        assert rate["low"] <= is_in_target.mean() <= rate["high"]
        assert in_target["low"] <= is_in_target.sum() <= in_target["high"]
        errors.append(abs(rate["value"] - is_in_target.mean()))
        assert is_in_target.mean() > users.target_age_band.isin(target).mean() + 0.2
    assert len(errors) == 6 and max(errors) < 0.12 and np.mean(errors) < 0.06


def test_the_report_has_a_section_for_each_kind_of_tables_for_advertisers(
    built: Lake, spec_path: Path, tmp_path: Path
) -> None:
    """Audiences, forecasts and return on spend, in this order; none without its tables."""
    own = replace(copy_of(built, tmp_path / "lake"), spec=built.spec)
    split = DaySplit(
        train_first=FIRST, train_last=FIRST, calibration=None, test_first=LAST, test_last=LAST,
        data_until=LAST,
    )  # fmt: skip
    shape = (4, len(own.spec.objectives))
    predictions = Predictions(
        objectives=tuple(own.spec.objectives),
        impression_ids=np.array(["i0", "i1", "i2", "i3"], object),
        user_hashes=np.arange(4),
        surface=np.full(4, own.spec.surface_codes["feed"]),
        probabilities=np.full(shape, 0.5),
        labels=np.resize(np.array([0, 1], np.float32), shape),
        label_mask=np.ones(shape, bool),
    )
    predictions.write(evaluation_path(own.root, "gem"), split)

    def sections() -> list[str]:
        page = build_report(own, str(tmp_path), split).read_text()
        found = re.findall(r"<h2>(.*?)</h2>", page)
        return [title for title in found if re.match("Audience|Forecast|Return on spend", title)]

    assert sections() == ["Forecast of reach and performance"]
    schema = roi_schemas.response_curves(own.spec)
    row = {"campaign": "b1", "currency": "USD", "reason": "keep b1", "day": LAST}
    row |= dict.fromkeys((name for name, kind in schema.columns.items() if kind == "double"), 2.0)
    curves = pa.Table.from_pylist([row], schema=arrow_schema(schema))
    arrow.replace_rows(own, schema, curves, f"day = '{LAST}'", {})
    flags = ["--spec", str(spec_path), "--lake", own.root, "--data-until", str(LAST)]
    assert main(["audience", "fit", *flags]) == 0
    everything = [
        "Audience age_band: labels of data providers",
        "Forecast of reach and performance",
        "Return on spend",
    ]
    assert sections() == everything
    shutil.rmtree(Path(own.root, "forecast_sample"))
    assert sections() == [everything[0], everything[2]]


@pytest.fixture
def not_scored(lake: Lake, tmp_path: Path) -> Lake:
    return copy_of(lake, tmp_path / "lake")


def test_a_lake_without_scores_or_a_forecast_is_refused(
    not_scored: Lake, spec_path: Path, spark: object, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--spec", str(spec_path), "--lake", not_scored.root]
    assert main(["forecast", "ask", *flags]) == 2
    assert "run `gemline forecast build` first" in capsys.readouterr().err
    write_scores(not_scored, [LAST], seed=0)
    with pytest.raises(UserError, match=r"no day until .* has scores of all ad surfaces"):
        build_forecast(not_scored, EVE)
