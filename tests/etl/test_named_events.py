"""Off-site conversions, which name an impression or a click instead of a user and an item."""

import json
import random
from collections import defaultdict
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from etl.errors import UserError
from etl.ingest.named_events import UNKNOWN_EVENT, lookback_days, lookup_days
from etl.ingest.preview import preview_sources
from etl.ingest.reprocess import reprocess_quarantine
from etl.ingest.run import ingest
from etl.spec import load_spec
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from ranking.feature_store.consistency import events_by_ingest_time
from ranking.feature_store.events import visible_ts
from tests.oracle.disorder import day_start
from tests.pipeline import rows

pytestmark = pytest.mark.spark

Record = dict[str, Any]
DAYS = [date(2026, 1, day) for day in (1, 2, 3)]
OWN_FIELDS = "user: user, item: item, surface: surface, "
SPEC = """
name: offsite
buckets: 2
allowed_lateness: 1d
max_bad_record_rate: 0.1
surfaces: {home: {}, search: {}, shelf: {}}
events: {shown: {role: impression}, view: {}, buy: {role: outcome}}
objectives: {buy: {event: buy, window: 1d}}
rank_by: buy
sequences: {behaviour: {}}
counters: {windows: [1d], events: [shown], keys: [[user]]}
sources:
  shown:
    kind: event_log
    format: json
    path: shown/{day}.json
    time_unit: s
    delay: 1h
    columns: {event_id: id, OWN_FIELDS event_time: ts, ingest_time: ingest}
  bought:
    kind: event_log
    format: json
    path: bought/{day}.json
    time_unit: s
    event: buy
    columns: {event_id: id, CONVERSION_FIELDS impression: click, event_time: ts,
              ingest_time: ingest, value: value}
"""


def write_spec(folder: Path, conversion_fields: str = "", text: str = SPEC) -> Path:
    path = folder / "spec.yaml"
    text = text.replace("OWN_FIELDS", OWN_FIELDS).replace("CONVERSION_FIELDS", conversion_fields)
    path.write_text(text)
    return path


def random_logs(seed: int) -> tuple[list[Record], list[Record]]:
    """Impressions, some in several copies, and conversions, some of unknown or later ones."""
    rng = random.Random(seed)
    shown = []
    for number in range(150):
        first = rng.randrange(len(DAYS))
        for copy in range(rng.choice((1, 1, 1, 2, 3))):
            day = DAYS[min(first + rng.randrange(2) * copy, len(DAYS) - 1)]
            ts = day_start(DAYS[first], "UTC") + rng.randrange(86_000)
            shown.append(
                {
                    "id": f"i{number}",
                    "user": f"u{rng.randrange(9)}",
                    "item": f"a{rng.randrange(9)}",
                    "surface": rng.choice(("home", "search")),
                    "ts": ts,
                    "ingest": max(ts, day_start(day, "UTC") + rng.randrange(86_000)),
                    "day": day,
                }
            )
    bought = []
    for number in range(120):
        day = rng.choice(DAYS)
        ts = day_start(day, "UTC") + rng.randrange(86_000)
        bought.append(
            {"id": f"b{number}", "click": f"i{rng.randrange(160)}", "ts": ts, "ingest": ts,
             "value": rng.randrange(9), "day": day}
        )  # fmt: skip
    return shown, bought


def first_copy(shown: list[Record], conversion: Record) -> Record | None:
    copies = [i for i in shown if i["id"] == conversion["click"] and i["day"] <= conversion["day"]]
    return min(copies, key=lambda i: (i["day"], i["ingest"]), default=None)


def write_logs(folder: Path, days: list[date] = DAYS, **logs: list[Record]) -> str:
    for name, records in logs.items():
        lines = defaultdict(list)
        for record in records:
            fields = {key: value for key, value in record.items() if key != "day"}
            lines[record["day"]].append(json.dumps(fields) + "\n")
        (folder / name).mkdir(parents=True, exist_ok=True)
        for day in days:
            if lines[day]:
                (folder / name / f"{day}.json").write_text("".join(lines[day]))
    return str(folder)


def ingested(folder: Path, raw: str, spans: list[tuple[int, int]], fields: str = "") -> Lake:
    folder.mkdir()
    lake = Lake(str(folder / "lake"), load_spec(write_spec(folder, fields)))
    for first, last in spans:
        ingest(lake, raw, (DAYS[first], DAYS[last]))
    return lake


