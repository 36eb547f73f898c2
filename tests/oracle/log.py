"""Reference implementations in plain Python on the records of a log: slow, short, and simple.

A record has id, user, item, surface, type, ts and ingest (seconds), day (landing day), opens and
closes (first second of that day and of the next), imp (impression id or None), request (or None)
and value.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

Record = dict[str, Any]
DAY = 86_400


class LabelRule(NamedTuple):
    """An objective: outcome and touch types, fields that both share, and the window in seconds."""

    outcome: str
    touch: str
    same: list[str]
    window: int


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
    records: list[Record], outcome: Record, touch: str, same: list[str], delay: int
) -> object:
    """The impression id of an outcome: its own, or that of the last touch visible at its time."""
    if outcome["imp"] is not None:
        return outcome["imp"]
    touches = []
    for t in records:
        is_touch = (
            t["type"] == touch
            and all(t[key] is not None and t[key] == outcome[key] for key in ("user", *same))
            and t["ts"] <= outcome["ts"]
            and visible_ts(t, delay) <= visible_ts(outcome, delay)
        )
        impression = attribute_outcome(records, t, "shown", same, delay) if is_touch else None
        if impression is not None:
            touches.append((t["ts"], t["id"], impression))
    return max(touches)[2] if touches else None


def label(records: list[Record], impression: Record, rule: LabelRule, delay: int) -> int:
    """1 if an outcome within the window, visible when it closed, is attributed to an impression."""
    mature_ts = max(impression["ts"] + rule.window, visible_ts(impression, delay))
    return int(
        any(
            r["type"] == rule.outcome
            and impression["ts"] <= r["ts"] <= impression["ts"] + rule.window
            and visible_ts(r, delay) <= mature_ts
            and attribute_outcome(records, r, rule.touch, rule.same, delay) == impression["imp"]
            for r in records
        )
    )
