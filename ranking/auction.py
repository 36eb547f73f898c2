"""The auction of a request: who takes part, in which order, and at what price.

Generalised second price (Edelman, Ostrovsky and Schwarz 2007): an ad pays for its event the least
bid with which it would keep its place. B candidates of some requests, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from etl.errors import UserError
from etl.spec.model import DataSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
OUT = -1  # the place of what does not take part


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
    """Of each candidate (B): what it is worth, its place in its request, its price."""

    values: Floats
    places: Ints
    prices: Floats


@dataclass(frozen=True)
class Auction:
    """The auctions of a surface, on the terms of a spec.

    Without an auction in the spec the surface's `ranking_objective` ranks, and nobody pays.
    """

    spec: DataSpec
    surface: str

    def __call__(
        self, p: Floats, bids: Floats, goals: Sequence[str | None], request: Ints
    ) -> Result:
        """Rank candidates (B, O) of requests (B, ascending) with what is bid for them.

        Raises UserError for a goal that the spec does not know; None pays for nothing.
        """
        terms = self.spec.terms_of(self.surface)
        paying = self.paying(p, goals)
        own = p @ self._own
        values = bids * paying + own
        able = bids * paying >= terms.reserve
        if terms.quality is not None:
            able &= p[:, self._objectives.index(terms.quality)] >= terms.floor
        order = np.lexsort((-values, ~able, request))
        first = np.searchsorted(request[order], request[order])
        places = np.empty(len(p), np.int64)
        places[order] = np.arange(len(p)) - first
        least = np.maximum(_following(values, able, order, request) - own, terms.reserve)
        share = np.divide(least, paying, out=np.zeros(len(p)), where=paying > 0)
        prices = np.where(able, np.minimum(share, bids), 0.0)
        return Result(values, np.where(able, places, OUT), prices)

    def paying(self, p: Floats, goals: Sequence[str | None]) -> Floats:
        """The probability (B) of the event that each campaign pays for, where it is served."""
        if self.spec.auction is None:
            return np.zeros(len(p))
        pays_for = self.spec.auction.pays_for
        names, which = np.unique([goal or "" for goal in goals], return_inverse=True)
        unknown = sorted(set(names) - set(pays_for) - {""})
        if unknown:
            known = ", ".join(pays_for)
            raise UserError(f"unknown campaign goal {', '.join(unknown)}; known: {known}")
        columns = [self._objectives.index(pays_for[name]) if name else -1 for name in names]
        column = np.array(columns, int)[which]
        served = np.append(self.served, False)[column]
        return np.where(served, p[np.arange(len(p)), column], 0.0)

    @cached_property
    def _objectives(self) -> list[str]:
        return list(self.spec.objectives)

    @cached_property
    def served(self) -> npt.NDArray[np.bool_]:
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


def _following(values: Floats, able: npt.NDArray[np.bool_], order: Ints, request: Ints) -> Floats:
    """The value (B) of the next candidate of the same request that takes part; none is -inf."""
    following = np.full(len(values), -np.inf)
    before, after = order[:-1], order[1:]
    beaten = (request[before] == request[after]) & able[after]
    following[before[beaten]] = values[after[beaten]]
    return following


def ranked(p: Floats, result: Result) -> list[Ranked]:
    """The candidates of one request that take part, the best first."""
    best = np.argsort(result.places, kind="stable")[int((result.places == OUT).sum()) :]
    columns = best, p[best], result.values[best], result.prices[best]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        Ranked(place, row, tuple(probabilities), value, price)
        for place, (row, probabilities, value, price) in enumerate(rows)
    ]
