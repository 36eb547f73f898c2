"""Off-site conversions without ids, which follow the latest touch of a user and an advertiser."""

import json
import math
import random
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dags.pipeline import data_steps
from dags.steps import PipelinePaths, earlier_steps
from etl.attributes import load_attributes
from etl.erasure.erased_users import record_erased_users
from etl.errors import UserError
from etl.ingest.arrival import day_file_states, ingested_file_states
from etl.ingest.named_events import NO_TOUCH, _drop_automated_users
from etl.ingest.reprocess import reprocess_quarantine
from etl.ingest.run import ingest
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.etl.test_named_events import DAYS, Record, write_logs
from tests.oracle.disorder import day_start
from tests.pipeline import rows

pytestmark = pytest.mark.spark

WINDOW_SECONDS = 10 * 3600
SPEC = """
name: pixel
buckets: 2
allowed_lateness: 1d
surfaces: {home: {}, search: {}}
events: {shown: {role: impression}, click: {role: outcome}, buy: {role: outcome}}
objectives: {buy: {event: buy, window: 1d}}
rank_by: buy
attributes: {item: {advertiser: {type: categorical}}}
sequences: {behaviour: {}}
counters: {windows: [1d], events: [shown], keys: [[user]]}
sources:
  ads: {kind: attributes, entity: item, format: json, path: "ads/{day}.json", time_unit: s,
        key: ad, valid_from: since, optional: true}
  logged:
    kind: event_log
    format: json
    path: logged/{day}.json
    time_unit: s
    delay: 1h
    columns: {event_id: id, user: user, item: item, surface: surface, type: type, event_time: ts,
              ingest_time: ingest, impression: impression}
  pixel:
    kind: event_log
    format: json
    path: pixel/{day}.json
    time_unit: s
    event: buy
    touch: click
    touch_key: advertiser
    touch_window: 10h
    columns: {event_id: id, user: user, touch_key: advertiser, event_time: ts, ingest_time: ingest,
              value: value}
"""
BY_ITEM = (
    ("touch_key: advertiser\n", "touch_key: item\n"),
    ("touch_key: advertiser,", "item: ad,"),
)


def write_spec(folder: Path, *replacements: tuple[str, str]) -> Path:
    text = SPEC
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "spec.yaml"
    path.write_text(text)
    return path


def random_day_time(rng: random.Random, day: date) -> int:
    return day_start(day, "UTC") + rng.randrange(86_400)


def random_ads(rng: random.Random) -> list[Record]:
    """Versions of items, some of which change their advertiser or become known late."""
    return [
        {"ad": f"a{ad}", "advertiser": f"b{rng.randrange(3)}", "since": random_day_time(rng, day),
         "day": day}
        for ad in range(8)
        for day in sorted(rng.sample(DAYS, rng.choice((1, 1, 2))))
    ]  # fmt: skip


def random_clicks(rng: random.Random) -> list[Record]:
    """Clicks with their impressions; some have a copy on the same day or on the next."""
    records = []
    for number in range(160):
        day = rng.choice(DAYS)
        ts = random_day_time(rng, day)
        common = {"user": f"u{rng.randrange(4)}", "item": f"a{rng.randrange(9)}",
                  "surface": rng.choice(("home", "search"))}  # fmt: skip
        impression = {"id": f"i{number}", "type": "shown", "ts": ts - 9, "ingest": ts, "day": day}
        records.append(impression | common | {"impression": f"i{number}"})
        for copy in range(rng.choice((1, 1, 2))):
            arrival = DAYS[min(DAYS.index(day) + copy * rng.randrange(2), len(DAYS) - 1)]
            ingest_ts = max(ts, day_start(arrival, "UTC")) + rng.randrange(7200)
            click = {"id": f"k{number}", "type": "click", "ts": ts, "ingest": ingest_ts}
            named = rng.choice((f"i{number}", None))
            records.append(click | common | {"impression": named, "day": arrival})
    return records


