"""Naive references of examples, from rows of `events`: slow, short, obviously right."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
SECOND = 1_000_000


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


def ranked_at(shown: Iterable[Row], gap: int, day_end: int) -> dict[str, int]:
    """The second as of which each impression, by its id, of a user's day was ranked.

    Impressions without a request are of one while each follows the one before on its surface
    within `gap` seconds; all of a request were ranked at the first of their clocks.
    """
    requests: dict[object, list[Row]] = defaultdict(list)
    before: dict[int, tuple[int, object]] = {}
    for e in sorted(shown, key=lambda e: (e["event_ts"], e["event_id"])):
        key: object = e["request_id"]
        if key is None:
            second = e["event_ts"] // SECOND
            last, key = before.get(e["surface"], (None, None))
            key = key if last is not None and second - last <= gap else (e["surface"], second)
            before[e["surface"]] = second, key
        requests[key].append(e)
    clocks = {
        key: min(min(e["event_ts"], e["ingest_ts"]) // SECOND for e in rows)
        for key, rows in requests.items()
    }
    return {
        e["impression_id"]: min(clocks[key], day_end)
        for key, rows in requests.items()
        for e in rows
    }


def version_at(versions: Iterable[Row], as_of: int) -> Row | None:
    """The newest version of attributes that was valid strictly before a second."""
    held = [v for v in versions if v["valid_from"] < as_of * SECOND]
    return max(held, key=lambda v: (v["valid_from"], v["day"]), default=None)