def test_events_are_those_of_a_log_with_all_columns(spark: object, tmp_path: Path) -> None:
    """For any split of days into runs; conversions without an impression are quarantined."""
    shown, bought = random_logs(1)
    firsts = {record["id"]: first_copy(shown, record) for record in bought}
    known = [
        record | {name: first[name] for name in ("user", "item", "surface")}
        for record in bought
        if (first := firsts[record["id"]])
    ]
    raw = write_logs(tmp_path / "raw", shown=shown, bought=bought)
    full = write_logs(tmp_path / "full", shown=shown, bought=known)
    expected = rows(ingested(tmp_path / "own", full, [(0, 2)], OWN_FIELDS), "events")
    for event in expected:
        first = firsts.get(event["event_id"])
        if first:  # an event is not visible before its impression
            event["visible_ts"] = max(event["visible_ts"], first["ingest"] + 3600)
    lake = ingested(tmp_path / "named", raw, [(0, 2)])
    assert rows(lake, "events") == sorted(expected, key=repr)
    for day in DAYS:  # also when logged events are posted again, as in the check of consistency
        logged = snapshot(lake, schemas.events(lake.spec)).read(day=day)
        posted = {e.event_id: visible_ts(lake.spec, e) for e in events_by_ingest_time(lake, logged)}
        assert posted == {row["event_id"]: row["visible_ts"] for row in logged.to_pylist()}
    by_day = ingested(tmp_path / "daily", raw, [(0, 0), (1, 1), (2, 2)])
    for name in ("events", "excluded_events", "quarantine", "ingest_metrics"):
        assert rows(by_day, name) == rows(lake, name)
    quarantined = rows(lake, "quarantine")
    assert {json.loads(row["payload"])["id"] for row in quarantined} == {
        id_ for id_, first in firsts.items() if first is None
    }
    assert {tuple(row["reasons"]) for row in quarantined} == {(UNKNOWN_EVENT,)}
    assert len(quarantined) > 12, "more than the share of bad records that a day may have"


def test_conversions_name_clicks_that_name_impressions(spark: object, tmp_path: Path) -> None:
    """They have the fields and the impression of their click, and are not visible before it."""
    shown, clicked = random_logs(5)
    clicks = {r["id"]: first for r in clicked if (first := first_copy(shown, r))}
    rng = random.Random(5)
    bought = [
        {"id": f"c{number}", "click": click["id"], "ts": click["ts"] + 60,
         "ingest": click["ingest"] + rng.randrange(-60, 600), "day": click["day"]}
        for number, click in enumerate(rng.choices(clicked, k=80))
    ]  # fmt: skip
    raw = write_logs(tmp_path / "raw", shown=shown, clicked=clicked, bought=bought)
    clicked_log, start = SPEC[SPEC.index("  bought:") :], SPEC[: SPEC.index("  bought:")]
    bought_log = clicked_log.replace("impression: click", "touch: click").replace(
        ", value: value", ""
    )
    clicked_log = clicked_log.replace("bought", "clicked").replace("event: buy", "event: click")
    text = start.replace("buy: {role: outcome}", "click: {role: outcome}, buy: {role: outcome}")
    text += clicked_log + bought_log.replace("event: buy", "event: buy\n    touch: click")
    lake = Lake(str(tmp_path / "lake"), load_spec(write_spec(tmp_path, text=text)))
    for first_day, last_day in ((0, 0), (1, 2)):
        ingest(lake, raw, (DAYS[first_day], DAYS[last_day]))
    stored = {event["event_id"]: event for event in rows(lake, "events")}
    conversions = [record for record in bought if record["click"] in clicks]
    assert 40 < len(conversions) < len(bought)
    assert stored.keys() & {r["id"] for r in bought} == {r["id"] for r in conversions}
    for record in conversions:
        event, impression = stored[record["id"]], clicks[record["click"]]
        assert event["impression_id"] == impression["id"]
        assert event["user_id"] == impression["user"]
        assert event["item_id"] == impression["item"]
        assert event["visible_ts"] >= stored[record["click"]]["visible_ts"] >= record["ts"] - 60


