"""One shard of the sample in DuckDB, and the sums that it answers a query with.

The SQL is made of names of the spec, and of conditions whose values are parameters.

A campaign that bids b for an event of objective g has the value b * p_g + s in a request, where s
is what its events are worth to the surface. It gets the place of the best ad that it beats, at most
one in a request, and pays that ad's value less s, or the reserve, as in the auction
(ranking/scoring/auction.py). So it wins the place of an impression if its payment b * p_g lies
between the `cost` of the place and that of the place above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict

from etl.array_types import Bools, Float64, Int32, Int64
from etl.spec.model import DataSpec
from ranking.forecast.conditions import Domain
from ranking.forecast.sums import SampleSums
from ranking.scoring.auction import Auction

USERS, IMPRESSIONS, SPEND = range(3)  # quantities; then the events of the objectives
CACHED_SELECTIONS = 8
# Shares of the auctions at which sums know what a campaign with a frequency cap spends.
PARTICIPATIONS: Float64 = np.geomspace(1e-3, 1.0, 25)


@dataclass(frozen=True)
class Campaign:
    """What a campaign bids per event of an objective, and how it is limited.

    Attributes:
        objective: The objective that the campaign pays for.
        bid: What it bids per event.
        frequency_cap: Most impressions of a user; None without a limit.
        has_budget: Whether a budget may limit it, so that sums need its spend curve.
        participation: Share of the auctions in which it takes part, so that a budget lasts.
    """

    objective: str
    bid: float
    frequency_cap: int | None = None
    has_budget: bool = False
    participation: float = 1.0


@dataclass(frozen=True)
class Query:
    """What the shards sum: impressions that match a condition on some days of the window.

    `condition` is SQL on the columns `target_…` with `parameters`. Without a campaign all matching
    impressions count, with one those that it wins.
    """

    # Bounds of numbers may be infinite, which JSON has no number for.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")
    condition: str
    parameters: tuple[float, ...]
    days: tuple[date, ...]
    campaign: Campaign | None = None


class ShardPool(Protocol):
    """Answers queries from the shards of a sample."""

    async def sums(self, query: Query) -> SampleSums:
        """The sums of all shards, estimated from those that answer."""


@dataclass
class QueryRecorder:
    """Queries of one forecast, and the smallest share of the shards that answered one of them."""

    pool: ShardPool
    answered: float = 1.0

    async def sums(self, query: Query) -> SampleSums:
        """The sums of all shards, estimated from those that answer."""
        found = await self.pool.sums(query)
        self.answered = min(self.answered, found.answered)
        return found


class Shard:
    """The sampled users of one shard, in an in-memory database with one thread."""

    def __init__(self, spec: DataSpec, sample: pa.Table, domain: Domain) -> None:
        """Load rows of `forecast_sample`; values of `domain` are stored as their positions."""
        self.spec = spec
        self.days = frozenset(pc.unique(sample["impression_day"]).to_pylist())
        self._summed = ("cost", *(f"p_{name}" for name in spec.objectives))
        keys, first = np.unique(sample["sampled_user"].to_numpy(), return_index=True)
        self.user_keys: Int64 = keys  # by user_index, as the weights
        self.weights: Float64 = 1.0 / sample["probability"].to_numpy()[first]
        self.database = duckdb.connect(config={"threads": 1})
        self.database.register("rows", add_auction_terms(spec, encode_values(sample, domain)))
        stored = ", ".join([
            *("user_index", "impression_day"),
            *("cost::FLOAT AS cost", "cost_above::FLOAT AS cost_above"),
            *(f"target_{name}" for name in domain),
            *(f"p_{name}::FLOAT AS p_{name}" for name in spec.objectives),
            *(f"serves_{name}" for name in spec.objectives),
        ])  # fmt: skip
        sql = f"CREATE TABLE sample AS SELECT {stored} FROM rows ORDER BY user_index"  # noqa: S608
        self.database.execute(sql)
        self.database.unregister("rows")
        # What queries sum, by row of the table: faster to take from here than out of DuckDB.
        serves = (f"serves_{name}" for name in spec.objectives)
        columns = ", ".join(["user_index", "cost_above", *self._summed, *serves])
        rows = self.database.execute(f"SELECT {columns} FROM sample").fetchnumpy()  # noqa: S608
        self.columns: dict[str, npt.NDArray[Any]] = {k: np.asarray(v) for k, v in rows.items()}
        # A forecast asks for a segment, and then for what one or two campaigns win of it.
        self._cached_rows = lru_cache(CACHED_SELECTIONS)(self._matching_rows)

    def sums(self, query: Query) -> SampleSums:
        """The sums of all quantities over the users that match.

        Rows are in the order of users: NumPy adds them up by user in less time than a hash
        aggregation takes.
        """
        selected = self._cached_rows(query.condition, query.parameters, query.days)
        if query.campaign:
            selected = selected.compress(self._is_won(query.campaign).take(selected))
        users = self._sum_by_user(selected, self._summed if query.campaign else ())
        quantities = self._quantities(users, query.campaign)
        weights = self.weights[users["user_index"]]
        weighted = quantities * weights
        spend = quantities[SPEND] * weights if query.campaign else np.zeros_like(weights)
        return SampleSums(
            weighted.sum(1),
            (weighted**2).sum(1),
            (weighted * quantities).sum(1),
            (weighted * spend).sum(1),
            (quantities * spend).sum(1),
            quantities.max(1, initial=0.0),
            users=len(weights),
            key=int(np.bitwise_xor.reduce(self.user_keys[users["user_index"]], initial=0)),
            spend_curve=self._spend_curve(users, query.campaign),
        )

    def _matching_rows(
        self, condition: str, parameters: tuple[float, ...], days: tuple[date, ...]
    ) -> Int32:
        """The rows of the table that match a condition on some days, in ascending order."""
        values: list[float | date] = list(parameters)
        if not self.days <= set(days):
            condition += f" AND impression_day IN ({', '.join('?' * len(days))})"
            values += days
        # One boolean for each row takes half the time of a filter with several terms.
        sql = f"SELECT ({condition}) IS TRUE AS matches FROM sample"  # noqa: S608
        matches = self.database.execute(sql, values).fetchnumpy()["matches"]
        return np.flatnonzero(np.asarray(matches)).astype(np.int32)

    def _sum_by_user(self, selected: Int32, names: Sequence[str]) -> dict[str, Any]:
        """Sums of columns over the selected rows of each user, and their number as `won`."""
        user = self.columns["user_index"].take(selected)  # faster than indexing
        if not len(user):
            return {"user_index": user, "won": np.zeros(0), **dict.fromkeys(names, np.zeros(0))}
        first = np.flatnonzero(np.append(True, user[1:] != user[:-1]))
        summed = {
            name: np.add.reduceat(self.columns[name].take(selected), first, dtype=np.float64)
            for name in names
        }
        return {"user_index": user[first], "won": np.diff(np.append(first, len(user))), **summed}

    def cost_per_event(self, objective: str, quantiles: tuple[float, ...]) -> tuple[float, ...]:
        """Quantiles of what the places of the sample cost per event of an objective."""
        places = f"serves_{objective} AND cost > 0 AND p_{objective} > 0"
        cost = f"quantile_cont(cost / p_{objective}, {list(quantiles)})"
        row = self.database.execute(f"SELECT {cost} FROM sample WHERE {places}").fetchone()  # noqa: S608
        assert row
        return tuple(row[0] or (0.01,) * len(quantiles))

    def _is_won(self, campaign: Campaign) -> Bools:
        """Whether the campaign gets the place of the impression, for all rows of the table."""
        payment = self.columns[f"p_{campaign.objective}"] * np.float32(campaign.bid)
        is_in_range = (payment >= self.columns["cost"]) & (payment < self.columns["cost_above"])
        return np.asarray(is_in_range & self.columns[f"serves_{campaign.objective}"])

    def _quantities(self, users: dict[str, Any], campaign: Campaign | None) -> Float64:
        """The quantities (Q, U) of users with won impressions; the expected ones of a campaign.

        With a share s of the auctions, a user with n won impressions is reached with probability
        1 - (1 - s)^n.
        """
        won = np.asarray(users["won"], np.int64)
        if campaign is None:
            return np.stack([np.ones(len(won)), won])
        every = np.arange(won.max(initial=0) + 1)
        share = np.array([campaign.participation])
        served = served_impressions(every, share, campaign.frequency_cap)[0].take(won)
        reached = (1.0 - (1.0 - share) ** every).take(won)
        per_win = served / np.maximum(won, 1)
        return np.stack([
            reached, served, *(np.asarray(users[name]) * per_win for name in self._summed)
        ])  # fmt: skip

    def _spend_curve(self, users: dict[str, Any], campaign: Campaign | None) -> Float64:
        """The spend (S) at PARTICIPATIONS; none (0) if it is linear, or no budget needs it."""
        if campaign is None or campaign.frequency_cap is None or not campaign.has_budget:
            return np.zeros(0)
        won, weights = np.asarray(users["won"], np.int64), self.weights[users["user_index"]]
        per_win = np.asarray(users["cost"]) * weights / np.maximum(won, 1)
        by_number = np.bincount(won, per_win)
        numbers = np.flatnonzero(by_number)
        served = served_impressions(numbers, PARTICIPATIONS, campaign.frequency_cap)
        return np.asarray(served @ by_number[numbers])


def served_impressions(won: Int64, shares: Float64, frequency_cap: int | None) -> Float64:
    """The expected impressions (S, N) of users who would be served `won` (N) without a cap.

    In a share s of the auctions, a user with n of them is served min(k, cap), where k is binomial
    with n trials of probability s.
    """
    share = shares[:, None]
    if frequency_cap is None or frequency_cap >= won.max(initial=0):
        return share * won
    odds = share / np.maximum(1.0 - share, 1e-12)
    probability = (1.0 - share) ** won  # of k = 0; of the k below, one after the other
    below_cap = np.zeros(probability.shape)
    for k in range(frequency_cap):
        below_cap += (frequency_cap - k) * probability
        probability = probability * odds * np.maximum(won - k, 0) / (k + 1)
    return np.where(share < 1.0, frequency_cap - below_cap, np.minimum(won, frequency_cap))


def add_auction_terms(spec: DataSpec, sample: pa.Table) -> pa.Table:
    """Rows with a dense `user_index`, and what the place of each costs: it and the one above."""
    surfaces = sample["surface"].to_numpy(zero_copy_only=False)
    probabilities = np.stack([sample[f"p_{name}"].to_numpy() for name in spec.objectives], 1)
    surface_value, reserve = np.zeros(len(surfaces)), np.zeros(len(surfaces))
    serves = np.zeros((len(surfaces), len(spec.objectives)), bool)
    for surface in spec.ad_surfaces:
        auction, chosen = Auction(spec, surface), surfaces == surface
        surface_value[chosen] = probabilities[chosen] @ auction.objective_values
        reserve[chosen] = spec.terms_of(surface).reserve
        serves[chosen] = auction.served_objectives
    value, above = sample["value"].to_numpy(), pc.fill_null(sample["value_above"], np.inf)
    user_index = np.unique(sample["sampled_user"].to_numpy(), return_inverse=True)[1]
    columns = {
        "user_index": user_index.astype(np.int32),
        "cost": np.maximum(value - surface_value, reserve),
        "cost_above": above.to_numpy() - surface_value,
        **{f"serves_{name}": serves[:, i] for i, name in enumerate(spec.objectives)},
    }
    for name, values in columns.items():
        sample = sample.append_column(name, pa.array(values))
    return sample


def encode_values(sample: pa.Table, domain: Domain) -> pa.Table:
    """Rows with the positions of values in the domain in place of the values; numbers stay."""
    surface = sample["target_surface"]
    for name, values in domain.items():
        if values is not None:
            column = f"target_{name}"
            known = pa.array(values, sample.schema.field(column).type)
            codes = pc.index_in(sample[column], known).cast(pa.int16())
            sample = sample.set_column(sample.schema.get_field_index(column), column, codes)
    return sample.append_column("surface", surface)
