"""A live request and what the store knows, as the arrays that rankers read.

C candidates of one request, N events of its user.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np

from etl.spec.units import MICROS
from features.four_bits import unpacked
from features.inputs import ITEM, USER
from ranking.inputs import Before, Candidates, Ids, Items, Requests
from ranking.online.database import Txn
from ranking.online.feed import key_parts
from ranking.online.layout import BEFORE, OFFER, UNKNOWN, key_of
from ranking.online.request import Asked, check, encoded
from ranking.online.store import Store
from ranking.reads import Reads
from ranking.rhythm import Rhythm, rhythm


@dataclass(frozen=True)
class Assembled:
    """What a ranker reads of a request, and what its candidates (C) bring to the auction.

    `known` says which candidates the store has heard of.
    """

    requests: Requests
    candidates: Candidates
    bids: np.ndarray
    goals: list[str | None]
    advertisers: np.ndarray
    known: np.ndarray


@dataclass(frozen=True)
class Assembler:
    """Makes what a ranker reads of live requests."""

    store: Store
    reads: Reads

    def __call__(self, asked: Asked) -> Assembled:
        """The inputs of a request. Raises UserError for what cannot be ranked."""
        check(self.store.spec, asked)
        with self.store.reading() as txn:
            return Moment(self.store, self.reads, txn, asked).assembled()


@dataclass(frozen=True)
class Moment:
    """One request against the store as it was at one moment."""

    store: Store
    reads: Reads
    txn: Txn
    asked: Asked

    def assembled(self) -> Assembled:
        """All of it."""
        stored = self.txn.get("history", key_of(self.asked.user))
        events = self.store.histories.seen(stored, self.asked.as_of)[-self.reads.searched :]
        offers, goals = self._offers()
        return Assembled(
            requests=self._requests(events),
            candidates=self._candidates(events),
            bids=offers["bid"],
            goals=goals,
            advertisers=offers["advertiser"],
            known=self._heads["index"] != UNKNOWN,
        )

    def _requests(self, events: np.ndarray) -> Requests:
        read = events[-self.reads.events :] if len(events) else np.zeros(1, events.dtype)
        stored = self.txn.get("users", key_of(self.asked.user))
        known = newest([stored], self.store.layout.user, self.asked.as_of)
        group = self.store.layout.features.user
        ages = (self.asked.as_of - read["visible"]) * (len(events) > 0)
        return Requests(
            events=self._items(read["item"]),
            types=_one(read["type"]),
            surfaces=_one(read["surface"]),
            dwells=_one(read["dwell"]),
            ages=ages.astype(np.float32)[None],
            user_ids=columns(known, group.ids) | self._user(),
            user_numbers=known["numbers"].copy(),
            before=self._before(),
        )

    def _user(self) -> Ids:
        rows = self.reads.user_rows
        return {USER: np.array([crc32(self.asked.user.encode()) % rows])} if rows else {}

    def _before(self) -> Before:
        rows = np.frombuffer(self.txn.get("before", key_of(self.asked.user)), BEFORE)
        seen = int(np.searchsorted(rows["visible"], self.asked.as_of))
        rows = rows[max(0, seen - self.reads.before) : seen]
        there = len(rows) > 0
        rows = rows if there else np.zeros(1, BEFORE)
        ages = np.maximum(self.asked.as_of - rows["shown"], 1) * there
        return Before(
            items=self._items(rows["item"]),
            kept=unpacked(rows["kept"])[None] * np.float32(there),
            ages=ages.astype(np.float32)[None],
        )

    def _candidates(self, events: np.ndarray) -> Candidates:
        spec, features = self.store.spec, self.store.layout.features
        heads = self._heads
        index = np.maximum(heads["index"], 0).astype(np.int64)
        known = self._known(index)
        ids = {name: column[None] for name, column in columns(known, features.item.ids).items()}
        rows, numbers = encoded(spec, features.context, self.asked)
        counts = features.counter_inputs(self._counts(heads))
        n = len(self.asked.candidates)
        return Candidates(
            items=Items({ITEM: index[None]} | ids, known["given"][None].copy()),
            context_ids={name: column[None] for name, column in rows.items()},
            numbers=np.concatenate((known["numbers"], numbers, counts), 1)[None],
            surfaces=np.full((1, n), spec.surface_codes[self.asked.surface]),
            rhythms=self._rhythms(ids, events),
            present=np.ones((1, n), bool),
        )

    def _rhythms(self, ids: Ids, events: np.ndarray) -> tuple[Rhythm, ...]:
        features = self.store.layout.features
        seen = self._known(events["item"].astype(np.int64))
        n = len(self.asked.candidates)
        told = (np.array([0, len(events)]), events["type"].astype(np.int64))
        ages, kinds = self.asked.as_of - events["visible"], 1 + len(features.events)
        found = []
        for name in features.match:
            theirs = seen["ids"][:, list(features.item.ids).index(name)]
            one = rhythm(ids[name][0], np.zeros(n, np.int64), theirs, *told, ages, kinds)
            found.append(Rhythm(one.last[None], one.span[None], one.gaps[None]))
        return tuple(found)

    @cached_property
    def _heads(self) -> np.ndarray:
        """What is known of the candidates (C) as items."""
        stored = self.txn.many("items", [key_of(name) for name in self.asked.candidates])
        unknown = np.zeros(1, self.store.layout.item_head)
        for name in ("since", "keys", "index"):
            unknown[name] = UNKNOWN
        blank = unknown.tobytes()
        return np.frombuffer(b"".join(one or blank for one in stored), unknown.dtype)

    def _counts(self, heads: np.ndarray) -> np.ndarray:
        """The counters of each candidate (C, counters), in the order of the spec."""
        asked, counters = self.asked, self.store.counters
        parts = key_parts(self.store, asked.user, asked.surface, heads, asked.as_of)
        names = counters.names(parts)
        distinct = list({name for column in names for name in column if name is not None})
        found = counters.count(self.txn, distinct, asked.as_of)
        found = np.concatenate((found, np.zeros((1, counters.width), np.int64)))
        place = {name: n for n, name in enumerate(distinct)} | {None: len(distinct)}
        at = np.array([[place[name] for name in column] for column in names])
        return found[at.T].reshape(len(heads), -1).astype(np.float32)

    def _items(self, index: np.ndarray) -> Items:
        known = self._known(index.astype(np.int64))
        group = self.store.layout.features.item
        ids = {name: column[None] for name, column in columns(known, group.ids).items()}
        return Items({ITEM: index.astype(np.int64)[None]} | ids, known["given"][None].copy())

    def _known(self, index: np.ndarray) -> np.ndarray:
        """What was known of items (n), by index, strictly before the request."""
        distinct, place = np.unique(index, return_inverse=True)
        stored = self.txn.many("versions", [int(i).to_bytes(4, "big") for i in distinct])
        return newest(stored, self.store.layout.item, self.asked.as_of)[place]

    def _offers(self) -> tuple[np.ndarray, list[str | None]]:
        """Offers and goals (C) that held strictly before the request; 0 and None where none did."""
        auction = self.store.spec.auction
        goals = [*auction.pays_for] if auction else []
        stored = self.txn.many("offers", [key_of(name) for name in self.asked.candidates])
        held = newest(stored, OFFER, self.asked.as_of)
        return held, [goals[g - 1] if g else None for g in held["goal"]]


def _one(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64)[None]


def columns(rows: np.ndarray, names: Iterable[str]) -> Ids:
    """The ids of versions (n), each attribute by itself."""
    apart = rows["ids"].T.copy()
    return dict(zip(names, apart, strict=True))


def newest(stored: Sequence[bytes], layout: np.dtype, as_of: int) -> np.ndarray:
    """Of each record (n) the newest version valid strictly before a second.

    Zeros, and missing numbers, where there is none.
    """
    sizes = np.array([len(one) for one in stored], np.int64) // layout.itemsize
    nothing = np.zeros(1, layout)
    if "numbers" in (layout.names or ()):
        nothing["numbers"] = np.nan
    rows = np.concatenate((np.frombuffer(b"".join(stored), layout), nothing))
    owner = np.repeat(np.arange(len(stored)), sizes)
    before = rows["since"][:-1] < as_of * MICROS["s"]
    valid = np.bincount(owner, before, minlength=len(stored)).astype(np.int64)
    return rows[np.where(valid > 0, np.cumsum(sizes) - sizes + valid - 1, len(rows) - 1)]