def random_conversions(rng: random.Random) -> list[Record]:
    return [
        {"id": f"p{number}", "user": f"u{rng.randrange(5)}", "advertiser": f"b{rng.randrange(4)}",
         "ad": f"a{rng.randrange(9)}", "ts": ts, "ingest": ts + rng.randrange(3600), "value": 3.5,
         "day": day}
        for number in range(120)
        for day in [rng.choice(DAYS)]
        for ts in [random_day_time(rng, day)]
    ]  # fmt: skip


def first_copies(records: list[Record]) -> list[Record]:
    first: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: (r["day"], r["ingest"])):
        first.setdefault(record["id"], record)
    return list(first.values())


def followed_touches(
    clicks: list[Record], ads: list[Record], conversion: Record, by_item: bool
) -> Iterator[Record]:
    """The touches that a conversion may belong to, with the second since which they are known."""
    for click in clicks:
        versions = [v for v in ads if v["ad"] == click["item"]]
        first = min(
            versions, key=lambda v: max(v["since"], day_start(v["day"], "UTC")), default=None
        )
        known_since = first["since"] if first else 0
        if by_item:
            is_same, known_since = conversion["ad"] == click["item"], 0
        else:
            is_same = bool(first and first["advertiser"] == conversion["advertiser"])
        is_in_window = 0 <= conversion["ts"] - click["ts"] <= WINDOW_SECONDS
        has_arrived = click["day"] <= conversion["day"]
        is_known = known_since <= day_start(conversion["day"], "UTC") + 86_400
        is_known &= by_item or bool(first and first["day"] <= conversion["day"])
        if click["user"] == conversion["user"] and all(
            (is_same, is_in_window, has_arrived, is_known)
        ):
            visible = max(click["ingest"] + 3600, known_since, day_start(click["day"], "UTC"))
            yield click | {"visible": visible}


@pytest.mark.parametrize("by_item", [False, True])
def test_conversions_have_the_fields_of_the_last_touch(
    spark: object, tmp_path: Path, by_item: bool
) -> None:
    """For any split of days into runs; they are not visible before what they follow."""
    rng = random.Random(11 + by_item)
    ads, logged, conversions = random_ads(rng), random_clicks(rng), random_conversions(rng)
    raw = write_logs(tmp_path / "raw", ads=ads, logged=logged, pixel=conversions)
    spec = load_spec(write_spec(tmp_path, *(BY_ITEM if by_item else ())))
    lakes = []
    for name, spans in {"range": [(0, 2)], "daily": [(0, 0), (1, 1), (2, 2)]}.items():
        lake = Lake(str(tmp_path / name), spec)
        for first, last in spans:
            load_attributes(lake, raw, (DAYS[first], DAYS[last]))
            ingest(lake, raw, (DAYS[first], DAYS[last]))
        lakes.append(lake)
    for table in ("events", "excluded_events", "quarantine", "ingest_metrics"):
        assert rows(lakes[1], table) == rows(lakes[0], table), table

    clicks = first_copies([record for record in logged if record["type"] == "click"])
    stored = {e["event_id"]: e for e in rows(lakes[0], "events") if e["log"] == "pixel"}
    quarantined = {row["payload"]: row["reasons"] for row in rows(lakes[0], "quarantine")}
    delayed = 0
    for conversion in conversions:
        touches = followed_touches(clicks, ads, conversion, by_item)
        touch = max(touches, key=lambda t: (t["ts"], t["id"]), default=None)
        event = stored.pop(conversion["id"], None)
        if touch is None:
            assert event is None
            continue
        assert event, conversion
        assert event["item_id"] == touch["item"] and event["user_id"] == touch["user"]
        assert event["surface"] == spec.surface_codes[touch["surface"]]
        assert event["impression_id"] == touch["impression"]
        assert event["visible_ts"] == max(conversion["ingest"], math.ceil(touch["visible"]))
        delayed += touch["visible"] > conversion["ingest"]
    assert not stored and delayed > 3
    assert 10 < len(quarantined) < len(conversions) - 10
    assert {tuple(reasons) for reasons in quarantined.values()} == {(NO_TOUCH,)}


