"""Reference implementations in plain Python on the records of a log: slow, short, and simple.

A record has id, user, item, surface, type, ts and ingest (seconds), day (landing day), opens and
closes (first second of that day and of the next), imp (impression id or None), request (or None),
value, dwell (milliseconds or None), and attributes.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from features.reference import hyperloglog_estimate

Record = dict[str, Any]
DAY = 86_400


class LabelRule(NamedTuple):
    """An objective: outcome and touch types, fields that both share, and windows in seconds.

    `touch_window` is how long an outcome may follow a touch, and a touch its impression.
    """

    outcome: str
    touch: str
    same: list[str]
    window: int
    touch_window: int


def on_time(records: Iterable[Record], allowed_lateness: int) -> list[Record]:
    """Records that occurred at most `allowed_lateness` seconds before their landing day."""
    return [r for r in records if r["ts"] >= r["opens"] - allowed_lateness]


def deduplicate(records: Iterable[Record]) -> list[Record]:
    """The first record of each id; of impressions, of each impression id."""
    first: dict[object, Record] = {}
    for record in sorted(records, key=lambda r: (r["day"], r["ingest"])):
        is_impression = record["type"] == "shown"
        first.setdefault(("shown", record["imp"]) if is_impression else record["id"], record)
    return list(first.values())


def limit_per_user_day(records: Iterable[Record], max_events: int, delay: int) -> list[Record]:
    """The first `max_events` records of each user and landing day, in order of visibility."""
    by_user_day = defaultdict(list)
    for record in records:
        by_user_day[record["user"], record["day"]].append(record)
    return [
        record
        for group in by_user_day.values()
        for record in sorted(group, key=lambda r: (visible_ts(r, delay), r["ts"], r["id"]))[
            :max_events
        ]
    ]


def visible_ts(record: Record, delay: int) -> int:
    """The second from which on a record is visible."""
    second: int = max(record["ts"], record["ingest"] + delay, record["opens"])
    return second


def requests(records: Iterable[Record], session_gap: int) -> dict[str, tuple[object, int]]:
    """By impression id: the key of its request, and its as-of second."""
    impressions = sorted(
        (r for r in records if r["type"] == "shown"), key=lambda r: (r["ts"], r["id"])
    )
    groups: dict[object, list[Record]] = defaultdict(list)
    latest: dict[object, tuple[int, object]] = {}
    for r in impressions:
        key: object = (r["day"], r["user"], r["request"])
        if r["request"] is None:
            stream = (r["day"], r["user"], r["surface"])
            previous_ts, key = latest.get(stream, (None, None))
            if previous_ts is None or r["ts"] - previous_ts > session_gap:
                key = (*stream, r["ts"])
            latest[stream] = (r["ts"], key)
        groups[key].append(r)
    found: dict[str, tuple[object, int]] = {}
    for key, group in groups.items():
        as_of = min(min(r["ts"], r["ingest"], r["closes"]) for r in group)
        found |= {r["imp"]: (key, as_of) for r in group}
    return found


def history(records: Iterable[Record], user: str, as_of: int, delay: int) -> list[Record]:
    """A user's records that are visible strictly before a second, in order of visibility."""
    visible = [r for r in records if r["user"] == user and visible_ts(r, delay) < as_of]
    return sorted(visible, key=lambda r: (visible_ts(r, delay), r["ts"], r["id"]))


def attribute_outcome(
    records: list[Record], outcome: Record, touch: str, rule: LabelRule, delay: int
) -> object:
    """The impression id of an outcome: its own, or that of the last touch visible at its time.

    Fields that both share, such as `brand`, must be known by then: since `brand_since`.
    """
    if outcome["imp"] is not None:
        return outcome["imp"]
    touches = []
    for t in records:
        is_touch = (
            t["type"] == touch
            and all(t[key] is not None and t[key] == outcome[key] for key in ("user", *rule.same))
            and 0 <= outcome["ts"] - t["ts"] <= rule.touch_window
            and visible_ts(t, delay) <= visible_ts(outcome, delay)
            and all(
                record.get(f"{key}_since", 0) <= visible_ts(outcome, delay)
                for record in (t, outcome)
                for key in rule.same
            )
        )
        impression = attribute_outcome(records, t, "shown", rule, delay) if is_touch else None
        if impression is not None:
            touches.append((t["ts"], t["id"], impression))
    return max(touches)[2] if touches else None


