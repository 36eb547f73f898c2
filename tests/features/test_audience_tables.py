"""Counts of impressions by labels equal brute force, and see only labels delivered before them."""

import json
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyspark.sql import SparkSession

from etl.attribute_versions import build_version_snapshots
from etl.reports import AUDIENCE_REPORTS, load_reports
from etl.tables import audience_schemas, schemas, spark_io
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake, arrow_schema, last_commit_metadata
from etl.tables.table_schema import TableSchema
from features.audience.counts import count_audiences, join_labels
from gemline import main
from tests.conftest import FIRST, LAST
from tests.pipeline import rows

pytestmark = pytest.mark.spark
AUDIENCE, DAYS = "age_band", (FIRST, LAST)


def impressions_of(lake: Lake) -> list[dict[str, object]]:
    names = ["event_id", "user_id", "item_id", "event_ts", "type", "day"]
    code = lake.spec.event_codes[lake.spec.impression_type]
    events = snapshot(lake, schemas.events(lake.spec)).read(names).to_pylist()
    return [event for event in events if event["type"] == code]


def counts_by_brute_force(lake: Lake) -> Counter[tuple[object, ...]]:
    """Impressions by day, campaign and the latest label of each provider strictly before them."""
    items = sorted(rows(lake, "attributes_item"), key=lambda row: -row["valid_from"])
    campaign = {row["item_id"]: row["attr_advertiser_id"] for row in items}
    labels: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row in rows(lake, "audience_labels"):
        key = row["user_id"], row["provider"]
        labels.setdefault(key, []).append((row["valid_from"], row["label"]))
    counts: Counter[tuple[object, ...]] = Counter()
    for event in impressions_of(lake):
        seen = []
        for provider in lake.spec.audiences[AUDIENCE].providers:
            of_user = labels.get((str(event["user_id"]), provider), [])
            earlier = [label for label in of_user if label[0] < event["event_ts"]]  # type: ignore[operator]
            seen.append(max(earlier, default=(0, "unknown"))[1])
        counts[event["day"], campaign[event["item_id"]], tuple(seen)] += 1
    return counts


def test_counts_equal_brute_force(lake: Lake) -> None:
    stored = {
        (row["day"], row["campaign"], tuple(row["labels"])): row["impressions"]
        for row in rows(lake, "audience_counts")
    }
    assert len(stored) > 100
    assert stored == dict(counts_by_brute_force(lake))


def write_raw(folder: Path, days: Iterable[object], **files: list[dict[str, object]]) -> str:
    """Raw labels and audits, each in the file of its `day`."""
    for source in ("audience_labels", "audits"):
        for day in days:
            path = folder / source / f"day={day}.json"
            of_day = [row for row in files.get(source, []) if row["day"] == day]
            path.parent.mkdir(parents=True, exist_ok=True)
            if of_day:
                path.write_text("".join(json.dumps(row, default=str) + "\n" for row in of_day))
    return str(folder)


def uncompressed(lake: Lake) -> Lake:
    """The lake with sources that read uncompressed files."""
    dump = lake.spec.model_dump()
    for name in ("audience_labels", "audits"):
        dump["sources"][name]["path"] = f"{name}/day={{day}}.json"
    return Lake(lake.root, type(lake.spec).model_validate(dump))


