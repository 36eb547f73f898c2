"""Durations as people write them (`30m`, `1h`, `7d`), and days as they count them."""

import re
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DAY = SECONDS["d"]
MICROS = {"s": 1_000_000, "ms": 1_000, "us": 1}  # microseconds of each unit


def parse_duration(text: object) -> int:
    """Seconds of a duration such as `90s`, `30m`, `1h` or `7d`; raises ValueError on others."""
    match = re.fullmatch(r"(\d+)([smhd])", text) if isinstance(text, str) else None
    if not match:
        raise ValueError(f"{text!r} is not a duration; write a number and one of s, m, h, d: 30m")
    return int(match[1]) * SECONDS[match[2]]


def format_duration(seconds: int) -> str:
    """The shortest text that `parse_duration` reads back: 86400 -> `1d`."""
    unit = next(u for u in "dhms" if seconds % SECONDS[u] == 0) if seconds else "s"
    return f"{seconds // SECONDS[unit]}{unit}"


Duration = Annotated[
    int, BeforeValidator(parse_duration), PlainSerializer(format_duration, return_type=str)
]


def parse_days(text: str) -> tuple[date, date]:
    """First and last day of `2026-01-01:2026-01-08`, or of one day; raises ValueError."""
    first, _, last = text.partition(":")
    span = date.fromisoformat(first), date.fromisoformat(last or first)
    if span[0] > span[1]:
        raise ValueError(f"{text}: the first day is after the last; write first:last")
    return span


def each_day(first: date, last: date) -> Iterator[date]:
    """Every day from first to last, both included."""
    for offset in range((last - first).days + 1):
        yield first + timedelta(days=offset)
