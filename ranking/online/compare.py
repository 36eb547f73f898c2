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
from ranking.online.attributes import Version, tell_items, tell_users
from ranking.online.build import build
from ranking.online.feed import Event, feed
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
    """Tell a store, made in a folder, a day's events as they became visible; ask its requests.

    At most so many of them. Requests that landed later than on their day are left out.
    """
    eve = day - timedelta(days=1)
    store = build(lake, folder, eve, sequence, reads.searched, reads.before)
    tell_versions(store, lake, day)
    logged = arrow.snapshot(lake, contracts.events(lake.spec)).read(day=day)
    shown = _shown(lake, logged)
    surfaces = lake.spec.ad_surfaces
    readers = {s: Reader.newest(lake, sequence, reads.searched, (s,)) for s in surfaces}
    known = earlier(lake) if reads.before else Earlier.nothing()
    ask, told = Assembler(store, reads), events(lake, logged)
    waiting: list[Event] = []
    found: list[str] = []
    n = 0
    asked = islice(_requests(lake, readers, day), most)
    for surface, batch in tqdm(asked, desc="replay", unit="request", disable=None):
        as_of, reader = int(batch.as_of[0]), readers[surface]
        due, waiting = _until(waiting, told, as_of)
        feed(store, due)
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


def tell_versions(store: Store, lake: Lake, day: date) -> None:
    """Tell a store what landed on a day about users and items."""
    for entity, tell in (("user", tell_users), ("item", tell_items)):
        declared = getattr(lake.spec.attributes, entity)
        if not declared:
            continue
        rows = arrow.snapshot(lake, contracts.attributes(lake.spec, entity)).read(day=day)
        tell(store, [_version(entity, row, declared) for row in rows.to_pylist()])


def _version(entity: str, row: Row, declared: Mapping[str, object]) -> Version:
    values = {name: row[f"x_{name}"] for name in declared}
    since: int = row["valid_from"]  # type: ignore[assignment]
    return Version(str(row[f"{entity}_id"]), since, values, row.get("bid"), row.get("goal"))  # type: ignore[arg-type]


def events(lake: Lake, logged: pa.Table) -> Iterator[Event]:
    """Events of a table as they would have been told, in the order in which they were visible."""
    surfaces = {code: name for name, code in lake.spec.surface_codes.items()}
    types = {code: name for name, code in lake.spec.event_codes.items()}
    for row in logged.sort_by("visible_ts").to_pylist():
        yield Event(
            event_id=row["event_id"], user=row["user_id"], item=row["item_id"],
            surface=surfaces[row["surface"]], type=types[row["type"]], event_ts=row["event_ts"],
            ingest_ts=row["ingest_ts"], dwell_ms=row["dwell_ms"],
            delay=row["visible_ts"] - row["ingest_ts"] // MICROS["s"],
        )  # fmt: skip


def _until(
    waiting: list[Event], told: Iterator[Event], as_of: int
) -> tuple[list[Event], list[Event]]:
    """The events that are visible before a second, and the first that is not."""
    due = list(waiting)
    while not due or due[-1].visible_ts < as_of:
        following = next(told, None)
        if following is None:
            return due, []
        due.append(following)
    return due[:-1], due[-1:]


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
