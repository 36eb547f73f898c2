"""Logs with every disorder: ties, copies, late arrivals, wrong clocks, unnamed outcomes."""

import gzip
import json
import random
from collections import defaultdict
from datetime import date, timedelta
from pathlib import Path

from tests.oracle.log import DAY, Record

FIRST = date(2026, 1, 1)
ORIGIN = (FIRST - date(1970, 1, 1)).days
BRANDS = {"hat": "x", "cap": "x", "shoe": "y", "sock": "y", "book": None}  # a book has no brand
SPEC = """
name: disorder
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
  buy: {event: buy, window: 12h, also_within: [2h], credit: click, credit_by: brand,
        credit_same_surface: true, value: true}
attributes:
  item: {brand: {type: categorical, vocabulary: [x, y]}}
sequences: {behaviour: {}}
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
  items: {kind: attributes, entity: item, format: json, path: items.json, key: item}
"""


def make(seed: int, users: int, days: int) -> list[Record]:
    """Records of some users and landing days; the same for the same seed."""
    rng = random.Random(seed)
    made: list[Record] = []
    for user in range(users):
        for number in range(rng.randint(0, 5 * days)):
            made.append(_record(rng, f"{user}-{number}", f"u{user}", rng.randrange(days)))
    shown = [record["imp"] for record in made if record["type"] == "shown"]
    for record in made:
        if record["type"] == "click" and shown and rng.random() < 0.5:
            record["imp"] = rng.choice(shown)
    again = [_copy(rng, record, days) for record in made if rng.random() < 0.15]
    rng.shuffle(whole := made + again)
    return whole


def _record(rng: random.Random, id_: str, user: str, day: int) -> Record:
    landed = (ORIGIN + day) * DAY
    ingest = landed + rng.randrange(0, DAY, 600)
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
        "day": ORIGIN + day,
        "imp": f"i{id_}" if type_ == "shown" else None,
        "request": rng.choice((None, f"r{rng.randrange(3)}")) if type_ == "shown" else None,
        "value": rng.randrange(1, 9) if type_ == "buy" else None,
    }


def _copy(rng: random.Random, record: Record, days: int) -> Record:
    """The same record, landed once more."""
    later = rng.randrange(record["day"] - ORIGIN, days)
    ingest = max(record["ingest"] + 1, (ORIGIN + later) * DAY + rng.randrange(0, DAY, 600))
    ingest = min(ingest, (ORIGIN + later + 1) * DAY - 1)
    other = {"id": f"{record['id']}c"} if record["type"] == "shown" and rng.random() < 0.3 else {}
    return record | {"ingest": ingest, "day": ORIGIN + later} | other


def write(records: list[Record], raw: Path) -> None:
    """The records as JSON lines by landing day, several files a day."""
    files = defaultdict(list)
    for number, record in enumerate(records):
        line = {k: v for k, v in record.items() if v is not None and k != "day"}
        files[record["day"], number % 2].append(json.dumps(line) + "\n")
    for (day, part), lines in files.items():
        folder = raw / "log" / str(FIRST + timedelta(days=day - ORIGIN))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part}.json.gz").write_bytes(gzip.compress("".join(lines).encode()))
    known = [{"item": item, "brand": brand} for item, brand in BRANDS.items() if brand]
    (raw / "items.json").write_text("".join(json.dumps(row) + "\n" for row in known))
