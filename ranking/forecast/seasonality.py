"""Daily impressions of the coming days: weekday effects and a trend, compared with last week.

    log y_t = level + slope t + weekday effect

is fitted by ridge regression with exponential forgetting. Where forecasts of past weeks by it were
worse than repeating the week before them, the last week is repeated. The error is the root mean
square of forecasts of as many days, a week at most, one week ahead; it grows with the weeks ahead,
as that of a trend does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np

from etl.array_types import Float64

WEEK = 7
HALF_LIFE_DAYS = 14.0
NOISE = 0.1  # assumed standard deviation of a day's logarithm
SLOPE_PRIOR, WEEKDAY_PRIOR = 0.01, 0.3  # standard deviations of the slope a day and of effects
MIN_RELATIVE_ERROR = 0.02  # of a level, however well past weeks were forecast
DEFAULT_RELATIVE_ERROR = 0.15  # where there are too few days for a backtest
MIN_DAYS = 2 * WEEK  # below, the level is the mean of the last week


@dataclass(frozen=True)
class Backtest:
    """Root mean square errors of forecasts of past days, as shares of what these brought."""

    model_error: float
    repeat_error: float


@dataclass(frozen=True)
class DailyForecast:
    """Impressions of some days and their relative error; `backtest` is None for too few days."""

    impressions: Float64
    relative_error: float
    backtest: Backtest | None


def forecast_days(history: Mapping[date, float], days: Sequence[date]) -> DailyForecast:
    """The impressions of some later days, from those of past days without gaps."""
    past = sorted(history)
    weeks = (days[-1] - past[-1] - timedelta(days=1)).days // WEEK + 1
    values = np.array([max(float(history[day]), 1.0) for day in past])
    if len(past) < MIN_DAYS:
        level = float(values[-WEEK:].mean())
        return DailyForecast(np.full(len(days), level), weeks * DEFAULT_RELATIVE_ERROR, None)
    backtest = backtest_weeks(past, values, min(len(days), WEEK))
    is_better = backtest is None or backtest.model_error <= backtest.repeat_error
    predict = _predict_model if is_better else _repeat_week
    errors = [] if backtest is None else [backtest.model_error, backtest.repeat_error]
    error = max(MIN_RELATIVE_ERROR, min(errors, default=DEFAULT_RELATIVE_ERROR))
    return DailyForecast(predict(past, values, days), weeks * error, backtest)


def backtest_weeks(past: Sequence[date], values: Float64, length: int) -> Backtest | None:
    """Forecast as many days from those before them; None if there are too few days."""
    model: list[float] = []
    repeat: list[float] = []
    for end in range(MIN_DAYS, len(past) - WEEK + 1, WEEK // 2):
        before, after = slice(0, end), slice(end, end + length)
        total = values[after].sum()
        for errors, predict in ((model, _predict_model), (repeat, _repeat_week)):
            predicted = predict(past[before], values[before], past[after]).sum()
            errors.append((float(predicted / total) - 1.0) ** 2)
    return Backtest(float(np.mean(model)) ** 0.5, float(np.mean(repeat)) ** 0.5) if model else None


def _repeat_week(past: Sequence[date], values: Float64, days: Sequence[date]) -> Float64:
    """The latest value of the same weekday; the mean of the last week for one without logs."""
    by_weekday = {day.weekday(): value for day, value in zip(past, values, strict=True)}
    level = values[-WEEK:].mean()
    return np.array([by_weekday.get(day.weekday(), level) for day in days])


def _predict_model(past: Sequence[date], values: Float64, days: Sequence[date]) -> Float64:
    """The fitted model on some days."""
    last = past[-1]
    weights = 0.5 ** (np.array([(last - day).days for day in past]) / HALF_LIFE_DAYS)
    design = _design(past, last)
    slope_penalty, weekday_penalty = (NOISE / SLOPE_PRIOR) ** 2, (NOISE / WEEKDAY_PRIOR) ** 2
    penalties = np.array([0.0, slope_penalty, *[weekday_penalty] * WEEK])
    normal = design.T @ (weights[:, None] * design) + np.diag(penalties)
    coefficients = np.linalg.solve(normal, design.T @ (weights * np.log(values)))
    return np.asarray(np.exp(_design(days, last) @ coefficients))


def _design(days: Sequence[date], last: date) -> Float64:
    """A row for each day: a constant, days since `last`, and its weekday."""
    weekdays = np.eye(WEEK)[[day.weekday() for day in days]]
    offsets = np.array([(day - last).days for day in days], float)
    return np.column_stack([np.ones(len(days)), offsets, weekdays])


def similar_days(flight: Sequence[date], window: Sequence[date]) -> tuple[date, ...]:
    """As many days of the window as a flight has: of the same weekdays if it can be, and late."""
    unused, chosen = sorted(window, reverse=True), []
    for day in flight:
        match = next((other for other in unused if other.weekday() == day.weekday()), None)
        if match is not None:
            unused.remove(match)
            chosen.append(match)
    chosen += unused[: len(flight) - len(chosen)]
    return tuple(sorted(chosen))


def days_after(last: date, number: int) -> list[date]:
    """The days that follow a day."""
    return [last + timedelta(days=k + 1) for k in range(number)]
