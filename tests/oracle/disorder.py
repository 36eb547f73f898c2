"""Logs with every disorder: ties, copies, late arrivals, wrong clocks, unnamed outcomes."""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.oracle.log import DAY, Record
from tests.pipeline import build_tables

FIRST = date(2026, 3, 7)
ZONES = ("UTC", "America/New_York", "Asia/Kathmandu")  # New York's 8 March has 23 hours
LANDED = {"day", "opens", "closes"}
# The brand of an item, and the second from which on it is known; a book has none.
NOON = int(datetime(2026, 3, 7, 12, tzinfo=UTC).timestamp())
BRANDS = {"hat": ("x", 0), "cap": ("x", NOON), "shoe": ("y", NOON + DAY), "sock": ("y", 0),
          "book": (None, 0)}  # fmt: skip
PLANS = {f"u{n}": [("free", 0), ("paid", NOON + n * 7200)] for n in range(0, 30, 3)}
SPEC = """
name: disorder
time_zone: UTC
buckets: 2
lateness: 1d
most_events_a_day: 7
request_gap: 5s
surfaces: {home: {}, search: {}}
events:
  shown: {kind: ad, role: impression}
  click: {kind: ad, role: outcome}
  buy: {kind: ad, role: outcome}
  look: {kind: organic}
objectives:
  click: {event: click, window: 1h}
  buy: {event: buy, window: 12h, also_within: [2h], value: true,
        attribution: [{touch: click, key: brand, same_surface: true}]}
attributes:
  user: {plan: {type: categorical, vocabulary: [free, paid]}}
  item: {brand: {type: categorical, vocabulary: [x, y]}}
sequences: {behaviour: {}}
rank_by: click
counters:
  windows: [1h, 1d]
  events: [shown, click, buy]
  keys: [[user], [user, brand], [item], [surface]]
sources:
  log:
    kind: event_log
    format: json
    path: log/{day}/*.json.gz
    time_unit: s
    delay: 30s
    columns: {event_id: id, user: user, item: item, surface: surface, type: type, event_time: ts,
              ingest_time: ingest, impression: imp, request: request, value: value}
  items: {kind: attributes, entity: item, format: json, path: items.json, key: item,
          valid_from: since, time_unit: s, static: true}
  users: {kind: attributes, entity: user, format: json, path: users.json, key: user,
          valid_from: since, time_unit: s, static: true}
"""


def opens(day: date, zone: str) -> int:
    """The second at which a day begins somewhere."""
    return int(datetime.combine(day, time(), ZoneInfo(zone)).timestamp())


def make(seed: int, users: int, days: int, zone: str = "UTC") -> list[Record]:
    """Records of some users and landing days; the same for the same seed."""
    rng = random.Random(seed)
    span = [FIRST + timedelta(days=n) for n in range(days)]
    bounds = {day: (opens(day, zone), opens(day + timedelta(days=1), zone)) for day in span}
    made: list[Record] = []
    for user in range(users):
        for number in range(rng.randint(0, 4 * days)):
            day = rng.choice(span)
            record = _record(rng, f"{user}-{number}", f"u{user}", day, bounds[day])
            while record:
                made.append(record)
                if record["type"] == "buy" and rng.random() < 0.5:
                    made += _rivals(rng, record, bounds)
                record = _outcome(rng, record, bounds)
    again = [_copy(rng, record, bounds) for record in made if rng.random() < 0.15]
    rng.shuffle(whole := made + again)
    return whole


def _record(rng: random.Random, id_: str, user: str, day: date, bounds: tuple[int, int]) -> Record:
    ingest = rng.randrange(*bounds, 600)
    late = rng.choice((0, 0, 2, 3, 4, 700, 3600, 40_000, DAY, int(2.5 * DAY)))
    type_ = rng.choice(("shown", "shown", "click", "buy", "look"))
    return {
        "id": id_,
        "user": user,
        "item": rng.choice(list(BRANDS)),
        "surface": rng.choice(("home", "home", "search")),
        "type": type_,
        "ts": ingest - late + rng.choice((0, 0, 0, 1800)),  # a clock may run ahead
        "ingest": ingest,
        "day": day,
        "opens": bounds[0],
        "closes": bounds[1],
        "imp": f"i{id_}" if type_ == "shown" else None,
        "request": rng.choice((None, f"r{rng.randrange(3)}")) if type_ == "shown" else None,
        "value": rng.randrange(1, 9) if type_ == "buy" else None,
    }


