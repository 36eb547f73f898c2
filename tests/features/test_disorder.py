"""Every table against a naive reference in plain Python, on logs with every disorder."""

import random
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from etl.tables import contracts
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from tests.oracle import log as oracle
from tests.oracle.disorder import BRANDS, FIRST, PLANS, ZONES, lake_of, make, opens
from tests.oracle.later import as_read, otherwise
from tests.oracle.log import Record
from tests.pipeline import TABLES, rows
from training.data.histories import unpacked

pytestmark = pytest.mark.spark

DAYS, USERS, DELAY, LATENESS, MOST, GAP = 3, 25, 30, 86_400, 7, 5
LAST = FIRST + timedelta(days=DAYS - 1)
# A log is drawn as a seed: one run through Spark takes half a minute, too long to shrink. The first
# draw of every run would be 0, always the same log.
SEEDS = st.integers(0, 2**32).filter(bool)
ONE_LOG = settings(
    max_examples=1, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
MORE_LOGS = settings(ONE_LOG, max_examples=4)


def differences(lake: Lake, records: list[Record]) -> Counter[str]:
    """How many rows of each table are not what the reference says."""
    wrong: Counter[str] = Counter()
    timely = oracle.on_time(records, LATENESS)
    events = oracle.of_people(oracle.first_copies(timely), MOST, DELAY)
    for event in events:
        event["brand"] = BRANDS[event["item"]][0]
    kept = {(e["id"], e["day"], e["ingest"]) for e in events}
    found = rows(lake, "events")
    told = {(e["event_id"], e["day"], e["ingest_ts"] // 10**6) for e in found}
    wrong["events"] = len(told ^ kept)
    requests = oracle.requests(events, GAP)
    labels = {row["impression_id"]: row for row in rows(lake, "impressions")}
    shown = {e["imp"]: e for e in events if e["type"] == "shown"}
    examples = {row["impression_id"]: row for row in rows(lake, "examples")}
    wrong["missing"] = len(labels.keys() ^ shown.keys()) + len(examples.keys() ^ shown.keys())
    for id_, event in shown.items():
        wrong["as of"] += examples[id_]["as_of_ts"] != requests[id_][1]
        wrong["labels"] += not labels_hold(lake, labels[id_], events, event)
        wrong["attributes"] += not attributes_hold(examples[id_])
        wrong["counters"] += not counters_hold(lake, examples[id_], events, event)
    wrong["requests"] = requests_differ(labels, requests)
    wrong["histories"] = histories_differ(lake, examples, events, shown)
    return +wrong


def attributes_hold(row: dict) -> bool:
    held = [v for v in PLANS.get(row["user_id"], []) if v[1] < row["as_of_ts"]]
    plan, since = held[-1] if held else (None, None)
    return row["user_since"] == since and row["u_plan"] == {None: 0, "free": 2, "paid": 3}[plan]


def labels_hold(lake: Lake, row: dict, events: list[Record], shown: Record) -> bool:
    buy = ("buy", "click", ["brand", "surface"])
    wanted = {"click": ("click", "shown", ["item"], 3600), "buy": (*buy, 12 * 3600)}
    wanted["buy_2h"] = (*buy, 2 * 3600)
    end = opens(LAST + timedelta(days=1), lake.spec.time_zone)
    for name, (outcome, touch, same, window) in wanted.items():
        ready = max(shown["ts"] + window, oracle.visible(shown, DELAY))
        said = oracle.label(events, shown, outcome, touch, same, window, DELAY)
        if row[f"label_{name}"] != (said if ready < end else None):
            return False
    return True


def counters_hold(lake: Lake, row: dict, events: list[Record], shown: Record) -> bool:
    as_of = row["as_of_ts"]
    brand, since = BRANDS[shown["item"]]
    if row["item_since"] != (since if brand and since < as_of else None):
        return False
    for key in lake.spec.counters.keys:
        like = [e for e in events if all(e[k] is not None and e[k] == shown[k] for k in key)]
        if "brand" in key:  # nobody knew it before
            like = [e for e in like if BRANDS[e["item"]][1] < oracle.visible(e, DELAY)]
            like = like if since < as_of else []
        for window, name in ((3600, "1h"), (86_400, "1d")):
            seen = [e for e in like if as_of - window <= oracle.visible(e, DELAY) < as_of]
            for type_ in ("shown", "click", "buy"):
                if row[f"n_{'_'.join(key)}_{type_}_{name}"] != sum(
                    e["type"] == type_ for e in seen
                ):
                    return False
    return True


def requests_differ(labels: dict, requests: dict) -> int:
    """Impressions are of one request in the table if and only if the reference says so."""
    both = {(row["user_id"], row["day"], row["request_id"], requests[id_][0])
            for id_, row in labels.items()}  # fmt: skip
    return abs(len(both) - len({b[:3] for b in both})) + abs(len(both) - len({b[3] for b in both}))


def histories_differ(lake: Lake, examples: dict, events: list[Record], shown: dict) -> int:
    spec, wrong = lake.spec, 0
    packed = snapshot(lake, contracts.history(spec))
    stored = {bucket: unpacked(packed.read(bucket=bucket)) for bucket in range(spec.buckets)}
    index = {row["item_id"]: row["item_ix"] for row in rows(lake, "items")}
    for id_, event in shown.items():
        row = examples[id_]
        expected = oracle.history(events, event["user"], row["as_of_ts"], DELAY)
        bucket = stored[row["bucket"]]
        users = bucket.users.to_pylist()
        start = bucket.events.offsets[users.index(event["user"])] if expected else 0
        at = slice(start, start + row["hist_len"])
        got = bucket.events
        told = zip(got.visible_ts[at], got.event_ts[at], got.items[at], got.types[at], strict=True)
        want = [
            (oracle.visible(e, DELAY), e["ts"], index[e["item"]], spec.event_codes[e["type"]])
            for e in expected
        ]
        wrong += [tuple(map(int, t)) for t in told] != want
    return wrong


def parts_of(folder: Path, records: list[Record], seed: int, zone: str) -> Lake:
    """The tables of a log in any order of records, in two spans of days cut anywhere."""
    rng = random.Random(seed)
    cut = rng.randrange(1, DAYS)
    spans = [(0, cut - 1), (cut, DAYS - 1)]
    return lake_of(folder / "parts", rng.sample(records, len(records)), spans, zone)


@ONE_LOG
@given(seed=SEEDS, zone=st.sampled_from(ZONES))
def test_any_log_is_as_the_references_have_it_and_knows_nothing_of_later(
    spark: object, tmp_path_factory: pytest.TempPathFactory, seed: int, zone: str
) -> None:
    folder, rng = tmp_path_factory.mktemp("log"), random.Random(seed)
    records = make(seed, USERS, DAYS, zone)
    lake = parts_of(folder, records, seed, zone)
    assert differences(lake, records) == {}, (seed, zone)

    after = rng.choice([record["ingest"] for record in records]) + 1
    changed = otherwise(rng, records, after, DELAY)
    other = lake_of(folder / "other", changed, [(0, DAYS - 1)], zone, after)
    first, second = as_read(lake), as_read(other)
    shown = (r for r in records if r["type"] == "shown")
    before = {r["imp"] for r in shown if oracle.visible(r, DELAY) < after} & first.keys()
    for impression in before:
        assert first[impression] == second[impression], (impression, seed, zone, after)


@pytest.mark.proof
@MORE_LOGS
@given(seed=SEEDS, zone=st.sampled_from(ZONES))
def test_any_split_of_days_and_order_of_records_gives_the_same_tables(
    spark: object, tmp_path_factory: pytest.TempPathFactory, seed: int, zone: str
) -> None:
    folder, records = tmp_path_factory.mktemp("log"), make(seed, USERS, DAYS, zone)
    parts = parts_of(folder, records, seed, zone)
    whole = lake_of(folder / "whole", records, [(0, DAYS - 1)], zone)
    assert differences(whole, records) == {}, (seed, zone)
    for table in TABLES:
        assert rows(parts, table) == rows(whole, table), (table, seed, zone)