def outcomes(
    records: list[Record], impression: Record, rule: LabelRule, delay: int
) -> list[Record]:
    """Outcomes within the window, visible when it closed, that are attributed to an impression."""
    mature_ts = max(impression["ts"] + rule.window, visible_ts(impression, delay))
    return [
        r
        for r in records
        if r["type"] == rule.outcome
        and impression["ts"] <= r["ts"] <= impression["ts"] + rule.window
        and visible_ts(r, delay) <= mature_ts
        and attribute_outcome(records, r, rule.touch, rule, delay) == impression["imp"]
    ]


def dwell(outcomes: Iterable[Record]) -> float | None:
    """How long outcomes lasted together, in milliseconds; None if no dwell is known."""
    dwells = [outcome["dwell"] for outcome in outcomes if outcome["dwell"] is not None]
    return sum(dwells) if dwells else None


def counters(
    records: Iterable[Record],
    as_of: int,
    delay: int,
    windows: Mapping[str, int],
    half_lives: Mapping[str, int],
    distinct: Mapping[str, Callable[[Record], int | None]],
) -> dict[tuple[str, str], float | None]:
    """Counters of one key by prefix and suffix of their column, such as `cnt` and `click_1d`.

    `distinct` returns the values, as integers, of which distinct ones are counted.
    """
    values: dict[tuple[str, str], float | None] = {}
    past = [(r, as_of - visible_ts(r, delay)) for r in records]
    past = [(r, age) for r, age in past if 0 < age <= max(windows.values())]
    for type_ in ("shown", "click", "buy", "look"):
        ages = [age for r, age in past if r["type"] == type_]
        values["since", type_] = min(ages, default=None)
        for name, half_life in half_lives.items():
            values["decayed", f"{type_}_{name}"] = sum(0.5 ** (age / half_life) for age in ages)
        for name, window in windows.items():
            inside = [(r, age) for r, age in past if r["type"] == type_ and age <= window]
            values["cnt", f"{type_}_{name}"] = len(inside)
            dwells = [
                (age, min(round(r["dwell"]), DAY * 1000) / 1000)
                for r, age in inside
                if r["dwell"] is not None
            ]
            numbers = {"dwell": dwells}
            for column in ("value", "quantity", "screen"):
                known = [(r[column], age) for r, age in inside if r[column] is not None]
                numbers[column] = [(age, min(number, 1e9)) for number, age in known]
            for column, of_column in numbers.items():
                for function, value in functions_of_numbers(of_column).items():
                    values[f"{function}_{column}", f"{type_}_{name}"] = value
            for column, value_of in distinct.items():
                found = {value_of(r) for r, _ in inside} - {None}
                estimate = hyperloglog_estimate(value for value in found if value is not None)
                values[f"distinct_count_{column}", f"{type_}_{name}"] = estimate
    return values


def functions_of_numbers(numbers: list[tuple[int, float]]) -> dict[str, float | None]:
    """The functions of numbers, each with its age in seconds."""
    if not numbers:
        return dict.fromkeys(("mean", "min", "max", "first", "last")) | {"sum": 0.0}
    values, ages = [value for _, value in numbers], [age for age, _ in numbers]
    return {
        "sum": math.fsum(values),
        "mean": math.fsum(values) / len(values),
        "min": min(values),
        "max": max(values),
        "first": min(value for age, value in numbers if age == max(ages)),
        "last": max(value for age, value in numbers if age == min(ages)),
    }
