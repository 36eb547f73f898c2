"""Naive references in plain Python, from the events table's rows: slow, short, obviously right."""

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def history(events: Iterable[Row], user: str, as_of: int) -> list[Row]:
    """What a user's history shows at a second: strictly before it, in order of visibility."""
    seen = [e for e in events if e["user_id"] == user and e["visible_ts"] < as_of]
    return sorted(seen, key=lambda e: (e["visible_ts"], e["event_ts"], e["event_id"]))


def count(events: Iterable[Row], matches: Row, type_: int, as_of: int, window: int) -> int:
    """Events of a type that match on all of `matches`, in [as_of - window, as_of)."""
    return sum(
        e["type"] == type_
        and as_of - window <= e["visible_ts"] < as_of
        and all(e[name] == value for name, value in matches.items())
        for e in events
    )


def label(
    events: Iterable[Row], impression: Row, outcome: int, touch: int, window_us: int, ready_us: int
) -> int:
    """Whether an outcome that was seen in time is credited to an impression: last touch."""
    events = list(events)
    for e in events:
        if e["type"] != outcome or e["user_id"] != impression["user_id"]:
            continue
        credited = e["impression_id"]
        if credited is None and e["item_id"] == impression["item_id"]:
            touches = [
                t
                for t in events
                if t["type"] == touch
                and (t["user_id"], t["item_id"]) == (e["user_id"], e["item_id"])
                and t["event_ts"] <= e["event_ts"]
                and t["visible_ts"] <= e["visible_ts"]
            ]
            last = max(touches, key=lambda t: (t["event_ts"], t["event_id"]), default=None)
            credited = last and last["impression_id"]
        inside = 0 <= e["event_ts"] - impression["event_ts"] <= window_us
        seen = e["visible_ts"] * 1_000_000 <= ready_us
        if credited == impression["impression_id"] and inside and seen:
            return 1
    return 0
