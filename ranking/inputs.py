"""What a ranker reads, as padded arrays: the same from stored examples and from a live request.

R requests, L events, C candidates, K impressions of before, V width of given vectors, Z width of
what GEM kept of an impression, F numbers; once looked up I width of an item's vectors, U of the
user's, X of the context's, M attributes by which candidates and events are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from etl.tables.contracts import RESERVED_ITEMS
from features.inputs import ITEM
from ranking.rhythm import Rhythm

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Ids = dict[str, Int64]


@dataclass(frozen=True)
class Items:
    """Items in any shape (…): a row of each table, and the vectors that the log gives (…, V)."""

    ids: Ids
    given: Float32


@dataclass(frozen=True)
class Before:
    """What GEM kept of a user's earlier impressions: `kept` (R, K, Z), the newest last.

    `ages` (R, K) are seconds since each was shown, 0 where there is none.
    """

    items: Items
    kept: Float32
    ages: Float32


@dataclass(frozen=True)
class Requests:
    """The user's side. `types`, `surfaces`, `dwells` and `ages` of events (R, L), oldest first.

    Ages are in seconds, 0 where there is no event. `user_ids` (R) are rows of tables, and
    `user_numbers` (R, F) NaN where missing.
    """

    events: Items
    types: Int64
    surfaces: Int64
    dwells: Int64
    ages: Float32
    user_ids: Ids
    user_numbers: Float32
    before: Before


@dataclass(frozen=True)
class Candidates:
    """The side of what is ranked (R, C): `numbers` (R, C, F) NaN where missing, `surfaces` (R, C).

    `rhythms` are those of each attribute compared, (R, C, T + 1) each. `present` tells candidates
    from the padding of requests that have fewer.
    """

    items: Items
    context_ids: Ids
    numbers: Float32
    surfaces: Int64
    rhythms: tuple[Rhythm, ...]
    present: Bools


@dataclass(frozen=True)
class Places:
    """Where the newest elements of ragged groups are (R, n), and whether there is one."""

    at: Int64
    there: Bools

    def __call__(self, values: npt.NDArray[np.generic], missing: float = 0) -> np.ndarray:
        """The elements of `values` (N, …) in their places (R, n, …)."""
        shape = (*self.at.shape, *values.shape[1:])
        found = values[self.at] if len(values) else np.empty(shape, values.dtype)
        found[~self.there] = missing
        return found


def places(first: Int64, stop: Int64) -> Places:
    """The elements from `first` to before `stop` of each group (R), in their order."""
    slot = np.arange(max(1, int((stop - first).max(initial=0))))
    there = slot < (stop - first)[:, None]
    return Places(np.where(there, first[:, None] + slot, 0), there)


def newest(offsets: Int64, most: int) -> Places:
    """The last `most` elements of each group cut by `offsets` (R+1)."""
    return places(np.maximum(offsets[:-1], offsets[1:] - most), offsets[1:])


A = TypeVar("A")
Gather = Callable[[Ids, Float32], A]


class UserInputs(NamedTuple, Generic[A]):
    """The user's side, looked up: events (R, L, …), user (R, …), impressions before (R, K, …)."""

    events: A
    alike: A
    types: A
    surfaces: A
    dwells: A
    ages: A
    user: A
    numbers: A
    before: A
    before_alike: A
    kept: A
    before_ages: A


class CandidateInputs(NamedTuple, Generic[A]):
    """The candidates' side, looked up (R, C, …)."""

    items: A
    alike: A
    context: A
    numbers: A
    surfaces: A
    last: A
    span: A
    gaps: A


@dataclass(frozen=True)
class LookUp(Generic[A]):
    """Arrays of ids to inputs of a program, by whatever backend holds the tables.

    `gather` gives the rows of tables side by side, in the order of their names, with given vectors
    behind them; `array` takes over what needs no table. Items from `known` on were not seen in
    training: they are row 0. `match` are the attributes by which candidates are compared.
    """

    gather: Gather[A]
    array: Callable[[np.ndarray], A]
    match: Sequence[str]
    known: int

    def user(self, requests: Requests) -> UserInputs[A]:
        """The user's side."""
        return UserInputs(
            events=self._items(requests.events),
            alike=self._alike(requests.events),
            types=self.array(requests.types),
            surfaces=self.array(requests.surfaces),
            dwells=self.array(requests.dwells),
            ages=self.array(requests.ages),
            user=self.gather(requests.user_ids, requests.user_numbers[:, :0]),
            numbers=self.array(requests.user_numbers),
            before=self._items(requests.before.items),
            before_alike=self._alike(requests.before.items),
            kept=self.array(requests.before.kept),
            before_ages=self.array(requests.before.ages),
        )

    def candidates(self, candidates: Candidates) -> CandidateInputs[A]:
        """The candidates' side."""
        return CandidateInputs(
            items=self._items(candidates.items),
            alike=self._alike(candidates.items),
            context=self.gather(candidates.context_ids, candidates.numbers[..., :0]),
            numbers=self.array(candidates.numbers),
            surfaces=self.array(candidates.surfaces),
            last=self._rhythm(candidates, "last"),
            span=self._rhythm(candidates, "span"),
            gaps=self._rhythm(candidates, "gaps"),
        )

    def _rhythm(self, candidates: Candidates, part: str) -> A:
        """A part of the rhythms of all attributes compared (R, C, M, T + 1)."""
        parts = [getattr(rhythm, part) for rhythm in candidates.rhythms]
        nothing = np.zeros((*candidates.surfaces.shape, 0, 0), np.int64)
        return self.array(np.stack(parts, 2) if parts else nothing)

    def _items(self, items: Items) -> A:
        index = items.ids[ITEM]
        seen = (index >= RESERVED_ITEMS) & (index < self.known)
        return self.gather(items.ids | {ITEM: np.where(seen, index, 0)}, items.given)

    def _alike(self, items: Items) -> A:
        shape = (*items.ids[ITEM].shape, len(self.match))
        columns = [items.ids[name] for name in self.match]
        return self.array(np.stack(columns, -1) if columns else np.zeros(shape, np.int64))
