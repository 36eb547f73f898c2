"""Outcomes that are taken back: in time they cancel a label, later they leave it as it is."""

import math
import random
from collections import defaultdict
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from etl.errors import UserError
from etl.ingest.run import ingest
from etl.labels import label_impressions, outcomes_by_impression
from etl.retractions import record_late_retractions
from etl.spec import load_spec
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake
from tests.etl.test_order import epoch_ms, write
from tests.pipeline import rows

pytestmark = pytest.mark.spark

SPEC = """
name: shop
buckets: 1
surfaces: {home: {}}
events:
  shown: {role: impression}
  buy: {role: outcome}
  refund: {role: retraction}
objectives:
  buy:
    {event: buy, window: 1d, value: true, extra_windows: [2h],
     retracted_by: {event: refund, within: 2d}}
sequences: {behaviour: {}}
counters: {windows: [1d], events: [shown], keys: [[user]]}
sources:
  log:
    kind: event_log
    format: json
    path: events/{day}.json.gz
    columns: {event_id: id, user: who, item: what, surface: page, type: action, event_time: ms,
              ingest_time: logged, impression: imp, value: paid, retracts: refunded}
"""
TWO_LOGS = """
name: two_logs
rank_by: click
buckets: 1
surfaces: {home: {}}
events:
  shown: {role: impression}
  click: {role: outcome}
  buy: {role: outcome}
  invalid: {role: retraction}
  refund: {role: retraction}
objectives:
  click: {event: click, window: 2h, retracted_by: {event: invalid, within: 1d}}
  buy: {event: buy, window: 2h, retracted_by: {event: refund, within: 1d}}
sequences: {behaviour: {}}
counters: {windows: [1d], events: [shown], keys: [[user]]}
sources:
  web:
    {kind: event_log, format: json, path: "web/{day}.json.gz", types: {shown: shown, click: click},
     columns: &columns {event_id: id, user: who, item: what, surface: page, type: action,
                        event_time: ms, impression: imp, retracts: named}}
  shop:
    {kind: event_log, format: json, path: "shop/{day}.json.gz", columns: *columns,
     types: {buy: buy, invalid: invalid, refund: refund}}
"""
DELAYED_REFUNDS = """
sources:
  log:
    kind: event_log
    format: json
    path: events/{day}.json.gz
    types: {shown: shown, buy: buy}
    columns: &columns {event_id: id, user: who, item: what, surface: page, type: action,
                       event_time: ms, ingest_time: logged, impression: imp, value: paid,
                       retracts: refunded}
  refunds:
    kind: event_log
    format: json
    path: refunds/{day}.json.gz
    types: {refund: refund}
    columns: *columns
    delay: 30h
"""
FIRST, NUM_DAYS, HOUR_MS = date(2026, 1, 1), 5, 3_600_000
WITHIN_MS = 48 * HOUR_MS
Record = dict[str, Any]


def random_events(rng: random.Random) -> list[Record]:
    """Impressions, most with one or two purchases, most of which are refunded sooner or later."""
    events: list[Record] = []

    def log(id_: str, who: str, action: str, ms: int, delay_hours: float, **more: object) -> None:
        logged = ms + int(delay_hours * HOUR_MS)
        base = {"id": id_, "who": who, "what": "shoe", "page": "home", "action": action}
        events.append(base | {"ms": ms, "logged": logged} | more)

    for n in range(60):
        who, shown = f"u{n % 7}", epoch_ms(1, 0) + rng.randrange(72) * HOUR_MS + n * 1000
        log(f"i{n}", who, "shown", shown, 0)
        for k in range(rng.choice([0, 1, 1, 2])):
            bought = shown + int(rng.choice([0.5, 1, 5, 20, 30]) * HOUR_MS)
            log(f"b{n}-{k}", who, "buy", bought, rng.choice([0, 1, 9]), imp=f"i{n}", paid=2.0**k)
            for again in range(rng.choice([0, 1, 1, 2])):
                refunded = bought + int(rng.choice([0, 0.1, 3, 25, 50]) * HOUR_MS)
                name = f"r{n}-{k}-{again}"
                log(name, who, "refund", refunded, rng.choice([0, 8]), refunded=f"b{n}-{k}")
    return events


