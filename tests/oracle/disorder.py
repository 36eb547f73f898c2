"""Random logs with every disorder: ties, duplicates, late arrivals, wrong clocks, missing ids."""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from zlib import crc32
from zoneinfo import ZoneInfo

from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.oracle.log import DAY, Record
from tests.pipeline import build_tables

FIRST = date(2026, 3, 7)
ZONES = ("UTC", "America/New_York", "Asia/Kathmandu")  # New York's 8 March has 23 hours
LANDING_FIELDS = {"day", "opens", "closes"}  # fields of a record that its log line does not contain
Bounds = dict[date, tuple[int, int]]  # first second of a day and of the next
# The brand of an item, and the second since which it is known; books have no brand.
NOON = int(datetime(2026, 3, 7, 12, tzinfo=UTC).timestamp())
BRANDS = {"hat": ("x", 0), "cap": ("x", NOON), "shoe": ("y", NOON + DAY), "sock": ("y", 0),
          "book": (None, 0)}  # fmt: skip
PLANS = {f"u{n}": [("free", 0), ("paid", NOON + n * 7200)] for n in range(0, 30, 3)}
SPEC = """
name: disorder
time_zone: UTC
buckets: 2
allowed_lateness: 1d
max_events_per_user_day: 7
request_session_gap: 5s
surfaces: {home: {}, search: {}}
events:
  shown: {role: impression}
  click: {role: outcome}
  buy: {role: outcome}
  look: {}
objectives:
  click: {event: click, window: 1h}
  buy: {event: buy, window: 12h, extra_windows: [2h], value: true,
        attribution: [{touch: click, key: brand, same_surface: true}]}
auxiliary_objectives:
  look: {event: look, window: 2h}
  click_dwell: {event: click, window: 1h, target: dwell}
  buy_dwell: {event: buy, window: 3h, target: dwell,
              attribution: [{touch: click, key: brand, same_surface: true}]}
attributes:
  user: {plan: {type: categorical, vocabulary: [free, paid]}}
  item: {brand: {type: categorical, vocabulary: [x, y]}}
  context:
    device: {type: categorical, size: 8}
    hour: {type: clock, part: hour}
    screen: {type: numeric}
  event:
    quantity: {type: numeric}
    handset: {type: categorical, size: 8, column: device}
    coupon: {type: categorical, vocabulary: [spring, sale], column: code}
sequences: {behaviour: {}}
history: {attributes: [quantity, handset, coupon]}
rank_by: click
counters:
  windows: [1h, 1d]
  events: [shown, click, buy]
  keys: [[user], [user, brand], [item], [surface], [item, plan], [plan, brand],
         [user, device], [hour, brand]]
  half_lives: [10m, 2d]
  time_since_last: [click, look]
  aggregations:
    - {function: mean, column: dwell, event: look}
    - {function: max, column: dwell, event: click}
    - {function: sum, column: value, event: buy}
    - {function: last, column: value, event: buy}
    - {function: first, column: value, event: buy}
    - {function: min, column: value, event: buy}
    - {function: distinct_count, column: item, event: click}
    - {function: distinct_count, column: user, event: shown}
    - {function: distinct_count, column: device, event: look}
    - {function: distinct_count, column: brand, event: shown}
    - {function: sum, column: quantity, event: buy}
    - {function: mean, column: screen, event: click}
    - {function: distinct_count, column: coupon, event: buy}
    - {function: distinct_count, column: plan, event: shown}
    - {function: distinct_count, column: hour, event: click}
    - {function: distinct_count, column: surface, event: shown}
sources:
  log:
    kind: event_log
    format: json
    path: log/{day}/*.json.gz
    time_unit: s
    delay: 30s
    columns: {event_id: id, user: user, item: item, surface: surface, type: type, event_time: ts,
              ingest_time: ingest, impression: imp, request: request, value: value,
              dwell: dwell}
  items: {kind: attributes, entity: item, format: json, path: items.json, key: item,
          valid_from: since, time_unit: s, static: true}
  users: {kind: attributes, entity: user, format: json, path: users.json, key: user,
          valid_from: since, time_unit: s, static: true}
"""