def _outcome(
    rng: random.Random, cause: Record, bounds: dict[date, tuple[int, int]]
) -> Record | None:
    """What came of a record: a click of an impression, or a buy of a click; or nothing."""
    type_ = {"shown": "click", "click": "buy"}.get(cause["type"])
    ts = cause["ts"] + rng.choice((0, 1, 600, 3600, 3601, 7200, 43_200))
    if not type_ or rng.random() < 0.3:
        return None
    return _landed(bounds, ts + rng.choice((0, 0, 3, 700, 40_000)), cause | {
        "id": f"{cause['id']}-{type_}",
        "item": rng.choice((cause["item"],) * 3 + tuple(BRANDS)),
        "surface": rng.choice((cause["surface"], "home")),
        "type": type_,
        "ts": ts,
        "imp": rng.choice((None, cause["imp"])) if type_ == "click" else None,
        "request": None,
        "value": rng.randrange(1, 9) if type_ == "buy" else None,
    })  # fmt: skip


def _rivals(
    rng: random.Random, bought: Record, bounds: dict[date, tuple[int, int]]
) -> Iterator[Record]:
    """Another impression and its click, shortly before a buy; they may land long after it."""
    late = rng.choice((0, 3600, 40_000))
    for type_, before in (("shown", 300), ("click", 2)):
        id_, ts = f"{bought['id']}-{type_}", bought["ts"] - before
        rival = bought | {"id": id_, "type": type_, "ts": ts, "value": None}
        rival["imp"] = f"i{bought['id']}" if type_ == "shown" else None
        if record := _landed(bounds, ts + late, rival):
            yield record


def _landed(bounds: dict[date, tuple[int, int]], ingest: int, record: Record) -> Record | None:
    """The record as it lands on the day of its ingest; None after the last."""
    for day, (opens_, closes) in bounds.items():
        if opens_ <= ingest < closes:
            return record | {"ingest": ingest, "day": day, "opens": opens_, "closes": closes}
    return None


def _copy(rng: random.Random, record: Record, bounds: dict[date, tuple[int, int]]) -> Record:
    """The same record, landed once more."""
    later = rng.choice([day for day in bounds if day >= record["day"]])
    ingest = max(record["ingest"] + 1, rng.randrange(*bounds[later], 600))
    ingest = min(ingest, bounds[later][1] - 1)
    landed = {"day": later, "opens": bounds[later][0], "closes": bounds[later][1]}
    other = {"id": f"{record['id']}c"} if record["type"] == "shown" and rng.random() < 0.3 else {}
    return record | landed | {"ingest": ingest} | other


def write(records: list[Record], raw: Path, after: int | None = None) -> None:
    """The records as JSON lines by landing day, several files a day; and what is told of entities.

    From the second `after` on the entities are told otherwise.
    """
    files = defaultdict(list)
    for number, record in enumerate(records):
        line = {k: v for k, v in record.items() if v is not None and k not in LANDED}
        files[record["day"], number % 2].append(json.dumps(line) + "\n")
    for (day, part), lines in files.items():
        folder = raw / "log" / str(day)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part}.json.gz").write_bytes(gzip.compress("".join(lines).encode()))
    known = [
        {"item": item, "brand": told, "since": since}
        for item, (brand, first) in BRANDS.items()
        for told, since in ((brand, first), ("z", first + DAY))  # a brand that changes
        if brand
    ]
    told = [
        {"user": user, "plan": plan, "since": since}
        for user, versions in PLANS.items()
        for plan, since in versions
    ]
    for row in [*known, *told] if after is not None else []:
        if row["since"] >= after:
            row |= {"brand": "y"} if "brand" in row else {"plan": "free"}
    for name, content in (("items", known), ("users", told)):
        (raw / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in content))


def lake_of(
    folder: Path,
    records: list[Record],
    spans: list[tuple[int, int]],
    zone: str = "UTC",
    after: int | None = None,
) -> Lake:
    """The tables of a log that landed in some spans of days, one after the other."""
    raw = folder / "raw"
    write(records, raw, after)
    (folder / "spec.yaml").write_text(SPEC.replace("time_zone: UTC", f"time_zone: {zone}"))
    lake = Lake(str(folder / "lake"), load_spec(folder / "spec.yaml"))
    for first, last in spans:
        build_tables(lake, raw, (FIRST + timedelta(days=first), FIRST + timedelta(days=last)))
    return lake
