"""The store from a lake's tables: all that had landed by the end of a day."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from etl.spec.units import DAY
from etl.tables import arrow, atomic_io, contracts
from etl.tables.contract import Contract
from etl.tables.contracts import RESERVED_ITEMS, item_key_columns
from etl.tables.lake import Lake
from features.encoded import signed_hash
from features.history.pack import dwell_byte
from ranking.online.attributes import NEXT_ITEM, Version, known_item, upsert_attributes
from ranking.online.counters import LEVELS, Pairs
from ranking.online.layout import BEFORE, HISTORY, SEEN, UNKNOWN, key_of
from ranking.online.log import id_key
from ranking.online.store import MARGIN_DAYS, Meta, Store, create, open_store


def build(lake: Lake, folder: Path, last: date, sequence: str, length: int, before: int) -> Store:
    """Write the store of a lake into a new folder, completely or not at all.

    It holds what had landed by the end of the day `last`: `length` events of a sequence and what
    GEM kept of `before` impressions for each user, items, offers, and counters.
    """
    items = landed(lake, contracts.items(lake.spec), last)
    meta = Meta(
        spec=lake.spec, sequence=sequence, length=length, landed=lake.spec.day_end(last),
        items=1 + pc.max(items["item_ix"]).as_py() if len(items) else RESERVED_ITEMS,
    )  # fmt: skip
    staging = atomic_io.staging_folder(folder)
    store = create(staging, meta)
    source = Source(lake, store, last, before)
    source.put_items(items)
    source.upsert_versions("user")
    source.upsert_versions("item")
    tables = itertools.chain(source.before_rows(), source.behaviour(), source.ids())
    for name, pairs in tqdm(tables, desc="online features", unit="table", disable=None):
        with store.writing() as txn:
            txn.put_all(name, pairs)
    store.close()
    atomic_io.publish_folder(staging, folder)
    return open_store(folder, lake.spec)


@dataclass(frozen=True)
class Source:
    """The tables of a lake as they were at the end of a day, as records of a store."""

    lake: Lake
    store: Store
    last: date
    before: int

    def put_items(self, items: pa.Table) -> None:
        """Write the index of every item that was ever seen."""
        index = items["item_ix"].to_numpy()
        heads = np.zeros(len(index), self.store.layout.item_head)
        heads["index"], heads["since"], heads["keys"] = index, UNKNOWN, UNKNOWN
        names = items["item_id"].to_pylist()
        with self.store.writing() as txn:
            txn.put("meta", NEXT_ITEM, self.store.meta.items.to_bytes(8, "big"))
            txn.put_all(
                "items", [(key_of(n), h.tobytes()) for n, h in zip(names, heads, strict=True)]
            )

    def upsert_versions(self, entity: str) -> None:
        """Add the versions of users or items that a request can still read."""
        with self.store.writing() as txn:
            for version in self._versions(entity):
                upsert_attributes(self.store, txn, entity, version, self.store.first_request)

    def _versions(self, entity: str) -> Iterator[Version]:
        """The versions of users or items, in the order in which they are valid."""
        contract = contracts.attributes(self.lake.spec, entity)
        order = [(name, "ascending") for name in (f"{entity}_id", "valid_from", "day")]
        rows = landed(self.lake, contract, self.last).sort_by(order)
        declared = getattr(self.lake.spec.attributes, entity)
        for row in rows.to_pylist():
            values = {name: row[f"x_{name}"] for name in declared}
            yield Version(
                row[f"{entity}_id"], row["valid_from"], values, row.get("bid"), row.get("goal")
            )

    def before_rows(self) -> Iterator[tuple[str, Pairs]]:
        """What GEM kept of each user's newest impressions."""
        contract = contracts.user_knowledge(self.lake.spec)
        if not self.before or not self.lake.exists(contract.name):
            return
        stored = landed(self.lake, contract, self.last)
        stored = stored.sort_by([(name, "ascending") for name in contract.order_by])
        rows = np.zeros(len(stored), BEFORE)
        rows["visible"], rows["shown"] = stored["visible_ts"], stored["shown_ts"]
        rows["item"] = stored["item_ix"]
        kept = np.frombuffer(b"".join(stored["kept"].to_pylist()), np.uint8)
        rows["kept"] = kept.reshape(len(stored), -1)
        found = _grouped(_keys(stored["user_id"]), rows)
        yield "before", [(name, theirs[-self.before :].tobytes()) for name, theirs in found]

    def behaviour(self) -> Iterator[tuple[str, Pairs]]:
        """Histories of users bucket by bucket, and the counters of all of them."""
        spec, histories = self.lake.spec, self.store.histories
        contract = contracts.events(spec)
        columns = [n for n in contract.columns if not n.startswith("x_") and n != "source_file"]
        stored = arrow.snapshot(self.lake, contract)
        days = [day for day in stored.days() if day <= self.last]
        for bucket in range(spec.buckets):
            events = stored.read(columns, day=days, bucket=bucket)
            if histories.codes:
                wanted = pc.is_in(events["type"], pa.array(histories.codes, pa.int8()))
                events = events.filter(wanted)
            events = events.sort_by([(name, "ascending") for name in contract.order_by])
            rows = self._history(events.combine_chunks())
            yield "history", list(self._kept(_keys(events["user_id"]), rows))
        since = self.store.landed - max(spec.counters.windows) - LEVELS[0].seconds
        visible_after = spec.lateness + max(log.delay for log in spec.logs.values())
        landed = self.last - timedelta(days=2 + (max(spec.counters.windows) + visible_after) // DAY)
        recent = stored.read(columns, day=[day for day in days if day >= landed])
        yield from self.counters(recent.filter(pc.greater_equal(recent["visible_ts"], since)))

    def ids(self) -> Iterator[tuple[str, Pairs]]:
        """Ids of the events that are not settled yet: they may have been posted live as well."""
        stored = arrow.snapshot(self.lake, contracts.events(self.lake.spec))
        first = self.last - timedelta(days=2 * self.lake.spec.lateness_days + MARGIN_DAYS + 1)
        days = [day for day in stored.days() if first <= day <= self.last]
        recent = stored.read(["event_id", "event_ts", "type"], day=days)
        unsettled = recent.filter(pc.greater_equal(recent["event_ts"], self.store.settled_ts))
        names = {code: name for name, code in self.lake.spec.event_codes.items()}
        ids = zip(unsettled["type"].to_pylist(), unsettled["event_id"].to_pylist(), strict=True)
        yield "seen", [(id_key(names[code], one), SEEN) for code, one in ids]

    def _kept(self, owner: np.ndarray, rows: np.ndarray) -> Iterator[tuple[bytes, bytes]]:
        """The events of each user that a request may read."""
        for name, theirs in _grouped(owner, rows):
            first = self.store.histories.first_kept(theirs["visible"], self.store.landed)
            yield name, theirs[first:].tobytes()

    def _history(self, events: pa.Table) -> np.ndarray:
        rows = np.zeros(len(events), HISTORY)
        rows["visible"], rows["happened"] = events["visible_ts"], events["event_ts"]
        rows["event"] = _bytes(events["event_id"])
        rows["item"] = heads_of(self.store, events["item_id"])["index"]
        rows["surface"], rows["type"] = events["surface"], events["type"]
        rows["dwell"] = dwell_byte(events["dwell_ms"].to_numpy())
        return rows

    def counters(self, events: pa.Table) -> Iterator[tuple[str, Pairs]]:
        """The records of each key of the spec, over events (N)."""
        counters = self.store.counters
        events = events.filter(pc.is_in(events["type"], pa.array(counters.codes, pa.int8())))
        second = events["visible_ts"].to_numpy()
        codes = np.array(counters.codes)
        kind = np.argmax(events["type"].to_numpy()[:, None] == codes, 1)
        users = events["user_id"].combine_chunks().dictionary_encode()
        hashes = np.array([signed_hash(name) for name in users.dictionary.to_pylist()], np.int64)
        parts = {
            "user": hashes[users.indices.to_numpy()],
            "surface": events["surface"].to_numpy().astype(np.int64),
            **item_parts(self.store, events["item_id"], second),
        }
        yield from counters.records(parts, second, kind)


def heads_of(store: Store, items: pa.ChunkedArray) -> np.ndarray:
    """What a store knows of each of some items (N); new ones get an index."""
    distinct = items.combine_chunks().dictionary_encode()
    with store.writing() as txn:
        heads = [known_item(store, txn, name) for name in distinct.dictionary.to_pylist()]
    return np.array(heads, store.layout.item_head)[distinct.indices.to_numpy()]


def item_parts(store: Store, items: pa.ChunkedArray, second: np.ndarray) -> dict[str, np.ndarray]:
    """The single keys of counters (N) that items tell, as each was known at a second."""
    heads = heads_of(store, items)
    known = (heads["since"] != UNKNOWN) & (heads["since"] < second)
    parts = {"item": heads["index"].astype(np.int64)}
    for n, name in enumerate(item_key_columns(store.spec)):
        parts[name.removeprefix("k_")] = np.where(known, heads["keys"][:, n], UNKNOWN)
    return parts


def landed(lake: Lake, contract: Contract, last: date) -> pa.Table:
    """The rows of a table that had landed by the end of a day."""
    stored = arrow.snapshot(lake, contract)
    return stored.read(day=[day for day in stored.days() if day <= last]).combine_chunks()


def _keys(names: pa.ChunkedArray) -> np.ndarray:
    return np.array([key_of(name) for name in names.to_pylist()], np.bytes_)


def _bytes(names: pa.ChunkedArray) -> np.ndarray:
    return np.array([name.encode() for name in names.to_pylist()], np.bytes_)


def _grouped(owner: np.ndarray, rows: np.ndarray) -> Iterator[tuple[bytes, np.ndarray]]:
    """Each owner and its rows; those of one owner lie together."""
    if not len(rows):
        return
    starts = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1])))
    for a, b in zip(starts, np.append(starts[1:], len(rows)), strict=True):
        yield bytes(owner[a]), rows[a:b]
