"""A naive reference of labels in plain Python, from the events table's rows."""

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


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
