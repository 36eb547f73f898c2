"""The ad auction of a request: eligibility, ranks and prices.

A generalized second-price auction (Edelman, Ostrovsky and Schwarz 2007): an ad pays, if its goal is
reached, the lowest bid with which it would keep its rank before the ads of other advertisers. B
candidates of some requests, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from etl.array_types import Bools, Float64, Int64
from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.sections import MAX_MONEY
from ranking.scoring.candidates import NO_ADVERTISER, CandidateBids, CandidateScores

EXCLUDED_RANK = -1  # rank of an excluded candidate


class Exclusion(IntEnum):
    """The reason why a candidate is excluded from the auction; 0 if it is eligible."""

    NONE = 0
    UNKNOWN_ITEM = 1
    NO_BID = 2
    NO_GOAL = 3
    GOAL_NOT_SERVED = 4
    BELOW_RESERVE = 5
    BELOW_QUALITY = 6
    NO_VALUE = 7


@dataclass(frozen=True)
class RankedAd:
    """A ranked candidate; `candidate_index` is its position in the request.

    `price` is what its campaign pays if the campaign's goal is reached.
    """

    rank: int
    candidate_index: int
    probabilities: tuple[float, ...]
    outcome_values: tuple[float, ...]
    expected_value: float
    price: float


@dataclass(frozen=True)
class AuctionResult:
    """Expected value, rank in the request, price and `Exclusion` of each candidate (B).

    `effective_bids` are those with which candidates took part (`Auction.effective_bids`).
    """

    effective_bids: Float64
    expected_values: Float64
    ranks: Int64
    prices: Float64
    exclusions: Int64


@dataclass(frozen=True)
class Auction:
    """The auctions of a surface on the terms of a spec.

    Without an auction in the spec, candidates are ranked by the surface's `ranking_objective` and
    prices are 0.
    """

    spec: DataSpec
    surface: str

    def __call__(
        self, scores: CandidateScores, bids: CandidateBids, request_index: Int64
    ) -> AuctionResult:
        """Run the auctions of some requests.

        An ad takes part only if it has a bid in (0, MAX_MONEY] and a goal that the surface serves,
        regardless of the reserve price.

        Args:
            scores: The predictions of a ranker (B, O).
            bids: The bids of the candidates' campaigns (B).
            request_index: The request of each candidate (B), ascending.

        Raises:
            UserError: A goal is not in the spec.
        """
        terms = self.spec.terms_of(self.surface)
        probabilities, columns = scores.net_probabilities, self.goal_columns(bids.goals)
        effective_bids = self.effective_bids(scores, bids, columns)
        goal_probabilities = self.goal_probabilities(probabilities, columns)
        surface_values = probabilities @ self.objective_values
        values = effective_bids * goal_probabilities + surface_values
        exclusions = self._exclusions(
            probabilities, bids, columns, effective_bids, goal_probabilities
        )
        is_eligible = exclusions == Exclusion.NONE

        order = np.lexsort((-values, ~is_eligible, request_index))
        request_start = np.searchsorted(request_index[order], request_index[order])
        ranks = np.empty(len(probabilities), np.int64)
        ranks[order] = np.arange(len(probabilities)) - request_start

        next_values = _next_competitor_value(
            values, is_eligible, order, request_index, bids.advertisers
        )
        least_payment = np.maximum(next_values - surface_values, terms.reserve)
        least_bids = np.divide(
            least_payment,
            goal_probabilities,
            out=np.zeros(len(probabilities)),
            where=goal_probabilities > 0,
        )
        prices = np.where(is_eligible, np.minimum(least_bids, effective_bids), 0.0)
        ranks = np.where(is_eligible, ranks, EXCLUDED_RANK)
        return AuctionResult(effective_bids, values, ranks, prices, exclusions)

    def effective_bids(
        self, scores: CandidateScores, bids: CandidateBids, columns: Int64
    ) -> Float64:
        """The bid (B) of each candidate per event of its goal; 0 without a valid bid.

        With a target return on ad spend it is the expected value of the event over the target,
        capped at the bid of the campaign. `columns` (B) are those of the goals.
        """
        valid_bids = np.where(_is_valid(bids.bids), bids.bids, 0.0)
        goal_values = np.nan_to_num(scores.outcome_values[np.arange(len(columns)), columns])
        no_limit = np.full(len(columns), np.inf)
        has_target = bids.target_roas > 0
        limits = np.divide(goal_values, bids.target_roas, out=no_limit, where=has_target)
        return np.asarray(np.minimum(valid_bids, limits))

    def _exclusions(
        self,
        probabilities: Float64,
        bids: CandidateBids,
        columns: Int64,
        effective_bids: Float64,
        goal_probabilities: Float64,
    ) -> Int64:
        """The first reason that excludes each candidate (B)."""
        if self.spec.auction is None:
            return np.full(len(probabilities), int(Exclusion.NONE))
        terms = self.spec.terms_of(self.surface)
        quality = np.full(len(probabilities), np.inf)
        if terms.quality_objective:
            quality = probabilities[:, self._objectives.index(terms.quality_objective)]
        reasons: dict[Exclusion, Bools] = {
            Exclusion.NO_BID: ~_is_valid(bids.bids),
            Exclusion.NO_GOAL: columns < 0,
            Exclusion.GOAL_NOT_SERVED: ~self.served_objectives[columns],
            Exclusion.NO_VALUE: effective_bids == 0,
            Exclusion.BELOW_RESERVE: ~(effective_bids * goal_probabilities >= terms.reserve),
            Exclusion.BELOW_QUALITY: ~(quality >= terms.min_quality),
        }
        return np.select(list(reasons.values()), list(reasons), int(Exclusion.NONE))

    def goal_probabilities(self, probabilities: Float64, columns: Int64) -> Float64:
        """The probability (B) that each campaign's goal is reached; 0 if it is not served."""
        is_served = np.append(self.served_objectives, False)[columns]  # the last is for no goal
        return np.where(is_served, probabilities[np.arange(len(probabilities)), columns], 0.0)

    def goal_columns(self, goals: Sequence[str | None]) -> Int64:
        """The column of the objective that each goal (B) pays for; -1 without a goal.

        Raises UserError if a goal is not in the spec.
        """
        if self.spec.auction is None:
            return np.full(len(goals), -1)
        goal_objectives = self.spec.auction.goal_objectives
        names, name_index = np.unique([goal or "" for goal in goals], return_inverse=True)
        unknown = sorted(set(names) - set(goal_objectives) - {""})
        if unknown:
            known = ", ".join(goal_objectives)
            raise UserError(f"unknown campaign goal {', '.join(unknown)}; known: {known}")
        columns = [self._objectives.index(goal_objectives[name]) if name else -1 for name in names]
        return np.array(columns, np.int64)[name_index]

    @cached_property
    def _objectives(self) -> list[str]:
        return list(self.spec.objectives)

    @cached_property
    def served_objectives(self) -> Bools:
        """Whether the surface has each objective (O)."""
        return np.array([self.surface in self.spec.surfaces_of(name) for name in self._objectives])

    @cached_property
    def objective_values(self) -> Float64:
        """The value of each objective (O) to the surface itself."""
        if self.spec.auction is None:
            ranking = self.spec.ranking_objective(self.surface)
            return np.array([float(name == ranking) for name in self._objectives])
        values = self.spec.terms_of(self.surface).objective_values
        by_objective = np.array([values.get(name, 0.0) for name in self._objectives])
        return by_objective * self.served_objectives


