"""Durations (`30m`), units of time, ranges of days, and the split of days for training."""

import re
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from etl.spec.base import StrictModel

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DAY = SECONDS["d"]
MAX_DURATION = 36_500 * DAY  # longer ones lead out of the range of dates
DayRange = tuple[date, date]  # first and last
MICROS = {"s": 1_000_000, "ms": 1_000, "us": 1}  # microseconds in each unit of time


def parse_duration(text: object) -> int:
    """Seconds of a duration such as `90s`, `30m`, `1h` or `7d`; raises ValueError on others.

    It is at most MAX_DURATION.
    """
    match = re.fullmatch(r"(\d+)([smhd])", text) if isinstance(text, str) else None
    if not match:
        raise ValueError(f"{text!r} is not a duration; write a number and one of s, m, h, d: 30m")
    seconds = int(match[1]) * SECONDS[match[2]]
    if seconds > MAX_DURATION:
        raise ValueError(f"{text} is too long: write at most {format_duration(MAX_DURATION)}")
    return seconds


def format_duration(seconds: int) -> str:
    """The shortest text that `parse_duration` accepts for some seconds: 86400 -> `1d`."""
    if not seconds:
        return "0s"
    unit = next(unit for unit in "dhms" if seconds % SECONDS[unit] == 0)
    return f"{seconds // SECONDS[unit]}{unit}"


Duration = Annotated[
    int, BeforeValidator(parse_duration), PlainSerializer(format_duration, return_type=str)
]


def parse_date_range(text: str) -> DayRange:
    """First and last day of `2026-01-01:2026-01-08`, or of one day; raises ValueError."""
    first, _, last = text.partition(":")
    first_day, last_day = date.fromisoformat(first), date.fromisoformat(last or first)
    if first_day > last_day:
        raise ValueError(f"{text}: the first day is after the last; write first:last")
    return first_day, last_day


def date_range(first: date, last: date) -> Iterator[date]:
    """Every day from first to last, both included."""
    for offset in range((last - first).days + 1):
        yield first + timedelta(days=offset)


class DaySplit(StrictModel):
    """Days for training, then one for calibration, then those for testing.

    Labels are taken as they are known at the end of `data_until`, the last day with logs, so that
    labels of the test days can mature. `calibration` is None where nothing is calibrated.
    """

    train_first: date
    train_last: date
    calibration: date | None
    test_first: date
    test_last: date
    data_until: date