def test_conversions_are_found_once_their_click_is_valid(spark: object, tmp_path: Path) -> None:
    rng = random.Random(3)
    ads, logged, conversions = random_ads(rng), random_clicks(rng), random_conversions(rng)
    raw = write_logs(tmp_path / "raw", ads=ads, logged=logged, pixel=conversions)
    days = DAYS[0], DAYS[2]
    unknown_surface = write_spec(
        tmp_path, ("home: {}", "home: {logged_as: start}"), ("10h\n", "10h\n    # home\n")
    )
    text = unknown_surface.read_text().replace("buckets: 2", "buckets: 2\nmax_bad_record_rate: 0.9")
    unknown_surface.write_text(text)
    lake = Lake(str(tmp_path / "lake"), load_spec(unknown_surface))
    load_attributes(lake, raw, days)
    ingest(lake, raw, days)
    before = len(rows(lake, "quarantine"))
    corrected = Lake(lake.root, load_spec(write_spec(tmp_path)))
    reprocess_quarantine(corrected, days)
    rebuilt = Lake(str(tmp_path / "rebuilt"), corrected.spec)
    load_attributes(rebuilt, raw, days)
    ingest(rebuilt, raw, days)
    assert len(rows(corrected, "quarantine")) < before
    assert {row["reasons"][0] for row in rows(rebuilt, "quarantine")} == {NO_TOUCH}
    named = {e["event_id"]: e for e in rows(corrected, "events") if e["log"] == "pixel"}
    assert named.keys() <= {e["event_id"] for e in rows(rebuilt, "events")}
    assert len(named) == len(conversions) - len(rows(corrected, "quarantine"))


