"""Forecasts: how many users and impressions a targeting has, and what a campaign would win of them.

The size of a segment is known exactly (one or two attributes), or estimated from the sample and a
log-linear model. What a campaign brings per user and per impression of the segment is estimated
from the sample; daily impressions follow trend and weekday.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import date_range
from etl.tables.forecast_schemas import SURFACE
from ranking.forecast.campaign import (
    MIN_SAMPLED_USERS,
    forecast_campaign,
    requested_campaign,
)
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
from ranking.forecast.schemas import Forecast, ForecastRequest, Interval
from ranking.forecast.seasonality import DailyForecast, days_after, forecast_days, similar_days
from ranking.forecast.shard import IMPRESSIONS, USERS, Query, QueryRecorder, ShardPool
from ranking.forecast.sums import SampleSums, posterior
from ranking.forecast.tables import ForecastTables
from ranking.forecast.targeting import Targeting, parse_targeting

MAX_LEAD_DAYS = 28  # from the logs to a flight: trends are not known to last longer


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
        campaign = requested_campaign(self.spec, request)
        flight, pool = self._flight(request), QueryRecorder(self.pool)
        rate = None
        if request.in_target:
            rate = in_target_rate(self.tables, targeting, request.in_target)
        query, expansion, notes = await self._expand(targeting, flight, pool)
        in_flight = expansion.in_flight
        self._require_users(expansion)
        by_sketch = self._by_sketch(targeting, expansion)
        notes += self._notes(targeting, expansion, by_sketch)
        brought = None
        if campaign is not None:
            query = replace(query, campaign=campaign)
            brought = await forecast_campaign(
                self.spec, pool, query, request.budget, expansion, rate
            )
            if brought is None:
                notes.append(
                    f"the campaign wins too few users to report, fewer than {self._min_users} or "
                    f"{MIN_SAMPLED_USERS} in the sample: raise its bid or widen its targeting"
                )
        if pool.answered < 1:
            notes.append("a part of the sample did not answer: intervals are wider")
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
            answered_shards=pool.answered,
            notes=tuple(notes),
        )

    async def _expand(
        self, targeting: Targeting, flight: Sequence[date], pool: ShardPool
    ) -> tuple[Query, SampleExpansion, list[str]]:
        """The query of a segment in a flight, its sums over the sample with what they mean, notes.

        Where no sampled user is in the segment, these are the query and the sums of all users.
        """
        notes: list[str] = []
        query = Query(*targeting.sql(), self.tables.window)
        in_window = await pool.sums(query)
        size = self.segment_size(targeting, in_window)
        self._require_sampled_users(targeting, in_window)
        if in_window.users == 0:
            notes.append(
                "no sampled user is in this segment: its size is that of the log-linear model, its "
                "rates are those of all users"
            )
            query = Query("true", (), self.tables.window)
            in_window = await pool.sums(query)
        days = similar_days(flight, self.tables.window)
        query = replace(query, days=days)
        in_flight = in_window if days == self.tables.window else await pool.sums(query)
        growth, noise = self._growth(targeting, flight, days), self._noise_source(targeting)
        return query, SampleExpansion(size, in_window, in_flight, growth, noise), notes

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

    def _require_sampled_users(self, targeting: Targeting, in_window: SampleSums) -> None:
        """Raise UserError for a segment of few sampled users, unless counts of users cover it.

        A single sampled user may have the weight of `min_users`.
        """
        box = targeting.box()
        is_counted = box is not None and self.tables.model.users_prior(box) is not None
        if not is_counted and in_window.users < min(MIN_SAMPLED_USERS, self._min_users):
            raise _too_few(self._min_users)

    def _require_users(self, expansion: SampleExpansion) -> None:
        """Raise UserError for a segment that is small in the window or on the flight's days."""
        in_window, in_flight = expansion.in_window, expansion.in_flight
        if not expansion.is_reportable(in_window, in_window, self._min_users):
            raise _too_few(self._min_users)
        if not expansion.is_reportable(in_flight, in_flight, self._min_users):
            raise _too_few(self._min_users, "on the days of the flight ")

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

    def _by_sketch(self, targeting: Targeting, expansion: SampleExpansion) -> Interval | None:
        """The users by sketches, with the noise of `users`: two draws would tell more than one."""
        box = targeting.box()
        found = None if box is None else self.tables.sketches.users(box)
        if found is None:
            return None
        with_noise = found.scaled(expansion.noise_factor(USERS, expansion.in_window))
        if not expansion.noise.is_reportable(with_noise.value, self._min_users):
            return None
        return to_interval(with_noise).rounded()


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