def test_a_conversion_is_released_with_its_impression(spark: object, tmp_path: Path) -> None:
    """Both become valid when the spec names the surface as the log does."""
    shown, bought = random_logs(3)
    known = [record for record in bought if first_copy(shown, record)]
    for impression in shown[:12]:
        impression["surface"] = "rack"
    raw = write_logs(tmp_path / "raw", shown=shown, bought=known)
    lake = ingested(tmp_path / "before", raw, [(0, 2)])
    assert [UNKNOWN_EVENT] in [row["reasons"] for row in rows(lake, "quarantine")]
    text = SPEC.replace("shelf: {}", "shelf: {logged_as: rack}")
    corrected = Lake(lake.root, load_spec(write_spec(tmp_path, text=text)))
    reprocess_quarantine(corrected, (DAYS[0], DAYS[2]))
    assert rows(corrected, "quarantine") == []
    rebuilt = Lake(str(tmp_path / "rebuilt"), corrected.spec)
    ingest(rebuilt, raw, (DAYS[0], DAYS[2]))
    assert rows(corrected, "events") == rows(rebuilt, "events")


def test_what_is_named_may_be_some_days_older(spark: object, tmp_path: Path) -> None:
    """No longer ago than a run of one day reads; a run of all days finds no more."""
    text = SPEC.replace("    event: buy", "    optional: true\n    event: buy")
    text = text.replace("max_bad_record_rate: 0.1", "max_bad_record_rate: 0.5")
    spec = load_spec(write_spec(tmp_path, text=text))
    days = [DAYS[0] + timedelta(days=n) for n in range(lookback_days(spec) + 2)]
    seconds = [day_start(day, "UTC") for day in days]
    shown = [
        {"id": f"i{number}", "user": "u", "item": f"a{number}", "surface": "home",
         "ts": second, "ingest": second, "day": day}
        for number, (day, second) in enumerate(zip(days, seconds, strict=True))
    ]  # fmt: skip
    # A copy that landed too late: the first one is forgotten by the last day.
    shown.append(shown[0] | {"item": "late", "ingest": seconds[3], "day": days[3]})
    bought = [
        {"id": f"b{number}", "click": f"i{number}", "ts": seconds[-1], "ingest": seconds[-1],
         "value": 1, "day": days[-1]}
        for number in (0, 1, 2)
    ]  # fmt: skip
    bought.append(bought[1] | {"id": "none", "click": None})
    raw = write_logs(tmp_path / "raw", days, shown=shown, bought=bought)
    lakes = [Lake(str(tmp_path / name), spec) for name in ("range", "daily")]
    ingest(lakes[0], raw, (days[0], days[-1]))
    for day in days:
        ingest(lakes[1], raw, (day, day))
    for name in ("events", "excluded_events", "quarantine", "ingest_metrics"):
        assert rows(lakes[1], name) == rows(lakes[0], name)
    items = {e["event_id"]: e["item_id"] for e in rows(lakes[0], "events") if e["log"] == "bought"}
    assert items == {"b0": "late", "b1": "a1", "b2": "a2"}
    assert [row["reasons"] for row in rows(lakes[0], "quarantine")] == [["no impression"]]


def test_a_copy_that_is_dropped_is_not_named_for_any_split_of_days(
    spark: object, tmp_path: Path
) -> None:
    """On each day that a conversion may look back to lands a copy of an impression before them.

    That of the first of them is on time, and no table has it; the others are late, and are kept.
    """
    text = SPEC.replace("    event: buy", "    optional: true\n    event: buy")
    spec = load_spec(write_spec(tmp_path, text=text.replace("rate: 0.1", "rate: 0.5")))
    days = [DAYS[0] + timedelta(days=n) for n in range(lookback_days(spec) + 2)]
    seconds = [day_start(day, "UTC") for day in days]
    first = {"user": "u", "item": "first", "surface": "home", "ts": seconds[0], "day": days[0]}
    shown = [first | {"id": f"of {day}", "ingest": seconds[0]} for day in days[1:]]
    shown += [
        first | {"id": f"of {day}", "item": "copy", "ingest": second, "day": day}
        for day, second in zip(days[1:], seconds[1:], strict=True)
    ]
    shown += [first | {"id": f"{day}", "ingest": second, "ts": second, "day": day}
              for day, second in zip(days, seconds, strict=True)]  # fmt: skip
    bought = [
        {"id": f"b{day}", "click": f"of {day}", "ts": seconds[-1], "ingest": seconds[-1],
         "value": 1, "day": days[-1]}
        for day in days[1:]
    ]  # fmt: skip
    raw = write_logs(tmp_path / "raw", days, shown=shown, bought=bought)
    splits = {"range": [len(days)], "daily": [1] * len(days), "two": [1, len(days) - 1]}
    lakes = [Lake(str(tmp_path / name), spec) for name in splits]
    for lake, lengths in zip(lakes, splits.values(), strict=True):
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        for start, length in zip(starts, lengths, strict=True):
            ingest(lake, raw, (days[start], days[start + length - 1]))
    for name in ("events", "excluded_events", "quarantine", "ingest_metrics"):
        assert rows(lakes[0], name) == rows(lakes[1], name) == rows(lakes[2], name)
    named = {e["event_id"]: e["item_id"] for e in rows(lakes[0], "events") if e["log"] == "bought"}
    assert named == {f"b{day}": "copy" for day in days[2:]}