def day_of(event: Record) -> date:
    return FIRST + timedelta(milliseconds=event["logged"] - epoch_ms(1, 0))


def expected_rows(
    events: list[Record], refund_delay: int, within_ms: float = WITHIN_MS
) -> tuple[dict[str, tuple[Any, ...]], set[tuple[Any, ...]]]:
    """The labels of both windows and the value of each impression, and the late retractions.

    Refunds are visible `refund_delay` hours after they were logged.
    """
    refunds, end = defaultdict(list), end_of_days()
    for event in events:
        if event["action"] == "refund":
            second = visible(event, refund_delay)
            if FIRST + timedelta(seconds=second - epoch_ms(1, 0) // 1000) < end:
                refunds[event["refunded"]].append((second, event["id"]))
    labels, late = {}, set()
    for shown in events:
        if shown["action"] != "shown":
            continue
        bought = [e for e in events if e.get("imp") == shown["id"]]
        counted = {}
        for hours in (2, 24):
            final = max(shown["ms"] + hours * HOUR_MS, visible(shown) * 1000)
            counted[hours] = [
                e
                for e in bought
                if e["ms"] <= shown["ms"] + hours * HOUR_MS
                and visible(e) * 1000 <= final
                and not any(second * 1000 <= final for second, _ in refunds[e["id"]])
            ]
        total = sum(e["paid"] for e in counted[24])
        labels[shown["id"]] = int(bool(counted[24])), int(bool(counted[2])), total
        first = {e["id"]: min(refunds[e["id"]], default=None) for e in counted[24]}
        for e in counted[24]:
            refund = first[e["id"]]
            if refund and refund[0] * 1000 <= final + within_ms:
                left = sum(1 for other in first.values() if not other or other[0] > refund[0])
                late.add((shown["id"], e["id"], refund[1], refund[0], left, e["paid"]))
    return labels, late


def visible(event: Record, delay_hours: int = 0) -> int:
    return int(max(event["ms"], event["logged"] + delay_hours * HOUR_MS) // 1000)


@pytest.mark.parametrize(
    ("sources", "refund_delay"), [("", 0), (DELAYED_REFUNDS, 30)], ids=["one_log", "delayed"]
)
def test_labels_and_late_retractions_equal_a_plain_loop(
    spark: object, tmp_path: Path, sources: str, refund_delay: int
) -> None:
    """In two runs: the first sees only what was logged by then."""
    text = SPEC.partition("sources:")[0] + sources.lstrip() if sources else SPEC
    (tmp_path / "spec.yaml").write_text(text)
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    events = [e for e in random_events(random.Random(5)) if day_of(e) < end_of_days()]
    all_days = [FIRST + timedelta(days=number) for number in range(NUM_DAYS)]
    for day in all_days:
        of_day = [event for event in events if day_of(event) == day]
        refunds = [event for event in of_day if sources and event["action"] == "refund"]
        write(tmp_path / "raw" / "refunds", day, refunds)
        write(tmp_path / "raw" / "events", day, [e for e in of_day if e not in refunds])
    for days in ((all_days[0], all_days[1]), (all_days[2], all_days[-1])):
        ingest(lake, str(tmp_path / "raw"), days)
        label_impressions(lake, days)
        record_late_retractions(lake, days)
    labels, late = expected_rows(events, refund_delay)
    found = {
        row["impression_id"]: (row["label_buy"], row["label_buy_2h"], row["value_buy"])
        for row in rows(lake, "impressions")
    }
    assert found == labels
    assert {label for label, _, _ in labels.values()} == {0, 1}
    columns = (
        "impression_id", "outcome_id", "retraction_id", "retracted_ts", "outcomes_left", "value",
    )  # fmt: skip
    stored = rows(lake, "late_retractions")
    assert {tuple(row[name] for name in columns) for row in stored} == late
    assert len(stored) == len(late) > 5
    later = expected_rows(events, refund_delay, math.inf)[1]
    assert len(later) > len(late), "some are not within the time"
    assert {row["outcomes_left"] for row in stored} >= {0, 1}
    before = rows(lake, "late_retractions")
    record_late_retractions(lake, (FIRST, FIRST + timedelta(days=NUM_DAYS - 1)))
    assert rows(lake, "late_retractions") == before


def end_of_days() -> date:
    return FIRST + timedelta(days=NUM_DAYS)


WIDE_LOG = """
sources:
  log:
    kind: impression_log
    format: json
    path: events/{day}.json.gz
    columns: {event_id: id, user: who, item: what, surface: page, event_time: ms}
    outcomes: [{event: buy, indicator: bought, delay: bought_after, value: paid}]
  refunds:
    kind: event_log
    format: json
    path: refunds/{day}.json.gz
    columns: {event_id: id, user: who, item: what, surface: page, event_time: ms,
              retracts: refunded}
    event: refund
"""


@pytest.mark.parametrize("name", ["i:1", "i:1:buy"])
def test_an_outcome_of_a_wide_log_is_retracted_by_the_id_of_its_record_or_its_own(
    spark: object, tmp_path: Path, name: str
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.partition("sources:")[0] + WIDE_LOG.lstrip())
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    base: Record = {"who": "u", "what": "shoe", "page": "home"}
    bought: Record = {"ms": epoch_ms(1, 1), "bought": 1, "bought_after": HOUR_MS, "paid": 2.0}
    write(tmp_path / "raw" / "events", FIRST, [base | bought | {"id": id_} for id_ in ("i:1", "i")])
    refund = base | {"id": "r", "ms": epoch_ms(1, 3), "refunded": name}
    write(tmp_path / "raw" / "refunds", FIRST, [refund])
    for day in (FIRST, FIRST + timedelta(days=1)):
        if day != FIRST:
            write(tmp_path / "raw" / "events", day, [base | {"id": "x", "ms": epoch_ms(2, 1)}])
            write(tmp_path / "raw" / "refunds", day, [refund | {"id": "s", "refunded": "none",
                                                               "ms": epoch_ms(2, 1)}])  # fmt: skip
        ingest(lake, str(tmp_path / "raw"), (day, day))
        label_impressions(lake, (day, day))
    labels = {row["impression_id"]: row["label_buy"] for row in rows(lake, "impressions")}
    assert (labels["i:1"], labels["i"]) == (0, 1)


def test_a_retraction_that_names_no_event_is_quarantined(spark: object, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    events = random_events(random.Random(0))[:40]
    nameless = {name: value for name, value in events[0].items() if name != "imp"}
    nameless |= {"id": "nameless", "action": "refund"}
    nameless |= {"ms": epoch_ms(1, 1), "logged": epoch_ms(1, 2)}
    logged = [event for event in events if day_of(event) == FIRST]
    write(tmp_path / "raw" / "events", FIRST, [*logged, nameless])
    ingest(lake, str(tmp_path / "raw"), (FIRST, FIRST))
    (row,) = rows(lake, "quarantine")
    assert row["reasons"] == ["no event that it takes back"] and "nameless" in row["payload"]


def test_a_retraction_cancels_only_outcomes_of_its_type_and_user(
    spark: object, tmp_path: Path
) -> None:
    """Clicks and purchases are both numbered from 0, and retractions name numbers at random.

    The oracle compares each outcome with each retraction. `0` stands for a placeholder, too: of
    most outcomes' impressions, and of what many retractions name.
    """
    (tmp_path / "spec.yaml").write_text(TWO_LOGS)
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    web, shop = numbered_events(random.Random(3))
    write(tmp_path / "raw" / "web", FIRST, web)
    write(tmp_path / "raw" / "shop", FIRST, shop)
    ingest(lake, str(tmp_path / "raw"), (FIRST, FIRST))
    label_impressions(lake, (FIRST, FIRST))
    retractions = {(e["action"], e["who"], e["named"]) for e in shop if "named" in e}
    kept: dict[str, set[str]] = {
        "click": set(),
        "buy": set(),
    }  # the impressions of outcomes that are not retracted
    for event in (*web, *shop):
        retraction = {"click": "invalid", "buy": "refund"}.get(event["action"])
        if retraction and (retraction, event["who"], event["id"]) not in retractions:
            kept[event["action"]].add(event["imp"])
    shown = [event["id"] for event in web if event["action"] == "shown"]
    expected = {id_: (int(id_ in kept["click"]), int(id_ in kept["buy"])) for id_ in shown}
    found = rows(lake, "impressions")
    labels = {row["impression_id"]: (row["label_click"], row["label_buy"]) for row in found}
    assert labels == expected
    assert set(labels.values()) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    user_of = {e["id"]: e["who"] for e in web if e["action"] == "click"}
    strangers = [who for action, who, named in retractions if user_of.get(named, who) != who]
    assert len(strangers) > 5, "most retractions name outcomes of other users"

    events = spark_io.read_table(lake, schemas.events(lake.spec))
    impressions = events.filter(events["type"] == lake.spec.event_codes["shown"])
    gathered = outcomes_by_impression(lake, events, impressions).collect()
    assert {row["impression_id"] for row in gathered} <= labels.keys(), "placeholders are left out"


def numbered_events(rng: random.Random) -> tuple[list[Record], list[Record]]:
    """The records of both logs on the first day."""
    web: list[Record] = []
    shop: list[Record] = []
    for n in range(40):
        base = {"what": "shoe", "page": "home", "who": f"u{n % 4}"}
        shown = epoch_ms(1, 0) + n * 1000
        web.append(base | {"id": f"i{n}", "action": "shown", "ms": shown, "imp": f"i{n}"})
        for action, log in (("click", web), ("buy", shop)):
            for imp in (f"i{n}", "0", "0")[rng.randrange(2) :]:
                id_ = str(sum(e["action"] == action for e in log))
                outcome = {"id": id_, "action": action, "ms": shown + HOUR_MS, "imp": imp}
                log.append(base | outcome)
        for action in ("invalid", "refund"):
            named = rng.choice(["0", *map(str, range(n, 3 * n))])
            more = {"action": action, "ms": shown + HOUR_MS, "named": named}
            shop.append(base | more | {"id": f"{action}{n}"})
    return web, shop


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("refund: {role: retraction}", "refund: {}", "give the event type refund `role: retract"),
        (", retracts: refunded}", "}", "no source has the column `retracts` for refund events"),
        ("event: refund,", "event: refnd,", "'refnd' is not among the events"),
    ],
)
def test_a_spec_that_cannot_take_outcomes_back_is_refused(
    tmp_path: Path, good: str, bad: str, message: str
) -> None:
    assert good in SPEC
    (tmp_path / "spec.yaml").write_text(SPEC.replace(good, bad))
    with pytest.raises(UserError, match=message):
        load_spec(tmp_path / "spec.yaml")


def test_one_retraction_type_cannot_name_outcomes_of_two_logs(tmp_path: Path) -> None:
    """Unless no id occurs in both logs: a click and a purchase of a user may have one number."""
    confusable = TWO_LOGS.replace("event: invalid, within", "event: refund, within")
    (tmp_path / "spec.yaml").write_text(confusable)
    with pytest.raises(UserError, match="refund also retracts buy events, of another log"):
        load_spec(tmp_path / "spec.yaml")
    (tmp_path / "spec.yaml").write_text(confusable + "shared_event_ids: true\n")
    assert load_spec(tmp_path / "spec.yaml").retraction_types == ("refund",)
