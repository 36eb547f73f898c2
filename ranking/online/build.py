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
from ranking.online.attributes import NEXT_ITEM, Version, known_item, tell_items, tell_users
from ranking.online.counters import SECONDS
from ranking.online.feed import name_of
from ranking.online.history import SPARE
from ranking.online.layout import BEFORE, HISTORY, HOUR, SEEN, UNKNOWN, key_of
from ranking.online.store import Meta, Store, create, open_store

Pairs = list[tuple[bytes, bytes]]


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
    source.indexed(items)
    tell_users(store, source.versions("user"))
    tell_items(store, source.versions("item"))
    tables = itertools.chain(source.before_rows(), source.behaviour())
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

    def indexed(self, told: pa.Table) -> None:
        """Every item that was ever seen keeps its index."""
        index = told["item_ix"].to_numpy()
        heads = np.zeros(len(index), self.store.layout.item_head)
        heads["index"], heads["since"], heads["keys"] = index, UNKNOWN, UNKNOWN
        names = told["item_id"].to_pylist()
        with self.store.writing() as txn:
            txn.put("meta", NEXT_ITEM, self.store.meta.items.to_bytes(8, "big"))
            txn.put_all(
                "items", [(key_of(n), h.tobytes()) for n, h in zip(names, heads, strict=True)]
            )

    def versions(self, entity: str) -> Iterator[Version]:
        """The versions of users or items, in the order in which they hold."""
        contract = contracts.attributes(self.lake.spec, entity)
        order = [(name, "ascending") for name in (f"{entity}_id", "valid_from", "day")]
        told = landed(self.lake, contract, self.last).sort_by(order)
        declared = getattr(self.lake.spec.attributes, entity)
        for row in told.to_pylist():
            values = {name: row[f"x_{name}"] for name in declared}
            yield Version(
                row[f"{entity}_id"], row["valid_from"], values, row.get("bid"), row.get("goal")
            )

    def before_rows(self) -> Iterator[tuple[str, Pairs]]:
        """What GEM kept of each user's newest impressions."""
        contract = contracts.user_knowledge(self.lake.spec)
        if not self.before or not self.lake.exists(contract.name):
            return
        told = landed(self.lake, contract, self.last)
        told = told.sort_by([(name, "ascending") for name in contract.order_by])
        rows = np.zeros(len(told), BEFORE)
        rows["visible"], rows["shown"] = told["visible_ts"], told["shown_ts"]
        rows["item"] = told["item_ix"]
        kept = np.frombuffer(b"".join(told["kept"].to_pylist()), np.uint8)
        rows["kept"] = kept.reshape(len(told), -1)
        yield "before", list(_grouped(_keys(told["user_id"]), rows, self.before))

    def behaviour(self) -> Iterator[tuple[str, Pairs]]:
        """Histories of users bucket by bucket, and the counters of all of them."""
        spec, histories = self.lake.spec, self.store.histories
        contract = contracts.events(spec)
        columns = [n for n in contract.columns if not n.startswith("x_") and n != "source_file"]
        stored = arrow.snapshot(self.lake, contract)
        days = [day for day in stored.days() if day <= self.last]
        for bucket in range(spec.buckets):
            told = stored.read(columns, day=days, bucket=bucket)
            if histories.codes:
                wanted = pc.is_in(told["type"], pa.array(histories.codes, pa.int8()))
                told = told.filter(wanted)
            told = told.sort_by([(name, "ascending") for name in contract.order_by])
            rows = self._history(told.combine_chunks())
            most = histories.most + SPARE
            yield "history", list(_grouped(_keys(told["user_id"]), rows, most))
        since = spec.day_end(self.last) - max(spec.counters.windows) - SECONDS
        landed = self.last - timedelta(days=2 + max(spec.counters.windows) // DAY)
        recent = stored.read(columns, day=[day for day in days if day >= landed])
        yield "seen", self._seen(recent)
        yield from self._counters(recent.filter(pc.greater_equal(recent["visible_ts"], since)))

    def _seen(self, recent: pa.Table) -> Pairs:
        """Events of the last days, which may be told again live."""
        again = recent.filter(pc.greater_equal(recent["day"], self.last - timedelta(days=1)))
        return [(name_of(one), SEEN) for one in again["event_id"].to_pylist()]

    def _history(self, told: pa.Table) -> np.ndarray:
        rows = np.zeros(len(told), HISTORY)
        rows["visible"], rows["happened"] = told["visible_ts"], told["event_ts"]
        rows["event"] = _bytes(told["event_id"])
        rows["item"] = self._index(told["item_id"])
        rows["surface"], rows["type"] = told["surface"], told["type"]
        rows["dwell"] = dwell_byte(told["dwell_ms"].to_numpy())
        return rows

    def _index(self, items: pa.ChunkedArray) -> np.ndarray:
        """Indexes (N) of items, by the store."""
        return self._heads(items)["index"]

    def _heads(self, items: pa.ChunkedArray) -> np.ndarray:
        """What the store knows of each of some items (N)."""
        told = items.combine_chunks().dictionary_encode()
        with self.store.writing() as txn:
            heads = [known_item(self.store, txn, name) for name in told.dictionary.to_pylist()]
        return np.array(heads, self.store.layout.item_head)[told.indices.to_numpy()]

    def _counters(self, told: pa.Table) -> Iterator[tuple[str, Pairs]]:
        """Hours and totals of each key of the spec, over events (N)."""
        counters = self.store.counters
        told = told.filter(pc.is_in(told["type"], pa.array(counters.codes, pa.int8())))
        hour, second = np.divmod(told["visible_ts"].to_numpy(), SECONDS)
        codes = np.array(counters.codes)
        kind = np.argmax(told["type"].to_numpy()[:, None] == codes, 1)
        parts = self._parts(told)
        for number, key in enumerate(counters.keys):
            columns = np.stack([parts[part] for part in key], 1)
            there = (columns != UNKNOWN).all(1)
            values, owner = np.unique(columns[there], axis=0, return_inverse=True)
            names = counters.names_of(number, values)
            yield from self._of_key(names, owner.ravel(), hour[there], second[there], kind[there])

    def _of_key(
        self, names: list[bytes], owner: np.ndarray, hour: np.ndarray, second: np.ndarray,
        kind: np.ndarray,
    ) -> Iterator[tuple[str, Pairs]]:  # fmt: skip
        order = np.lexsort((hour, owner))
        owner, hour = owner[order], hour[order]
        rows = np.zeros(len(order), HOUR)
        rows["second"], rows["type"] = second[order], kind[order]
        first = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(hour, prepend=-1))
        cuts = np.append(first, len(order))
        yield (
            "hours",
            [
                (names[owner[a]] + int(hour[a]).to_bytes(4, "big"), rows[a:b].tobytes())
                for a, b in itertools.pairwise(cuts)
            ],
        )
        totals = np.zeros(len(first), self.store.counters.totals)
        totals["hour"] = hour[first]
        group = np.repeat(np.arange(len(first)), np.diff(cuts))
        np.add.at(totals["counts"], (group, rows["type"]), 1)
        own = owner[first]
        starts = np.flatnonzero(np.diff(own, prepend=-1))
        ends = np.append(starts, len(own))
        yield (
            "totals",
            [(names[own[a]], totals[a:b].tobytes()) for a, b in itertools.pairwise(ends)],
        )

    def _parts(self, told: pa.Table) -> dict[str, np.ndarray]:
        """The single keys (N) of events, as items were known when each became visible."""
        users = told["user_id"].combine_chunks().dictionary_encode()
        hashes = np.array([signed_hash(name) for name in users.dictionary.to_pylist()], np.int64)
        heads = self._heads(told["item_id"])
        then = (heads["since"] != UNKNOWN) & (heads["since"] < told["visible_ts"].to_numpy())
        parts = {
            "user": hashes[users.indices.to_numpy()],
            "surface": told["surface"].to_numpy().astype(np.int64),
            "item": heads["index"].astype(np.int64),
        }
        for n, name in enumerate(item_key_columns(self.lake.spec)):
            parts[name.removeprefix("k_")] = np.where(then, heads["keys"][:, n], UNKNOWN)
        return parts


def landed(lake: Lake, contract: Contract, last: date) -> pa.Table:
    """The rows of a table that had landed by the end of a day."""
    stored = arrow.snapshot(lake, contract)
    return stored.read(day=[day for day in stored.days() if day <= last]).combine_chunks()


def _keys(names: pa.ChunkedArray) -> np.ndarray:
    return np.array([key_of(name) for name in names.to_pylist()], np.bytes_)


def _bytes(names: pa.ChunkedArray) -> np.ndarray:
    return np.array([name.encode() for name in names.to_pylist()], np.bytes_)


def _grouped(owner: np.ndarray, rows: np.ndarray, most: int) -> Iterator[tuple[bytes, bytes]]:
    """The rows of each owner, who lie together: the last `most` of them."""
    if not len(rows):
        return
    starts = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1])))
    for a, b in zip(starts, np.append(starts[1:], len(rows)), strict=True):
        yield bytes(owner[a]), rows[max(a, b - most) : b].tobytes()
