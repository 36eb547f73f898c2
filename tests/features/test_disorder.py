"""Every table against a reference implementation in plain Python, on logs with every disorder."""

import math
import random
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from etl.spec import DataSpec
from etl.spec.attributes import CategoricalAttribute
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from features.encoding.scalar import encode_categorical, spark_xxhash64
from tests.oracle import disorder
from tests.oracle import log as oracle
from tests.oracle.disorder import (
    BRANDS,
    FIRST,
    PLANS,
    ZONES,
    build_lake,
    day_start,
    generate_records,
    write_raw,
)
from tests.oracle.later import change_future, model_inputs
from tests.oracle.log import LabelRule, Record, visible_ts
from tests.pipeline import TABLES, build_tables, rows
from training.data.histories import histories_from_table

pytestmark = pytest.mark.spark

Row = dict[str, Any]
HOUR = 3600
DAYS, USERS, DELAY, LATENESS, MAX_EVENTS, SESSION_GAP = 3, 25, 30, 86_400, 7, 5
LAST = FIRST + timedelta(days=DAYS - 1)
WINDOWS, HALF_LIVES = {"1h": 3600, "1d": 86_400}, {"10m": 600, "2d": 172_800}
LABELS = {
    "click": LabelRule("click", "shown", ["item"], 3600, 3600),
    "buy": LabelRule("buy", "click", ["brand", "surface"], 12 * 3600, 12 * 3600),
    "buy_2h": LabelRule("buy", "click", ["brand", "surface"], 2 * 3600, 12 * 3600),
    "look": LabelRule("look", "shown", ["item"], 2 * 3600, 2 * 3600),
    "click_dwell": LabelRule("click", "shown", ["item"], 3600, 3600),
    "buy_dwell": LabelRule("buy", "click", ["brand", "surface"], 3 * 3600, 3 * 3600),
}
# Logs are drawn as seeds, without shrinking: one run of Spark takes half a minute. Zero
# is excluded because it would be the first draw of every run.
SEEDS = st.integers(0, 2**32).filter(bool)
ONE_LOG = settings(
    max_examples=1, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
MORE_LOGS = settings(ONE_LOG, max_examples=4)


def differences(lake: Lake, records: list[Record], data_until: int | None = None) -> Counter[str]:
    """The number of rows, by table or column, that differ from the reference.

    Labels are final until the end of the last day, or until an epoch second.
    """
    end = data_until or day_start(LAST + timedelta(days=1), lake.spec.time_zone)
    wrong: Counter[str] = Counter()
    timely = oracle.deduplicate(oracle.on_time(records, LATENESS))
    events = oracle.limit_per_user_day(timely, MAX_EVENTS, DELAY)
    for event in events:
        event["brand"], event["brand_since"] = BRANDS[event["item"]]
        event["hour"] = hour_of(event["ts"], lake.spec.time_zone)
    expected = {(e["id"], e["day"], e["ingest"]) for e in events}
    stored = {(e["event_id"], e["day"], e["ingest_ts"] // 10**6) for e in rows(lake, "events")}
    wrong["events"] = len(stored ^ expected)
    requests = oracle.requests(events, SESSION_GAP)
    labels = {row["impression_id"]: row for row in rows(lake, "impressions")}
    impressions = {e["imp"]: e for e in events if e["type"] == "shown"}
    examples = {row["impression_id"]: row for row in rows(lake, "examples")}
    wrong["missing"] = len(labels.keys() ^ impressions.keys())
    wrong["missing"] += len(examples.keys() ^ impressions.keys())
    for id_, impression in impressions.items():
        wrong["as of"] += examples[id_]["as_of_ts"] != requests[id_][1]
        wrong["labels"] += not labels_match(labels[id_], events, impression, end)
        wrong["attributes"] += not attributes_match(examples[id_])
        wrong["counters"] += not counters_match(lake, examples[id_], events, impression)
    wrong["requests"] = count_request_differences(labels, requests)
    wrong["histories"] = count_history_differences(lake, examples, events, impressions)
    return +wrong


def attributes_match(row: Row) -> bool:
    valid = [version for version in PLANS.get(row["user_id"], []) if version[1] < row["as_of_ts"]]
    plan, since = valid[-1] if valid else (None, None)
    code = {None: 0, "free": 2, "paid": 3}[plan]
    return bool(row["user_known_since"] == since and row["user_plan"] == code)


def hour_of(second: int, zone: str) -> int:
    """The local hour of an epoch second."""
    return datetime.fromtimestamp(second, ZoneInfo(zone)).hour


def plan_at(user: str, second: int) -> str | None:
    """The plan of a user that was valid strictly before a second."""
    plans = [plan for plan, since in PLANS.get(user, []) if since < second]
    return plans[-1] if plans else None


def labels_match(row: Row, events: list[Record], impression: Record, end: int) -> bool:
    for name, rule in LABELS.items():
        mature_ts = max(impression["ts"] + rule.window, visible_ts(impression, DELAY))
        is_final = mature_ts < end
        outcomes = oracle.outcomes(events, impression, rule, DELAY) if is_final else []
        if row[f"label_{name}"] != (bool(outcomes) if is_final else None):
            return False
        if name.endswith("dwell") and row[f"dwell_ms_{name}"] != oracle.dwell(outcomes):
            return False
    return True


def counters_match(lake: Lake, row: Row, events: list[Record], impression: Record) -> bool:
    as_of = row["as_of_ts"]
    brand, known_since = BRANDS[impression["item"]]
    request = impression | {"hour": hour_of(as_of, lake.spec.time_zone)}
    if row["item_known_since"] != (known_since if brand and known_since < as_of else None):
        return False
    for key in lake.spec.counters.keys:
        matching = [
            e
            for e in events
            if all(e[k] is not None and e[k] == request[k] for k in key if k != "plan")
        ]
        if "plan" in key:  # events count for the plan that their user had when they became visible
            plan = plan_at(impression["user"], as_of)
            plans = (plan_at(e["user"], visible_ts(e, DELAY)) for e in matching)
            matching = [e for e, at in zip(matching, plans, strict=True) if plan and at == plan]
        if "brand" in key:  # events are counted only once the brand of their item is known
            matching = [e for e in matching if BRANDS[e["item"]][1] < visible_ts(e, DELAY)]
            matching = matching if known_since < as_of else []
        distinct = distinct_values(lake.spec)
        values = oracle.counters(matching, as_of, DELAY, WINDOWS, HALF_LIVES, distinct)
        expected = {f"{kind}_{'_'.join(key)}_{name}": v for (kind, name), v in values.items()}
        for counter in lake.spec.counters.columns_of(key):
            value, expected_value = row[counter.column], expected[counter.column]
            if counter.sql_type == "int":  # counts, and seconds since the last event
                is_equal = type(value) is type(expected_value) and value == expected_value
            else:
                is_equal = is_close(value, expected_value)
            if not is_equal:
                return False
    return True


def distinct_values(spec: DataSpec) -> dict[str, Callable[[Record], int | None]]:
    """What is counted distinctly, by column; the brand of an item once it is known."""
    device = spec.attributes.context["device"]
    assert isinstance(device, CategoricalAttribute)

    def plan_of(record: Record) -> int | None:
        plan = plan_at(record["user"], visible_ts(record, DELAY))
        return {None: None, "free": 2, "paid": 3}[plan]

    def brand_of(record: Record) -> int | None:
        brand, known_since = BRANDS[record["item"]]
        if brand is None or known_since >= visible_ts(record, DELAY):
            return None
        return spark_xxhash64(brand)

    return {
        "user": lambda record: spark_xxhash64(record["user"]),
        "item": lambda record: spark_xxhash64(record["item"]),
        "device": lambda record: encode_categorical(device, record["device"]) or None,
        "coupon": lambda record: record["code"] and spark_xxhash64(record["code"]),
        "brand": brand_of,
        "plan": plan_of,
        "hour": lambda record: 1 + record["hour"],
        "surface": lambda record: spec.surface_codes[record["surface"]],
    }


def is_close(value: float | None, expected: float | None) -> bool:
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-30)


def count_request_differences(
    labels: dict[str, Row], requests: dict[str, tuple[object, int]]
) -> int:
    """Number of requests that merge or split requests of the reference."""
    pairs = {
        (row["user_id"], row["day"], row["request_id"], requests[id_][0])
        for id_, row in labels.items()
    }
    stored = {pair[:3] for pair in pairs}
    expected = {pair[3] for pair in pairs}
    return abs(len(pairs) - len(stored)) + abs(len(pairs) - len(expected))


def count_history_differences(
    lake: Lake, examples: dict[str, Row], events: list[Record], impressions: dict[str, Record]
) -> int:
    spec, wrong = lake.spec, 0
    packed = snapshot(lake, schemas.history(spec))
    histories_by_bucket = {
        bucket: histories_from_table(packed.read(bucket=bucket)) for bucket in range(spec.buckets)
    }
    index = {row["item_id"]: row["item_index"] for row in rows(lake, "items")}
    for id_, impression in impressions.items():
        row = examples[id_]
        history = oracle.history(events, impression["user"], row["as_of_ts"], DELAY)
        expected = [
            (
                *(visible_ts(e, DELAY), e["ts"], index[e["item"]], spec.event_codes[e["type"]]),
                *attribute_codes(spec, e),
            )
            for e in history
        ]
        histories = histories_by_bucket[row["bucket"]]
        users = histories.users.to_pylist()
        start = histories.events.offsets[users.index(impression["user"])] if expected else 0
        pointed = slice(start, start + row["history_length"])
        stored = zip(
            histories.events.visible_ts[pointed],
            histories.events.event_ts[pointed],
            histories.events.item_indexes[pointed],
            histories.events.types[pointed],
            *[codes[pointed] for codes in histories.events.attributes.values()],
            strict=True,
        )
        wrong += [tuple(map(int, event)) for event in stored] != expected
    return wrong


def attribute_codes(spec: DataSpec, event: Record) -> tuple[int, ...]:
    """The quantity in logarithmic steps, and the categories of device and coupon; 0 is missing."""
    handset = spec.attributes.event["handset"]
    assert isinstance(handset, CategoricalAttribute)
    quantity = event["quantity"]
    return (
        0 if quantity is None else 128 + min(127, round(6.1 * math.log1p(quantity))),
        encode_categorical(handset, event["device"]),
        {None: 0, "spring": 2, "sale": 3}.get(event["code"], 1),
    )


def build_in_parts(folder: Path, records: list[Record], seed: int, zone: str) -> Lake:
    """The tables of a log with its records in any order, built in two spans of days."""
    rng = random.Random(seed)
    cut = rng.randrange(1, DAYS)
    spans = [(0, cut - 1), (cut, DAYS - 1)]
    return build_lake(folder / "parts", rng.sample(records, len(records)), spans, zone)


def refresh_last_day(lake: Lake, folder: Path, records: list[Record], until: int) -> None:
    """The tables of the last day with the records that have landed until an epoch second."""
    write_raw([record for record in records if record["ingest"] < until], folder / "raw")
    build_tables(lake, folder / "raw", (LAST, LAST), until)


@ONE_LOG
@given(seed=SEEDS, zone=st.sampled_from(ZONES))
def test_tables_match_the_reference_and_examples_read_nothing_later(
    spark: object, tmp_path_factory: pytest.TempPathFactory, seed: int, zone: str
) -> None:
    folder, rng = tmp_path_factory.mktemp("log"), random.Random(seed)
    records = generate_records(seed, USERS, DAYS, zone)
    lake = build_lake(folder, records, [(0, DAYS - 1)], zone)
    assert differences(lake, records) == {}, (seed, zone)

    since = rng.choice([record["ingest"] for record in records]) + 1
    changed = change_future(rng, records, since, DELAY)
    other = build_lake(folder / "other", changed, [(0, DAYS - 1)], zone, since)
    inputs, other_inputs = model_inputs(lake), model_inputs(other)
    impressions = (r for r in records if r["type"] == "shown")
    earlier = {r["imp"] for r in impressions if visible_ts(r, DELAY) < since} & inputs.keys()
    for impression in earlier:
        assert inputs[impression] == other_inputs[impression], (impression, seed, zone, since)


def test_the_longest_window_is_complete_after_a_short_day_and_with_a_clock_that_runs_ahead(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In New York, 8 March has 23 hours; the day after it is built alone."""
    zone, short_day = "America/New_York", FIRST + timedelta(days=1)
    text = disorder.SPEC.replace("allowed_lateness: 1d", "allowed_lateness: 0s")
    monkeypatch.setattr(disorder, "SPEC", text)
    midnight = day_start(short_day, zone)
    common = {"user": "u1", "item": "hat", "surface": "home"}
    events = [  # type, event time, ingest time, landing day
        ("click", midnight - 70 * 60, midnight - 70 * 60, FIRST),
        ("click", midnight - 15 * 60, midnight - 15 * 60, FIRST),
        ("look", midnight + 60, midnight + 60, short_day),
        ("shown", midnight + 23 * HOUR + 1800, midnight + 23 * HOUR + 1800, LAST),
        ("shown", midnight + 23 * HOUR + 1800, midnight + 23 * HOUR - 1200, LAST),
    ]
    records = [
        common | {"id": f"e{n}", "type": type_, "ts": ts, "ingest": ingest, "day": day,
                  "request": f"r{n}"}
        for n, (type_, ts, ingest, day) in enumerate(events)
    ]  # fmt: skip
    lake = build_lake(tmp_path, records, [(0, 1), (2, 2)], zone)
    clicks = {row["impression_id"]: row["cnt_user_click_1d"] for row in rows(lake, "examples")}
    assert clicks == {"e3": 1, "e4": 2}


@pytest.mark.proof
@MORE_LOGS
@given(seed=SEEDS, zone=st.sampled_from(ZONES))
def test_tables_of_a_day_that_is_not_over_match_the_reference(
    spark: object, tmp_path_factory: pytest.TempPathFactory, seed: int, zone: str
) -> None:
    """The last day is refreshed once before its end, and at its end."""
    folder, rng = tmp_path_factory.mktemp("log"), random.Random(seed)
    records = generate_records(seed, USERS, DAYS, zone)
    earlier_days = [record for record in records if record["day"] < LAST]
    lake = build_lake(folder, earlier_days, [(0, DAYS - 2)], zone)
    end = day_start(LAST + timedelta(days=1), zone)
    until = rng.randrange(day_start(LAST, zone) + 3600, end)
    refresh_last_day(lake, folder, records, until)
    so_far = [record for record in records if record["ingest"] < until]
    assert differences(lake, so_far, until) == {}, (seed, zone, until)
    refresh_last_day(lake, folder, records, end)
    assert differences(lake, records) == {}, (seed, zone)


@pytest.mark.proof
@MORE_LOGS
@given(seed=SEEDS, zone=st.sampled_from(ZONES))
def test_any_split_of_days_and_order_of_records_gives_the_same_tables(
    spark: object, tmp_path_factory: pytest.TempPathFactory, seed: int, zone: str
) -> None:
    folder, records = tmp_path_factory.mktemp("log"), generate_records(seed, USERS, DAYS, zone)
    parts = build_in_parts(folder, records, seed, zone)
    at_once = build_lake(folder / "at_once", records, [(0, DAYS - 1)], zone)
    assert differences(at_once, records) == {}, (seed, zone)
    for table in TABLES:
        assert rows(parts, table) == rows(at_once, table), (table, seed, zone)
