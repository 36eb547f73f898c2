"""The auction of a request: who takes part, in which order, and at what price.

Generalised second price (Edelman, Ostrovsky and Schwarz 2007): an ad pays for its event the least
bid with which it would keep its place before the ads of other advertisers. B candidates of some
requests, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from etl.errors import UserError
from etl.spec.auction import MAX_MONEY
from etl.spec.model import DataSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
OUT = -1  # the place of what does not take part
NO_ADVERTISER = -1  # of an ad whose advertiser is not known


class Exclusion(IntEnum):
    """Why a candidate takes no part in the auction; 0 if it takes part."""

    NONE = 0
    UNKNOWN_ITEM = 1
    NO_BID = 2
    NO_GOAL = 3
    GOAL_NOT_SERVED = 4
    BELOW_RESERVE = 5
    BELOW_QUALITY = 6


@dataclass(frozen=True)
class Ranked:
    """A candidate in its place: `row` is its position in the request.

    `price` is what its campaign pays if the event happens that it pays for.
    """

    place: int
    row: int
    probabilities: tuple[float, ...]
    expected_value: float
    price: float


@dataclass(frozen=True)
class Result:
    """Of each candidate (B): its value, its place in its request, its price, its `Exclusion`."""

    values: Floats
    places: Ints
    prices: Floats
    exclusions: Ints


@dataclass(frozen=True)
class Auction:
    """The auctions of a surface, on the terms of a spec.

    Without an auction in the spec the surface's `ranking_objective` ranks, and nobody pays.
    """

    spec: DataSpec
    surface: str

    def __call__(
        self, p: Floats, bids: Floats, goals: Sequence[str | None], request: Ints,
        advertisers: Ints | None = None,
    ) -> Result:  # fmt: skip
        """Rank candidates (B, O) of requests (B, ascending) by their bids (B).

        An ad takes part only if it has a bid in (0, MAX_MONEY] and a goal that the surface serves,
        whatever the reserve. Where `advertisers` (B) are not given, each ad has its own.
        Raises UserError for a goal that the spec does not know; None pays for nothing.
        """
        terms = self.spec.terms_of(self.surface)
        bids = np.where((bids > 0) & (bids <= MAX_MONEY), bids, 0.0)
        paying, own = self.paying(p, goals), p @ self._own
        values = bids * paying + own
        exclusions = self._exclusions(p, bids, goals, paying)
        able = exclusions == Exclusion.NONE
        order = np.lexsort((-values, ~able, request))
        first = np.searchsorted(request[order], request[order])
        places = np.empty(len(p), np.int64)
        places[order] = np.arange(len(p)) - first
        owner = np.full(len(p), NO_ADVERTISER) if advertisers is None else advertisers
        following = _next_value(values, able, order, request, owner)
        least = np.maximum(following - own, terms.reserve)
        share = np.divide(least, paying, out=np.zeros(len(p)), where=paying > 0)
        prices = np.where(able, np.minimum(share, bids), 0.0)
        return Result(values, np.where(able, places, OUT), prices, exclusions)

    def _exclusions(
        self, p: Floats, bids: Floats, goals: Sequence[str | None], paying: Floats
    ) -> Ints:
        """Why each candidate (B) takes no part: the first reason that applies."""
        if self.spec.auction is None:
            return np.full(len(p), int(Exclusion.NONE))
        terms, columns = self.spec.terms_of(self.surface), self._columns(goals)
        quality = p[:, self._objectives.index(terms.quality)] if terms.quality else np.inf
        reasons: dict[Exclusion, Bools] = {
            Exclusion.NO_BID: bids == 0,
            Exclusion.NO_GOAL: columns < 0,
            Exclusion.GOAL_NOT_SERVED: ~self.served[columns],
            Exclusion.BELOW_RESERVE: ~(bids * paying >= terms.reserve),
            Exclusion.BELOW_QUALITY: ~(np.broadcast_to(quality, len(p)) >= terms.floor),
        }
        return np.select(list(reasons.values()), list(reasons), int(Exclusion.NONE))

    def paying(self, p: Floats, goals: Sequence[str | None]) -> Floats:
        """The probability (B) of the event that each campaign pays for, where it is served."""
        if self.spec.auction is None:
            return np.zeros(len(p))
        columns = self._columns(goals)
        served = np.append(self.served, False)[columns]
        return np.where(served, p[np.arange(len(p)), columns], 0.0)

    def _columns(self, goals: Sequence[str | None]) -> Ints:
        """The objective (B) for which each goal pays; -1 without a goal."""
        assert self.spec.auction
        pays_for = self.spec.auction.pays_for
        names, which = np.unique([goal or "" for goal in goals], return_inverse=True)
        unknown = sorted(set(names) - set(pays_for) - {""})
        if unknown:
            known = ", ".join(pays_for)
            raise UserError(f"unknown campaign goal {', '.join(unknown)}; known: {known}")
        columns = [self._objectives.index(pays_for[name]) if name else -1 for name in names]
        return np.array(columns, np.int64)[which]

    @cached_property
    def _objectives(self) -> list[str]:
        return list(self.spec.objectives)

    @cached_property
    def served(self) -> Bools:
        """Which objectives (O) the surface has."""
        surfaces = (self.spec.surfaces_of(name) for name in self._objectives)
        return np.array([self.surface in found for found in surfaces])

    @cached_property
    def _own(self) -> Floats:
        """What an event of each objective (O) is worth to the surface."""
        if self.spec.auction is None:
            ranking = self.spec.ranking_objective(self.surface)
            return np.array([float(name == ranking) for name in self._objectives])
        values = self.spec.terms_of(self.surface).values
        return np.array([values.get(name, 0.0) for name in self._objectives]) * self.served


def _next_value(
    values: Floats, able: Bools, order: Ints, request: Ints, advertisers: Ints
) -> Floats:
    """The value (B) of the next ad of another advertiser in the same request; -inf if none.

    In `order` ads that take part come first in their request, so the next ad of another advertiser
    stands behind the run of one advertiser's ads that an ad belongs to.
    """
    n = len(order)
    before, after = order[:-1], order[1:]
    known = advertisers[before] != NO_ADVERTISER
    same = known & (advertisers[before] == advertisers[after]) & (request[before] == request[after])
    starts = np.flatnonzero(np.append(True, ~same)[:n])
    run = np.searchsorted(starts, np.arange(n), side="right")
    place = np.append(starts, n)[run]  # in the order, of the first ad behind the run
    following = order[np.minimum(place, n - 1)] if n else order
    beaten = (place < n) & (request[following] == request[order]) & able[following]
    found = np.full(n, -np.inf)
    found[order[beaten]] = values[following[beaten]]
    return found


def ranked(p: Floats, result: Result) -> list[Ranked]:
    """The candidates of one request that take part, the best first."""
    best = np.argsort(result.places, kind="stable")[int((result.places == OUT).sum()) :]
    columns = best, p[best], result.values[best], result.prices[best]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        Ranked(place, row, tuple(probabilities), value, price)
        for place, (row, probabilities, value, price) in enumerate(rows)
    ]