def day_start(day: date, zone: str) -> int:
    """The epoch second at which a day begins in a time zone."""
    return int(datetime.combine(day, time(), ZoneInfo(zone)).timestamp())


def generate_records(seed: int, users: int, days: int, zone: str = "UTC") -> list[Record]:
    """Records of some users and landing days; the same for the same seed."""
    rng = random.Random(seed)
    span = [FIRST + timedelta(days=n) for n in range(days)]
    bounds = {day: (day_start(day, zone), day_start(day + timedelta(days=1), zone)) for day in span}
    records: list[Record] = []
    for user in range(users):
        for number in range(rng.randint(0, 4 * days)):
            day = rng.choice(span)
            record: Record | None = _record(rng, f"{user}-{number}", f"u{user}", day, bounds[day])
            while record:
                records.append(record)
                if record["type"] == "buy" and rng.random() < 0.5:
                    records += _competing_touches(rng, record, bounds)
                record = _outcome(rng, record, bounds)
    duplicates = [_duplicate(rng, record, bounds) for record in records if rng.random() < 0.15]
    records += duplicates
    rng.shuffle(records)
    return records


def _record(rng: random.Random, id_: str, user: str, day: date, bounds: tuple[int, int]) -> Record:
    ingest = rng.randrange(*bounds, 600)
    lag = rng.choice((0, 0, 2, 3, 4, 700, 3600, 40_000, DAY, int(2.5 * DAY)))
    type_ = rng.choice(("shown", "shown", "click", "buy", "look"))
    return {
        "id": id_,
        "user": user,
        "item": rng.choice(list(BRANDS)),
        "surface": rng.choice(("home", "home", "search")),
        "type": type_,
        "ts": ingest - lag + rng.choice((0, 0, 0, 1800)),  # a clock may run ahead
        "ingest": ingest,
        "day": day,
        "opens": bounds[0],
        "closes": bounds[1],
        "imp": f"i{id_}" if type_ == "shown" else None,
        "request": rng.choice((None, f"r{rng.randrange(3)}")) if type_ == "shown" else None,
        "value": rng.randrange(1, 9) if type_ == "buy" else None,
        "dwell": _dwell_ms(rng),
        **_attributes(id_),
    }