def test_touches_of_placeholder_users_and_of_erased_users_are_not_followed(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also where the raw logs of an erased user are read again."""
    day, start = DAYS[0], day_start(DAYS[0], "UTC")
    ads = [{"ad": "a", "advertiser": "b", "since": start, "day": day}]
    common = {"item": "a", "surface": "home", "day": day}
    logged = [
        common | {"id": f"{user}{n}", "user": user, "type": type_, "ts": ts, "ingest": ts}
        for user in ("erased", "person", "0")
        for n in range(5 if user == "0" else 1)
        for type_, ts in [("click", start + 60 + n)]
    ]
    shown = {"id": "i", "user": "x", "type": "shown", "ts": start, "ingest": start}
    pixel = [
        {"id": f"p{user}", "user": user, "advertiser": "b", "ts": ts, "ingest": ts, "value": 1,
         "day": day}
        for user in ("erased", "person", "0")
        for ts in [start + 7200]  # after what is erased
    ]  # fmt: skip
    raw = write_logs(tmp_path / "raw", ads=ads, logged=[common | shown, *logged], pixel=pixel)
    spec = load_spec(
        write_spec(
            tmp_path,
            ("buckets: 2", "buckets: 2\nmax_bad_record_rate: 0.9\nmax_events_per_user_day: 4"),
        )
    )
    lake = Lake(str(tmp_path / "lake"), spec)
    load_attributes(lake, raw, (day, day))
    ingest(lake, raw, (day, day))
    assert stored_pixels(lake) == {"perased", "pperson"}
    (unmatched,) = rows(lake, "quarantine")
    assert json.loads(unmatched["payload"])["id"] == "p0" and unmatched["reasons"] == [NO_TOUCH]
    erased = spark.createDataFrame([("erased",)], "user_id string")
    record_erased_users(lake, erased, (start + 100) * 10**6 + 3600 * 10**6, day)
    ingest(lake, raw, (day, day))
    assert stored_pixels(lake) == {"pperson"}


def test_the_touches_of_a_placeholder_are_not_gathered_to_be_counted(
    spark: SparkSession, tmp_path: Path
) -> None:
    cap = "buckets: 2\nmax_events_per_user_day: 40"
    spec = load_spec(write_spec(tmp_path, ("buckets: 2", cap)))
    user = "IF(id % 2 = 0, '0', CONCAT('u', id % 20)) AS user_id"
    touches = spark.range(200).selectExpr(user, f"DATE '{DAYS[0]}' AS day", "id AS event_ts")
    kept = _drop_automated_users(spec, touches)
    assert {row["event_ts"] for row in kept.collect()} == set(range(1, 200, 2))
    assert "Window" not in kept._jdf.queryExecution().executedPlan().toString()


def stored_pixels(lake: Lake) -> set[str]:
    return {e["event_id"] for e in rows(lake, "events") if e["log"] == "pixel"}


def test_attributes_are_loaded_before_the_ingest_that_reads_them(
    spark: object, tmp_path: Path
) -> None:
    paths = PipelinePaths(write_spec(tmp_path), str(tmp_path), str(tmp_path / "lake"))
    spec = load_spec(paths.spec)
    steps = {step.name: step for step in data_steps(spec, paths, ("--days", str(DAYS[0])))}
    assert "attributes" in earlier_steps(steps["ingest"], list(steps.values()))
    assert "attributes_item" in steps["ingest"].reads
    rng = random.Random(0)
    write_logs(tmp_path, logged=random_clicks(rng), pixel=random_conversions(rng))
    with pytest.raises(UserError, match="load the attributes of these days"):
        ingest(Lake(paths.lake, spec), str(tmp_path), (DAYS[0], DAYS[0]))


def test_a_file_of_items_that_changes_before_the_ingest_counts_as_it_was_read(
    spark: object, tmp_path: Path
) -> None:
    """So that the next run sees that it has changed."""
    day, rng = DAYS[0], random.Random(0)
    ads, logged, pixel = random_ads(rng), random_clicks(rng), random_conversions(rng)
    raw = write_logs(tmp_path / "raw", ads=ads, logged=logged, pixel=pixel)
    lake = Lake(str(tmp_path / "lake"), load_spec(write_spec(tmp_path)))
    states = day_file_states(lake.spec, raw, day)
    load_attributes(lake, raw, (day, day))
    file = tmp_path / "raw" / "ads" / f"{day}.json"
    file.write_text(file.read_text() * 2)
    ingest(lake, raw, (day, day))
    assert ingested_file_states(lake.root, day) == states
    assert day_file_states(lake.spec, raw, day)["ads"] != states["ads"]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("    touch: click\n", "", "touch_key needs `touch`, a type of events, and touch_window"),
        ("    touch_window: 10h\n", "", "touch_key needs `touch`, a type of events"),
        ("    touch_key: advertiser\n", "", "go together, unless touch_key is given"),
        (
            "    touch: click\n    touch_key: advertiser\n    touch_window: 10h\n    columns: {",
            "    columns: {item: ad, surface: place, ",
            "columns.touch_key and touch_window are for logs",
        ),
        (" touch_key: advertiser,", "", "touch_key: advertiser needs columns.touch_key"),
        ("touch_key: advertiser\n", "touch_key: item\n", "leave columns.touch_key out"),
        ("touch_key: advertiser\n", "touch_key: brand\n", "'brand' is not among the attribution"),
        ("user: user, touch_key", "touch_key", "touch_key: advertiser needs columns.user"),
        (" touch_key: advertiser,", " touch_key: advertiser, touch: k,", "for logs without ids"),
        (
            " touch_key: advertiser,",
            " touch_key: advertiser, item: ad, surface: place,",
            "the log has users, items and surfaces: leave touch_key out",
        ),
        (" touch_key: advertiser,", " touch_key: advertiser, item: ad,", "write `touch_key: item`"),
        ("touch_window: 10h", "touch_window: 25h", "labels end 1d after the impression"),
        ("touch: click", "touch: buy", "a touch cannot follow a touch"),
    ],
)
def test_a_log_whose_touches_cannot_be_found_is_refused(
    tmp_path: Path, good: str, bad: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_spec(write_spec(tmp_path, (good, bad)))
