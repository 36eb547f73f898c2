"""Reference implementations of example features on rows of `events`: slow, short, and simple."""

import math
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import xxhash

Row = dict[str, Any]
MICROS_PER_SECOND = 1_000_000
MILLISECONDS_PER_DAY = 86_400_000


def visible_history(events: Iterable[Row], user: str, as_of: int) -> list[Row]:
    """A user's events that are visible strictly before a second, in order of visibility."""
    visible = [e for e in events if e["user_id"] == user and e["visible_ts"] < as_of]
    return sorted(visible, key=lambda e: (e["visible_ts"], e["event_ts"], e["event_id"]))


def count_matching_events(
    events: Iterable[Row], equals: Row, event_type: int, as_of: int, window: int
) -> int:
    """Number of events of a type in [as_of - window, as_of) whose columns are as in `equals`."""
    return sum(
        _is_in_window(e, event_type, as_of, window)
        and all(e[name] == value for name, value in equals.items())
        for e in events
    )


def decayed_count(
    events: Iterable[Row], event_type: int, as_of: int, window: int, half_life: int
) -> float:
    """Sum over events of a type in [as_of - window, as_of) of 2^(-age / half_life)."""
    ages = _ages(events, event_type, as_of, window)
    return math.fsum(2.0 ** (-age / half_life) for age in ages)


def time_since_last(events: Iterable[Row], event_type: int, as_of: int, window: int) -> int | None:
    """Seconds since the latest event of a type in [as_of - window, as_of); None without one."""
    return min(_ages(events, event_type, as_of, window), default=None)


def function_of_dwells(
    events: Iterable[Row], function: str, event_type: int, as_of: int, window: int
) -> float | None:
    """A function of the dwells in seconds of events of a type in [as_of - window, as_of).

    A dwell counts in whole milliseconds, and at most a day.
    """
    dwells = [
        (e["visible_ts"], Fraction(min(round(e["dwell_ms"]), MILLISECONDS_PER_DAY), 1000))
        for e in events
        if _is_in_window(e, event_type, as_of, window) and e["dwell_ms"] is not None
    ]
    return _function_of_numbers(function, dwells)


def function_of_values(
    events: Iterable[Row], column: str, function: str, event_type: int, as_of: int, window: int
) -> float | None:
    """A function of the numbers in a column of events of a type in [as_of - window, as_of).

    A number counts in whole ten-thousandths, and at most 1e9 in magnitude.
    """
    values = [
        (e["visible_ts"], Fraction(round(max(-1e9, min(e[column], 1e9)) * 10**4), 10**4))
        for e in events
        if _is_in_window(e, event_type, as_of, window)
        and e[column] is not None
        and math.isfinite(e[column])
    ]
    return _function_of_numbers(function, values)


def distinct_count(
    values: Iterable[tuple[Row, int | None]], event_type: int, as_of: int, window: int
) -> float:
    """The estimated number of values of events of a type in [as_of - window, as_of).

    `values` are events, each with its value as an integer, or None where it has none.
    """
    counted = (value for e, value in values if _is_in_window(e, event_type, as_of, window))
    return hyperloglog_estimate({value for value in counted if value is not None})


def hyperloglog_estimate(values: Iterable[int]) -> float:
    """The HyperLogLog estimate of the number of distinct integers, with 128 registers."""
    registers = [0] * 128
    for value in values:
        hashed = xxhash.xxh64_intdigest(value.to_bytes(8, "little", signed=True), seed=42)
        bits = f"{hashed >> 7:057b}"
        rank = min(len(bits) - len(bits.rstrip("0")) + 1, 50)
        registers[hashed % 128] = max(registers[hashed % 128], rank)
    raw = 0.7213 / (1 + 1.079 / 128) * 128**2 / math.fsum(2.0**-rank for rank in registers)
    if raw <= 2.5 * 128 and 0 in registers:
        return 128 * math.log(128 / registers.count(0))
    return raw


def _is_in_window(event: Row, event_type: int, as_of: int, window: int) -> bool:
    is_before = as_of - window <= event["visible_ts"] < as_of
    return is_before and bool(event["type"] == event_type)


def _function_of_numbers(function: str, numbers: list[tuple[int, Fraction]]) -> float | None:
    """A function of numbers, each with its second; without any a sum is 0 and others are None."""
    if not numbers:
        return 0.0 if function == "sum" else None
    total = sum(number for _, number in numbers)
    seconds = [second for second, _ in numbers]
    result = {
        "sum": total,
        "mean": total / len(numbers),
        "min": min(number for _, number in numbers),
        "max": max(number for _, number in numbers),
        "first": min(number for second, number in numbers if second == min(seconds)),
        "last": max(number for second, number in numbers if second == max(seconds)),
    }[function]
    return float(result)


def _ages(events: Iterable[Row], event_type: int, as_of: int, window: int) -> list[int]:
    ages = [as_of - e["visible_ts"] for e in events if e["type"] == event_type]
    return [age for age in ages if 0 < age <= window]


def as_of_by_impression(
    impressions: Iterable[Row], request_session_gap: int, day_end: int
) -> dict[str, int]:
    """The as-of second of each impression of one user and day, by impression id.

    All impressions of a request share the earliest second of any of them. Impressions without a
    request id are of one request while each follows the previous one on its surface within
    `request_session_gap` seconds.
    """
    requests: dict[object, list[Row]] = defaultdict(list)
    latest: dict[int, tuple[int, object]] = {}  # by surface: second and request
    for impression in sorted(impressions, key=lambda e: (e["event_ts"], e["event_id"])):
        request = impression["request_id"]
        if request is None:
            surface = impression["surface"]
            second = impression["event_ts"] // MICROS_PER_SECOND
            previous_second, request = latest.get(surface, (None, None))
            if previous_second is None or second - previous_second > request_session_gap:
                request = (surface, second)
            latest[surface] = (second, request)
        requests[request].append(impression)

    found: dict[str, int] = {}
    for members in requests.values():
        earliest = min(min(e["event_ts"], e["ingest_ts"]) for e in members) // MICROS_PER_SECOND
        for impression in members:
            found[impression["impression_id"]] = min(earliest, day_end)
    return found


def attribute_version_at(versions: Iterable[Row], as_of: int) -> Row | None:
    """The latest attribute version that was valid strictly before a second; None without one."""
    earlier = [v for v in versions if v["valid_from"] < as_of * MICROS_PER_SECOND]
    return max(earlier, key=lambda v: (v["valid_from"], v["day"]), default=None)