def test_a_label_counts_only_for_impressions_after_its_delivery(
    own: Lake, tmp_path: Path, spark: object
) -> None:
    """One at the time of an impression, and one delivered later for an earlier time, do not."""
    lake = uncompressed(own)
    event = max(impressions_of(lake), key=lambda event: str(event["event_ts"]))
    ts, user, day = int(str(event["event_ts"])), event["user_id"], event["day"]
    assert ts % 1000 == 0

    def label(name: str, provider: str, ms: int, day_of_file: object) -> dict[str, object]:
        row = {"provider": provider, "user_id": user, "age_band": name, "labelled_time": ms}
        return row | {"day": day_of_file}

    labels = [
        label("18-24", "acme", ts // 1000 - 1, day),
        label("25-34", "acme", ts // 1000, day),
        label("35-44", "bluefin", ts // 1000 - 1, LAST + timedelta(days=1)),
        label("45-54", "corvid", ts // 1000 - 86_400_000 * 40, FIRST),
        label("18-24", "corvid", ts // 1000 - 86_400_000 * 50, FIRST),
        label("55+", "bluefin", ts // 1000 - 20, day),
        {k: v for k, v in label("", "bluefin", ts // 1000 - 10, day).items() if k != "age_band"},
    ]
    days = [FIRST + timedelta(days=n) for n in range((LAST - FIRST).days + 2)]
    raw = write_raw(tmp_path / "raw", days, audience_labels=labels)
    load_reports(lake, raw, (FIRST, days[-1]), AUDIENCE_REPORTS)
    count_audiences(lake, DAYS)
    seen = {
        tuple(row["labels"])
        for row in rows(lake, "audience_counts")
        if row["day"] == day and set(row["labels"]) != {"unknown"}
    }
    assert ("18-24", "unknown", "45-54") in seen
    assert not any("25-34" in labels or "35-44" in labels for labels in seen)
    backdated = [row for row in rows(lake, "audience_labels") if row["provider"] == "corvid"]
    midnight = int(datetime(FIRST.year, FIRST.month, FIRST.day, tzinfo=UTC).timestamp()) * 10**6
    assert [row["valid_from"] for row in backdated] == [midnight]


def test_of_labels_of_one_time_that_of_the_latest_day_counts(spark: SparkSession) -> None:
    labels = [
        (f"u{user}", 10, "acme", label, day)
        for user in range(20)
        for label, day in ((("old", FIRST), ("new", LAST))[:: 1 if user % 2 else -1])
    ]
    impressions = [(f"u{user}", 11, "b1", LAST) for user in range(20)]
    labelled = join_labels(
        spark.createDataFrame(impressions, "user_id string, ts long, campaign string, day date"),
        spark.createDataFrame(
            labels, "user_id string, ts long, provider string, label string, day date"
        ),
        ("acme",),
    )
    assert [row["labels"] for row in labelled.collect()] == [["new"]] * 20


def test_counts_of_a_day_do_not_depend_on_the_days_that_are_counted_with_it(
    own: Lake, spark: object
) -> None:
    """An impression whose device has a fast clock occurs on the day after it has landed."""
    eve, midnight = LAST - timedelta(days=1), own.spec.day_start(LAST) * 10**6
    code = own.spec.event_codes[own.spec.impression_type]
    logged = schemas.events(own.spec)
    events = snapshot(own, logged).read(day=eve).to_pylist()
    ads = {ad["item_id"] for ad in rows(own, "attributes_item") if ad["attr_advertiser_id"]}
    row = next(row for row in events if row["type"] == code and row["item_id"] in ads)
    row |= {"event_ts": midnight + 20 * 60 * 10**6, "ingest_ts": midnight - 1}
    replace(own, logged, events, eve)
    delivered = audience_schemas.audience_labels(own.spec)
    label = {
        "audience": AUDIENCE, "provider": "acme", "user_id": row["user_id"], "label": "new",
        "valid_from": midnight, "day": LAST,
    }  # fmt: skip
    replace(own, delivered, [*snapshot(own, delivered).read(day=LAST).to_pylist(), label], LAST)
    count_audiences(own, (eve, eve))
    alone = [row for row in rows(own, "audience_counts") if row["day"] == eve]
    count_audiences(own, (eve, LAST))
    assert [row for row in rows(own, "audience_counts") if row["day"] == eve] == alone


def test_impressions_are_counted_for_the_campaign_that_was_known_on_their_day(
    own: Lake, spark: object
) -> None:
    """Versions that arrive on a day may hold from a later one on, after those that follow."""
    eve, next_start = LAST - timedelta(days=1), own.spec.day_end(LAST)
    schema = schemas.attributes(own.spec, "item")
    stored = rows(own, "attributes_item")
    shown = {row["item_id"] for row in rows(own, "impressions") if row["day"] == eve}
    ad = next(row for row in stored if row["item_id"] in shown and row["attr_advertiser_id"])
    others = [row for row in stored if row["item_id"] != ad["item_id"]]
    planned = ad | {"day": eve, "valid_from": next_start * 10**6}
    current = ad | {"day": LAST, "valid_from": own.spec.day_start(LAST) * 10**6}
    current |= {"attr_advertiser_id": "another"}

    def counts_on_eve(versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for day in {row["day"] for row in stored} | {eve, LAST}:
            replace(own, schema, [row for row in others + versions if row["day"] == day], day)
        build_version_snapshots(own, "item", FIRST)
        count_audiences(own, (eve, eve))
        return [row for row in rows(own, "audience_counts") if row["day"] == eve]

    assert counts_on_eve([planned]) == counts_on_eve([planned, current]) == counts_on_eve([])


def replace(lake: Lake, schema: TableSchema, new_rows: list[dict[str, Any]], day: date) -> None:
    """Replace the rows of a day."""
    table = pa.Table.from_pylist(new_rows, arrow_schema(schema))
    frame = SparkSession.active().createDataFrame(table, schema.ddl)
    spark_io.replace_partitions(lake, schema, frame, f"day = '{day}'", {})


def test_a_day_can_be_loaded_and_counted_again(own: Lake, raw: Path, spark: object) -> None:
    before = {name: rows(own, name) for name in ("audience_labels", "audits", "audience_counts")}
    assert all(before.values())
    load_reports(own, str(raw), (FIRST + timedelta(days=1), LAST), AUDIENCE_REPORTS)
    count_audiences(own, (FIRST + timedelta(days=1), LAST))
    for name, stored in before.items():
        assert rows(own, name) == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 0.5}, "campaign b1 on 2026-01-01 has shares that sum to 0.700, not 1"),
        ({"panel": 60}, "campaign b1 on 2026-01-01 has counts from 50 to 60"),
        ({"age_band": "13-17"}, "rows of .* are bad .unknown class: 1"),
        ({"share": -0.1}, "rows of .* are bad .share is not between 0 and 1: 1"),
    ],
)
def test_wrong_audits_are_refused_and_nothing_is_written(
    own: Lake, tmp_path: Path, spark: object, change: dict[str, object], message: str
) -> None:
    lake = uncompressed(own)
    shares = {"18-24": 0.8, "25-34": 0.2}
    audits = [
        {"campaign": "b1", "age_band": name, "share": share, "panel": 50, "day": FIRST}
        for name, share in shares.items()
    ]
    audits[0] |= change
    raw = write_raw(tmp_path / "raw", [FIRST], audits=audits)
    versions = [
        lake.version(schema(lake.spec).name) for schema in audience_schemas.AUDIENCE_SCHEMAS[:3]
    ]
    with pytest.raises(Exception, match=message):
        load_reports(lake, raw, (FIRST, FIRST), AUDIENCE_REPORTS)
    assert versions == [
        lake.version(schema(lake.spec).name) for schema in audience_schemas.AUDIENCE_SCHEMAS[:3]
    ]


def test_the_command_refuses_shares_that_do_not_sum_to_one(
    own: Lake, tmp_path: Path, spark: object, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(uncompressed(own).spec.model_dump(mode="json")))
    audit = {"campaign": "b1", "age_band": "18-24", "share": 0.4, "panel": 50, "day": FIRST}
    raw = write_raw(tmp_path / "raw", [FIRST], audits=[audit])
    names = ("audience_labels", "audits", "audience_counts", "quarantine")
    versions = {name: own.version(name) for name in names}
    flags = ["--spec", str(spec), "--lake", own.root, "--raw", raw, "--days", str(FIRST)]
    assert main(["audience", "count", *flags]) == 2
    message = f"campaign b1 on {FIRST} has shares that sum to 0.400, not 1: report each class once"
    assert message in capsys.readouterr().err
    assert {name: own.version(name) for name in names} == versions


def test_estimates_of_simulated_providers_are_close_to_the_truth(
    own: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`audience fit` and `audience choose` on simulated logs, whose users' age bands are known."""
    flags = ["--spec", str(spec_path), "--lake", own.root, "--data-until", str(LAST)]
    assert main(["audience", "fit", *flags]) == 0
    truth, shares = true_precision(own), true_shares(own)
    errors, errors_of_shares = [], []
    for row in rows(own, "audience_quality"):
        true_rate = truth[row["provider"], row["label"]][row["true_class"]]
        errors.append(abs(row["precision"] - true_rate))
        errors_of_shares.append(abs(shares[row["true_class"]] - true_rate))
        assert row["impressions"] >= own.spec.audiences[AUDIENCE].min_count
        assert 0 <= row["low"] <= row["precision"] <= row["high"] <= 1
    assert len(errors) > 40 and sum(errors) < sum(errors_of_shares) / 2
    inputs = {name: own.version(name) for name in ("audits", "audience_counts")}
    commit = last_commit_metadata(own.open("audience_quality"))
    assert commit["inputs"] == inputs

    wanted = ["--audience", AUDIENCE, "--target", "18-24", "--impressions", "100", "--json"]
    capsys.readouterr()
    assert main(["audience", "choose", *flags, *wanted]) == 0
    chosen = json.loads(capsys.readouterr().out)
    best = chosen["purchases"][0]
    assert best["rate"] == max(purchase["rate"] for purchase in chosen["purchases"])
    assert best["labels"][0] == "18-24" and best["rate"] > 1.5 * chosen["rate_of_everyone"]
    assert main(["audience", "choose", *flags, *wanted[:3], "teen", *wanted[4:]]) == 2
    assert "the target names teen; the audited classes are 18-24" in capsys.readouterr().err
    assert main(["audience", "choose", *flags, "--audience", "income", *wanted[2:]]) == 2
    assert "no audience is called income; known: age_band" in capsys.readouterr().err
    before = [*flags[:-1], str(FIRST - timedelta(days=60))]
    assert main(["audience", "choose", *before, *wanted]) == 2
    assert f"audience {AUDIENCE} has no audits until" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refusal:
        main(["audience", "choose", *flags, *wanted[:5], "0"])
    assert refusal.value.code == 2


def true_shares(lake: Lake) -> dict[str, float]:
    """The shares of the age bands among the users of the impressions."""
    ages = {row["user_id"]: row["attr_age_band"] for row in rows(lake, "attributes_user")}
    found = Counter(ages[str(event["user_id"])] for event in impressions_of(lake))
    return {name: found[name] / found.total() for name in lake.spec.audiences[AUDIENCE].classes}


def true_precision(lake: Lake) -> dict[tuple[str, str], dict[str, float]]:
    """P(age band | label) among the impressions, by provider and label."""
    ages = {row["user_id"]: row["attr_age_band"] for row in rows(lake, "attributes_user")}
    labels = {
        (row["user_id"], row["provider"]): row["label"] for row in rows(lake, "audience_labels")
    }
    counts: dict[tuple[str, str], Counter[str]] = {}
    for event in impressions_of(lake):
        user = str(event["user_id"])
        for provider in lake.spec.audiences[AUDIENCE].providers:
            label = labels.get((user, provider), "unknown")
            counts.setdefault((provider, label), Counter())[ages[user]] += 1
    return {
        key: {name: found[name] / found.total() for name in lake.spec.audiences[AUDIENCE].classes}
        for key, found in counts.items()
    }