def _attributes(id_: str) -> Record:
    """The attributes of a record by its id; all but the size of the screen may be missing."""
    number = crc32(id_.encode())
    return {
        "device": (None, "phone", "phone", "tv")[number % 4],
        "screen": (4.7, 6.1, 55)[number // 4 % 3],
        "quantity": (None, 0, 1.25, 3, 10**12)[number // 12 % 5],
        "code": (None, "spring", "sale", "spring", "other")[number // 60 % 5],
    }


def _dwell_ms(rng: random.Random) -> float | None:
    """A dwell in milliseconds; it may be missing, or longer than a day."""
    return rng.choice((None, 0, 700, 2500.5, 30_001, 10**9))


def _outcome(rng: random.Random, cause: Record, bounds: Bounds) -> Record | None:
    """A click of an impression or a buy of a click; sometimes none."""
    type_ = {"shown": "click", "click": "buy"}.get(cause["type"])
    ts = cause["ts"] + rng.choice((0, 1, 600, 3600, 3601, 7200, 43_200))
    if not type_ or rng.random() < 0.3:
        return None
    ingest = ts + rng.choice((0, 0, 3, 700, 40_000))
    outcome = cause | {
        "id": f"{cause['id']}-{type_}",
        "item": rng.choice((cause["item"],) * 3 + tuple(BRANDS)),
        "surface": rng.choice((cause["surface"], "home")),
        "type": type_,
        "ts": ts,
        "imp": rng.choice((None, cause["imp"])) if type_ == "click" else None,
        "request": None,
        "value": rng.randrange(1, 9) if type_ == "buy" else None,
        "dwell": _dwell_ms(rng),
        **_attributes(f"{cause['id']}-{type_}"),
    }
    return _arrived(bounds, ingest, outcome)


def _competing_touches(rng: random.Random, buy: Record, bounds: Bounds) -> Iterator[Record]:
    """Another impression and its click, shortly before a buy; they may land long after it."""
    lag = rng.choice((0, 3600, 40_000))
    for type_, seconds_before in (("shown", 300), ("click", 2)):
        id_, ts = f"{buy['id']}-{type_}", buy["ts"] - seconds_before
        touch = buy | {"id": id_, "type": type_, "ts": ts, "value": None}
        touch["imp"] = f"i{buy['id']}" if type_ == "shown" else None
        record = _arrived(bounds, ts + lag, touch)
        if record:
            yield record


def _arrived(bounds: Bounds, ingest: int, record: Record) -> Record | None:
    """The record as it lands on the day of its ingest; None after the last day."""
    for day, (start, end) in bounds.items():
        if start <= ingest < end:
            return record | {"ingest": ingest, "day": day, "opens": start, "closes": end}
    return None


def _duplicate(rng: random.Random, record: Record, bounds: Bounds) -> Record:
    """A copy that lands later; copies of impressions sometimes have another event id."""
    day = rng.choice([day for day in bounds if day >= record["day"]])
    start, end = bounds[day]
    ingest = min(max(record["ingest"] + 1, rng.randrange(start, end, 600)), end - 1)
    landing = {"ingest": ingest, "day": day, "opens": start, "closes": end}
    has_other_id = record["type"] == "shown" and rng.random() < 0.3
    return record | landing | ({"id": f"{record['id']}c"} if has_other_id else {})


def write_raw(records: list[Record], raw: Path, changed_since: int | None = None) -> None:
    """Write records as JSON lines by landing day, several files a day, and attributes of entities.

    Attributes that are valid from `changed_since` on have other values than without it.
    """
    files = defaultdict(list)
    for number, record in enumerate(records):
        line = {k: v for k, v in record.items() if v is not None and k not in LANDING_FIELDS}
        files[record["day"], number % 2].append(json.dumps(line) + "\n")
    for (day, part), lines in files.items():
        folder = raw / "log" / str(day)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part}.json.gz").write_bytes(gzip.compress("".join(lines).encode()))
    items: list[Record] = [
        {"item": item, "brand": brand, "since": since}
        for item, (first_brand, first_since) in BRANDS.items()
        for brand, since in ((first_brand, first_since), ("z", first_since + DAY))
        if first_brand
    ]
    users: list[Record] = [
        {"user": user, "plan": plan, "since": since}
        for user, versions in PLANS.items()
        for plan, since in versions
    ]
    if changed_since is not None:
        for item_row in items:
            item_row["brand"] = "y" if item_row["since"] >= changed_since else item_row["brand"]
        for user_row in users:
            user_row["plan"] = "free" if user_row["since"] >= changed_since else user_row["plan"]
    for name, rows in (("items", items), ("users", users)):
        (raw / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_lake(
    folder: Path,
    records: list[Record],
    spans: list[tuple[int, int]],
    zone: str = "UTC",
    changed_since: int | None = None,
) -> Lake:
    """The tables of a log, built in spans of days (first, last) one after the other."""
    raw = folder / "raw"
    write_raw(records, raw, changed_since)
    (folder / "spec.yaml").write_text(SPEC.replace("time_zone: UTC", f"time_zone: {zone}"))
    lake = Lake(str(folder / "lake"), load_spec(folder / "spec.yaml"))
    for first, last in spans:
        build_tables(lake, raw, (FIRST + timedelta(days=first), FIRST + timedelta(days=last)))
    return lake
