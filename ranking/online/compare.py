"""Online against offline: a day's requests, asked live, read what the tables say of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date, timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from etl.spec.units import MICROS
from etl.tables import arrow, contracts
from etl.tables.contracts import RESERVED_ITEMS
from etl.tables.lake import Lake
from features.inputs import ITEM
from ranking.inputs import Before, Items
from ranking.online.assemble import Assembler
from ranking.online.attributes import Version, upsert_attributes
from ranking.online.build import build
from ranking.online.feed import Event, ingest_event
from ranking.online.request import Asked
from ranking.online.store import Store
from ranking.reads import Reads
from ranking.rhythm import Rhythm
from ranking.student.batches import Assembly
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING
from training.knowledge.earlier import Earlier, earlier

Row = Mapping[str, object]


@dataclass(frozen=True)
class Compared:
    """How many requests were asked, and what was read otherwise: request and array."""

    requests: int
    differences: tuple[str, ...]


def compare(
    lake: Lake, day: date, sequence: str, reads: Reads, folder: Path, most: int | None = None
) -> Compared:
    """Post a day's events to a store, built in a folder, as they came; ask the day's requests.

    At most so many of them. Requests that landed later than on their day are left out. When an
    event becomes visible is left to the store, as it is in the service.
    """
    eve = day - timedelta(days=1)
    store = build(lake, folder, eve, sequence, reads.searched, reads.before)
    upsert_versions(store, lake, day)
    logged = arrow.snapshot(lake, contracts.events(lake.spec)).read(day=day)
    shown = _shown(lake, logged)
    surfaces = lake.spec.ad_surfaces
    readers = {s: Reader.newest(lake, sequence, reads.searched, (s,)) for s in surfaces}
    known = earlier(lake) if reads.before else Earlier.nothing()
    ask, posted = Assembler(store, reads), posted_events(lake, logged)
    following = next(posted, None)
    found: list[str] = []
    n = 0
    asked = islice(_requests(lake, readers, day), most)
    for surface, batch in tqdm(asked, desc="replay", unit="request", disable=None):
        as_of, reader = int(batch.as_of[0]), readers[surface]
        with store.writing() as txn:
            while following and following.ingest_ts < as_of * MICROS["s"]:
                ingest_event(store, txn, following)
                following = next(posted, None)
        live = ask(_asked(lake, surface, batch, shown))
        stored = Assembly(reader, known, reads)(batch)
        items = reader.items.known_by(eve)
        pairs = ((live.requests, stored.requests), (live.candidates, stored.candidates))
        apart = [name for mine, theirs in pairs for name in differing(mine, theirs, items)]
        found += [f"{batch.requests[0]}: {name}" for name in apart]
        n += 1
    store.close()
    return Compared(n, tuple(found))


def differing(live: object, stored: object, known: np.ndarray) -> Iterator[str]:
    """Names of the arrays of two dataclasses that are not equal.

    Indexes of items are compared where they are `known` (items), as rankers read no others.
    """
    for field in fields(live):  # type: ignore[arg-type]
        mine, theirs = getattr(live, field.name), getattr(stored, field.name)
        for name, left, right in _arrays(field.name, mine, theirs):
            if name.endswith(f".{ITEM}"):
                left, right = _rows_of(left, known), _rows_of(right, known)
            if not (left.shape == right.shape and np.array_equal(left, right, equal_nan=True)):
                yield name


def _arrays(
    name: str, mine: object, theirs: object
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray):
        yield name, mine, theirs
    elif isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in sorted(mine.keys() | theirs.keys()):
            yield from _arrays(f"{name}.{key}", mine[key], theirs[key])
    elif isinstance(mine, tuple) and isinstance(theirs, tuple):
        for number, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            yield from _arrays(f"{name}.{number}", left, right)
    else:
        assert isinstance(mine, Items | Before | Rhythm), name
        for field in fields(mine):
            parts = getattr(mine, field.name), getattr(theirs, field.name)
            yield from _arrays(f"{name}.{field.name}", *parts)


def _rows_of(index: np.ndarray, known: np.ndarray) -> np.ndarray:
    inside = (index >= RESERVED_ITEMS) & (index < len(known))
    return np.where(inside & known[np.where(inside, index, 0)], index, 0)


def upsert_versions(store: Store, lake: Lake, day: date) -> None:
    """Add what landed on a day about users and items to a store."""
    for entity in ("user", "item"):
        declared = getattr(lake.spec.attributes, entity)
        if not declared:
            continue
        rows = arrow.snapshot(lake, contracts.attributes(lake.spec, entity)).read(day=day)
        with store.writing() as txn:
            for row in rows.to_pylist():
                version = _version(entity, row, declared)
                upsert_attributes(store, txn, entity, version, store.landed)


def _version(entity: str, row: Row, declared: Mapping[str, object]) -> Version:
    values = {name: row[f"x_{name}"] for name in declared}
    since: int = row["valid_from"]  # type: ignore[assignment]
    return Version(str(row[f"{entity}_id"]), since, values, row.get("bid"), row.get("goal"))  # type: ignore[arg-type]


def posted_events(lake: Lake, logged: pa.Table) -> Iterator[Event]:
    """Events of a table as they would have been posted, in that order.

    One that was ingested before the day on which it landed counts from the start of that day on
    (see etl/parse.py); live it would have been posted by then.
    """
    surfaces = {code: name for name, code in lake.spec.surface_codes.items()}
    types = {code: name for name, code in lake.spec.event_codes.items()}
    found = []
    for row in logged.to_pylist():
        type_ = types[row["type"]]
        earliest = lake.spec.day_start(row["day"]) - lake.spec.delays.get(type_, 0)
        found.append(
            Event(
                event_id=row["event_id"], user=row["user_id"], item=row["item_id"],
                surface=surfaces[row["surface"]], type=type_, event_ts=row["event_ts"],
                ingest_ts=max(row["ingest_ts"], earliest * MICROS["s"]), dwell_ms=row["dwell_ms"],
            )
        )  # fmt: skip
    return iter(sorted(found, key=lambda event: event.ingest_ts))


def _requests(lake: Lake, readers: Mapping[str, Reader], day: date) -> Iterator[tuple[str, Batch]]:
    """Requests of a day, a batch each, in order of time."""
    begin, found = lake.spec.day_start(day), []
    for surface, reader in readers.items():
        stored = reader.batches([day], EVERYTHING, 1, Shuffle(None))
        found += [(surface, batch) for batch in stored if int(batch.as_of[0]) >= begin]
    yield from sorted(found, key=lambda pair: int(pair[1].as_of[0]))


def _shown(lake: Lake, logged: pa.Table) -> dict[str, Row]:
    """The impressions of a table, by their names."""
    ranked = lake.spec.event_codes[lake.spec.impression]
    rows = logged.filter(pa.compute.equal(logged["type"], ranked)).to_pylist()
    return {row["impression_id"]: row for row in rows}


def _asked(lake: Lake, surface: str, batch: Batch, shown: Mapping[str, Row]) -> Asked:
    rows = [shown[impression] for impression in batch.impressions]
    context = list(contracts.context_columns(lake.spec))
    return Asked(
        user=batch.users[0], surface=surface, as_of=int(batch.as_of[0]),
        candidates=[str(row["item_id"]) for row in rows],
        context=[{name: row[f"x_{name}"] for name in context} for row in rows],
    )  # fmt: skip