@pytest.mark.parametrize("fields", ["user: user, ", OWN_FIELDS])
def test_a_log_has_its_own_fields_and_takes_the_others(
    spark: object, tmp_path: Path, fields: str
) -> None:
    shown, _ = random_logs(6)
    impression = next(i for i in shown if i["day"] == DAYS[0])
    own = {"user": "own user", "item": "own item", "surface": "shelf"}
    bought = [
        {"id": id_, "click": click, "ts": impression["ts"], "ingest": impression["ingest"],
         "value": 1, "day": DAYS[0]} | own
        for id_, click in (("known", impression["id"]), ("unknown", "x"))
    ]  # fmt: skip
    raw = write_logs(tmp_path / "raw", shown=shown, bought=bought)
    lake = ingested(tmp_path / "lake", raw, [(0, 0)], fields)
    events = {e["event_id"]: e for e in rows(lake, "events") if e["log"] == "bought"}
    is_complete = fields == OWN_FIELDS
    assert events.keys() == ({"known", "unknown"} if is_complete else {"known"})
    first = first_copy(shown, bought[0])
    assert first
    of_impression = {name: first[name] for name in own}
    expected = {name: (own if name in fields else of_impression)[name] for name in own}
    assert events["known"]["user_id"] == expected["user"]
    assert events["known"]["item_id"] == expected["item"]
    assert events["known"]["surface"] == lake.spec.surface_codes[expected["surface"]]


def test_a_log_in_which_nothing_is_known_is_reported(
    spark: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a change of the format of ids."""
    shown, bought = random_logs(7)
    foreign = [b | {"id": f"{day}-{b['id']}", "click": "x", "day": day, "ts": day_start(day, "UTC"),
                    "ingest": day_start(day, "UTC")} for b in bought for day in DAYS]  # fmt: skip
    raw = write_logs(tmp_path / "raw", shown=shown, bought=foreign)
    ingested(tmp_path / "lake", raw, [(0, 2)])
    assert f"log bought of {DAYS[2]}: none of 120 records belongs to a known event" in caplog.text


def test_a_preview_names_what_is_looked_up(spark: object, tmp_path: Path) -> None:
    shown, bought = random_logs(4)
    raw = write_logs(tmp_path / "raw", shown=shown, bought=bought)
    previews = {p.source: p for p in preview_sources(load_spec(write_spec(tmp_path)), raw, 1000)}
    assert set(previews["bought"].accepted) == {"buy on the surface of what it belongs to"}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (
            "impression: click, ",
            "",
            "columns.user is required, unless columns.impression, columns.touch or",
        ),
        (
            "event: buy\n",
            "event: shown\n",
            "sources.bought.columns.user: impressions need their user",
        ),
        ("impression: click", "touch: click", "columns.touch and `touch`, the type of the events"),
        (
            "event: buy\n    columns: {event_id: id, CONVERSION_FIELDS impression: click",
            "event: buy\n    touch: view\n    columns: {event_id: id, touch: click",
            "sources.bought.touch: no event log has view events",
        ),
        (
            "event: buy\n    columns: {event_id: id, CONVERSION_FIELDS impression: click",
            "event: buy\n    touch: buy\n    columns: {event_id: id, touch: click",
            "sources.bought.touch: a touch cannot follow a touch: let buy events",
        ),
        (
            "event: buy\n    columns: {event_id: id, CONVERSION_FIELDS",
            "event: buy\n    touch: shown\n    columns: {event_id: id, touch: other,",
            "columns.touch and columns.impression both name an event; keep one",
        ),
    ],
)
def test_a_log_that_cannot_have_the_fields_is_refused(
    tmp_path: Path, good: str, bad: str, message: str
) -> None:
    assert good in SPEC
    with pytest.raises(UserError, match=message):
        load_spec(write_spec(tmp_path, text=SPEC.replace(good, bad)))


def test_impressions_are_looked_up_for_as_long_as_labels_are_open(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path))
    oldest = timedelta(seconds=spec.objectives["buy"].window + spec.allowed_lateness)
    first, last = lookup_days(spec, (DAYS[2], DAYS[2]))
    assert first < DAYS[2] - oldest and last == DAYS[1]