def _is_valid(bids: Float64) -> Bools:
    return (bids > 0) & (bids <= MAX_MONEY)


def _next_competitor_value(
    values: Float64, is_eligible: Bools, order: Int64, request_index: Int64, advertisers: Int64
) -> Float64:
    """The value (B) of the next ad of another advertiser in the same request; -inf without one.

    Ads that follow each other in `order` and are of one advertiser and request form a run; the next
    competitor is the first ad after an ad's run. Eligible ads come first in their request.
    """
    n = len(order)
    previous, current = order[:-1], order[1:]
    is_same_run = (
        (advertisers[previous] != NO_ADVERTISER)
        & (advertisers[previous] == advertisers[current])
        & (request_index[previous] == request_index[current])
    )
    run_starts = np.flatnonzero(np.append(True, ~is_same_run)[:n])
    next_run = np.searchsorted(run_starts, np.arange(n), side="right")
    next_position = np.append(run_starts, n)[next_run]  # n after the last run
    competitor = order[np.minimum(next_position, n - 1)] if n else order
    has_competitor = (
        (next_position < n)
        & (request_index[competitor] == request_index[order])
        & is_eligible[competitor]
    )
    next_values = np.full(n, -np.inf)
    next_values[order[has_competitor]] = values[competitor[has_competitor]]
    return next_values


def ranked_ads(scores: CandidateScores, result: AuctionResult) -> list[RankedAd]:
    """The candidates of one request that take part, best first."""
    num_excluded = int((result.ranks == EXCLUDED_RANK).sum())
    best = np.argsort(result.ranks, kind="stable")[num_excluded:]
    columns = (
        best,
        scores.probabilities[best],
        scores.outcome_values[best],
        result.expected_values[best],
        result.prices[best],
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        RankedAd(rank, index, tuple(probabilities), tuple(outcome_values), value, price)
        for rank, (index, probabilities, outcome_values, value, price) in enumerate(rows)
    ]
