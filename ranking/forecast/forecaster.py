"""Forecasts: how many users and impressions a targeting has, and what a campaign would win of them.

The size of a segment is known exactly (one or two attributes), or estimated from the sample and a
log-linear model. What a campaign brings per user and per impression of the segment is estimated
from the sample; daily impressions follow trend and weekday.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Protocol

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import date_range
from etl.tables.forecast_schemas import SURFACE
from ranking.forecast.expansion import (
    NOISE_SHARE,
    NOISE_USERS,
    NoiseSource,
    SampleExpansion,
    SegmentSize,
    SupplyGrowth,
    to_interval,
)
from ranking.forecast.in_target import in_target_rate, in_target_users
from ranking.forecast.schemas import CampaignForecast, Forecast, ForecastRequest, Interval
from ranking.forecast.seasonality import DailyForecast, days_after, forecast_days, similar_days
from ranking.forecast.shard import IMPRESSIONS, SPEND, USERS, Campaign, Query
from ranking.forecast.sums import SampleSums, posterior
from ranking.forecast.tables import ForecastTables
from ranking.forecast.targeting import Targeting, parse_targeting

MAX_LEAD_DAYS = 28  # from the logs to a flight: trends are not known to last longer
MIN_SAMPLED_USERS = 5  # fewer may be as few users, whatever their weights are


class ShardPool(Protocol):
    """Answers queries from the shards of a sample."""

    async def sums(self, query: Query) -> SampleSums:
        """The sums of all shards, estimated from those that answer."""


@dataclass(frozen=True)
class Forecaster:
    """Forecasts from the tables of a build and the shards of its sample."""

    tables: ForecastTables
    pool: ShardPool

    @property
    def spec(self) -> DataSpec:
        """The data spec."""
        return self.tables.spec

    async def forecast(self, request: ForecastRequest) -> Forecast:
        """The forecast of a request.

        Raises:
            UserError: The request is not valid, or its segment has too few users.
        """
        targeting = parse_targeting(
            request.targeting, self.tables.domain, self.tables.listed_values
        )
        campaign, flight = self._campaign(request), self._flight(request)
        rate = None
        if request.in_target:
            rate = in_target_rate(self.tables, targeting, request.in_target)
        notes: list[str] = []
        query = Query(*targeting.sql(), self.tables.window)
        in_window = await self.pool.sums(query)
        size = self.segment_size(targeting, in_window)
        self._require_users(targeting, size, in_window)
        if in_window.users == 0:
            notes.append(
                "no sampled user is in this segment: its size is that of the log-linear model, its "
                "rates are those of all users"
            )
            query = Query("true", (), self.tables.window)
            in_window = await self.pool.sums(query)
        days = similar_days(flight, self.tables.window)
        in_flight = in_window if days == self.tables.window else await self.pool.sums(
            replace(query, days=days)
        )  # fmt: skip
        growth = self._growth(targeting, flight, days)
        expansion = SampleExpansion(
            size, in_window, in_flight, growth, self._noise_source(targeting)
        )
        if expansion.count_users(in_flight) < self._min_users:
            raise _too_few(self._min_users, "on the days of the flight ")
        by_sketch = self._by_sketch(targeting, expansion)
        notes += self._notes(targeting, expansion, by_sketch)
        brought = await self._forecast_campaign(
            replace(query, days=days), campaign, request, expansion, rate
        )
        if campaign is not None and brought is None:
            notes.append(
                f"the campaign wins too few users to report, fewer than {self._min_users} or "
                f"{MIN_SAMPLED_USERS} in the sample: raise its bid or widen its targeting"
            )
        users = expansion.users(in_flight, in_flight)
        return Forecast(
            first_day=flight[0],
            last_day=flight[-1],
            users=users,
            impressions=expansion.impressions(in_flight, in_flight),
            in_target_rate=rate,
            users_in_target=in_target_users(users, rate) if rate else None,
            users_by_sketch=by_sketch,
            campaign=brought,
            answered_shards=in_window.answered,
            notes=tuple(notes),
        )

    def segment_size(self, targeting: Targeting, in_window: SampleSums) -> SegmentSize:
        """Users and impressions of a segment in the window, given the sums over its sample."""
        box, model = targeting.box(), self.tables.model
        variances = in_window.variances()
        users_prior = None if box is None else model.users_prior(box)
        impressions_prior = None if box is None else model.impressions_prior(box)
        everyone = self.tables.mean_weight
        users = posterior(
            in_window.totals[USERS],
            variances[USERS],
            in_window.weight(USERS) or everyone,
            users_prior,
        )
        # Few sampled users say little about the spread of impressions over users: it is at least
        # that of the population.
        least = model.impressions_per_user * model.users.total / max(model.impressions.total, 1)
        spread = 0.0
        if in_window.totals[USERS] > 0:
            ratio = in_window.totals[IMPRESSIONS] / in_window.totals[USERS]
            spread = least * variances[USERS] * ratio**2
        impressions = posterior(
            in_window.totals[IMPRESSIONS],
            max(variances[IMPRESSIONS], spread),
            in_window.weight(IMPRESSIONS) or everyone * model.impressions_per_user,
            impressions_prior,
        )
        if users_prior is None and impressions_prior and in_window.totals[IMPRESSIONS] > 0:
            users = users.scaled(impressions.value / in_window.totals[IMPRESSIONS])
        return SegmentSize(users, impressions)

    @property
    def _min_users(self) -> int:
        assert self.spec.forecast
        return self.spec.forecast.min_users

    def _require_users(
        self, targeting: Targeting, size: SegmentSize, in_window: SampleSums
    ) -> None:
        """Raise UserError for a small segment.

        Where no counts of users cover it, a single sampled user may have the weight of `min_users`.
        """
        box = targeting.box()
        is_counted = box is not None and self.tables.model.users_prior(box) is not None
        is_sampled = in_window.users >= min(MIN_SAMPLED_USERS, self._min_users)
        if size.users.value < self._min_users or not (is_counted or is_sampled):
            raise _too_few(self._min_users)

    def _campaign(self, request: ForecastRequest) -> Campaign | None:
        if request.bid is None and request.goal is None:
            if request.budget or request.frequency_cap:
                raise UserError("a budget or a frequency cap needs a bid and a goal")
            return None
        auction = self.spec.auction
        if auction is None:
            raise UserError(f"spec {self.spec.name} has no auction: leave out bid and goal")
        goals = ", ".join(auction.goal_objectives)
        if request.bid is None or request.goal is None:
            raise UserError(f"a campaign needs a bid and a goal, one of {goals}")
        if request.goal not in auction.goal_objectives:
            raise UserError(f"no campaign has the goal {request.goal!r}; known: {goals}")
        objective = auction.goal_objectives[request.goal]
        return Campaign(objective, request.bid, request.frequency_cap)

    def _flight(self, request: ForecastRequest) -> list[date]:
        window, logs_end = self.tables.window, self.tables.logs_end
        if request.first_day is None and request.last_day is None:
            return days_after(logs_end, len(window))
        if request.first_day is None or request.last_day is None:
            raise UserError("a flight needs a first and a last day")
        if request.last_day < request.first_day:
            raise UserError(f"the flight ends on {request.last_day}, before its first day")
        if request.first_day <= logs_end:
            raise UserError(f"the flight begins on {request.first_day}; the logs already have it")
        if (request.first_day - logs_end).days > MAX_LEAD_DAYS:
            raise UserError(
                f"the flight begins on {request.first_day}, the logs end on {logs_end}: supply "
                f"is forecast for flights that begin at most {MAX_LEAD_DAYS} days later"
            )
        number = (request.last_day - request.first_day).days + 1
        if number > len(window):
            raise UserError(
                f"the flight has {number} days, the sample {len(window)}: shorten the flight, or "
                "raise forecast.window"
            )
        return list(date_range(request.first_day, request.last_day))

    def _growth(
        self, targeting: Targeting, flight: Sequence[date], days: Sequence[date]
    ) -> SupplyGrowth:
        """Impressions of the flight over those of the days that stand for it, of the surfaces."""
        possible = targeting.possible_values(SURFACE)
        is_limited = 0 < len(possible) < len(self.tables.domain[SURFACE] or ())
        surfaces = sorted(map(str, possible)) if is_limited else list(self.tables.supply)
        counts = [self.tables.supply[name] for name in surfaces]
        history = {
            day: sum(series.get(day, 0.0) for series in counts)
            for day in sorted({day for series in counts for day in series})
        }
        found = _forecast_days(tuple(history.items()), tuple(flight))
        base = sum(history.get(day, 0.0) for day in days)
        ratio = float(found.impressions.sum()) / base if base else 1.0
        return SupplyGrowth(ratio, found.relative_error, found.backtest is not None)

    def _noise_source(self, targeting: Targeting) -> NoiseSource:
        """The noise of a segment: the same however its targeting is written.

        Targetings that are not equivalent have noise of their own even if they select the same
        users, so that equal answers do not reveal that a condition selects nobody else.
        """
        segment = f"{self.tables.versions['forecast_sample']} {targeting.canonical_form()}"
        return NoiseSource(segment, min(NOISE_USERS, NOISE_SHARE * self._min_users))

    def _notes(
        self, targeting: Targeting, expansion: SampleExpansion, by_sketch: Interval | None
    ) -> Iterator[str]:
        """What limits how good a forecast of a segment is."""
        sums, box, model = expansion.in_window, targeting.box() or {}, self.tables.model
        prior, quantity = model.users_prior(box), USERS
        if prior is None:
            prior, quantity = model.impressions_prior(box), IMPRESSIONS
        if prior and prior.variance > 0 and sums.variances()[quantity] > prior.variance:
            yield (
                "the size of this segment is mostly that of the log-linear model: few of its users "
                "are in the sample"
            )
        in_window = expansion.users(sums, sums)
        if by_sketch and (by_sketch.high < in_window.low or in_window.high < by_sketch.low):
            yield (
                f"sketches count {by_sketch.value:,.0f} users in the window, which the interval of "
                f"{in_window.low:,.0f} to {in_window.high:,.0f} by the sample does not explain"
            )
        if not expansion.growth.is_backtested:
            yield "fewer than three weeks of logs: the supply forecast is not backtested"
        if sums.answered < 1:
            yield "a part of the sample did not answer: intervals are wider"

    def _by_sketch(self, targeting: Targeting, expansion: SampleExpansion) -> Interval | None:
        """The users by sketches, with the noise of `users`: two draws would tell more than one."""
        box = targeting.box()
        found = None if box is None else self.tables.sketches.users(box)
        if found is None or found.value < self._min_users:
            return None
        factor = expansion.noise_factor(USERS, expansion.in_window)
        return to_interval(found.scaled(factor)).rounded()

    async def _forecast_campaign(
        self,
        query: Query,
        campaign: Campaign | None,
        request: ForecastRequest,
        expansion: SampleExpansion,
        rate: Interval | None,
    ) -> CampaignForecast | None:
        """What a campaign brings; None without one, and if it wins too few users."""
        if campaign is None:
            return None
        free = won = await self.pool.sums(replace(query, campaign=campaign))
        # A segment with fewer sampled users is one of enough counted ones.
        is_sampled = won.users >= MIN_SAMPLED_USERS or expansion.in_flight.users < MIN_SAMPLED_USERS
        if expansion.count_users(won) < self._min_users or not is_sampled:
            return None
        spend = expansion.volume(won, SPEND, free).value
        if request.budget is not None and spend > request.budget:
            campaign = replace(campaign, participation=request.budget / spend)
            won = await self.pool.sums(replace(query, campaign=campaign))
        if expansion.count_users(won) < self._min_users:
            return None
        events = {
            name: expansion.rounded_volume(won, SPEND + 1 + k, free)
            for k, name in enumerate(self.spec.objectives)
        }
        paid, bought = expansion.rounded_volume(won, SPEND, free), events[campaign.objective].value
        if request.budget is not None:
            paid = paid.at_most(
                Interval(value=request.budget, low=request.budget, high=request.budget)
            )
        event = SPEND + 1 + list(events).index(campaign.objective)
        reach = expansion.users(won, free).at_most(
            expansion.users(expansion.in_flight, expansion.in_flight)
        )
        cost = None
        if bought:
            cost = expansion.cost(paid.value / bought, won, event, free)
        return CampaignForecast(
            reach=reach,
            reach_in_target=in_target_users(reach, rate) if rate else None,
            impressions=expansion.impressions(won, free),
            spend=paid,
            events=events,
            cost_per_event=cost,
            participation=float(f"{campaign.participation:.3g}"),
        )


@functools.lru_cache(maxsize=64)
def _forecast_days(
    history: tuple[tuple[date, float], ...], flight: tuple[date, ...]
) -> DailyForecast:
    """`forecast_days`, whose backtest takes longer than a query."""
    return forecast_days(dict(history), flight)


def _too_few(min_users: int, when: str = "") -> UserError:
    return UserError(
        f"the segment has fewer than {min_users} users {when}or too few in the sample to report: "
        "widen the targeting"
    )
