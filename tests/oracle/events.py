"""A reference implementation of labels in plain Python, on rows of the events table."""

from collections.abc import Iterable
from typing import Any, NamedTuple

Row = dict[str, Any]


class LabelRule(NamedTuple):
    """An objective: codes of outcome and touch, and the window in microseconds."""

    outcome: int
    touch: int
    window: int


def outcomes(events: Iterable[Row], impression: Row, rule: LabelRule, mature_ts: int) -> list[Row]:
    """The outcomes visible by `mature_ts` (microseconds) that are attributed by last touch."""
    events, found = list(events), []
    for e in events:
        if e["type"] != rule.outcome or e["user_id"] != impression["user_id"]:
            continue
        attributed = e["impression_id"]
        if attributed is None and e["item_id"] == impression["item_id"]:
            touches = [
                t
                for t in events
                if t["type"] == rule.touch
                and (t["user_id"], t["item_id"]) == (e["user_id"], e["item_id"])
                and t["event_ts"] <= e["event_ts"]
                and t["visible_ts"] <= e["visible_ts"]
            ]
            last = max(touches, key=lambda t: (t["event_ts"], t["event_id"]), default=None)
            attributed = last and last["impression_id"]
        in_window = 0 <= e["event_ts"] - impression["event_ts"] <= rule.window
        is_visible = e["visible_ts"] * 1_000_000 <= mature_ts
        if attributed == impression["impression_id"] and in_window and is_visible:
            found.append(e)
    return found
