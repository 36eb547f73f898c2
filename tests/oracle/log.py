"""Naive references in plain Python, from the records of a log: slow, short, obviously right.

A record has id, user, item, surface, type, ts and ingest (seconds), day (landing day), opens and
closes (seconds, of that day), imp (impression id or None), request (or None) and value.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
DAY = 86_400


def on_time(records: Iterable[Record], lateness: int) -> list[Record]:
    """Records that happened no longer before their landing day than is waited."""
    return [r for r in records if r["ts"] >= r["opens"] - lateness]


def first_copies(records: Iterable[Record]) -> list[Record]:
    """One record of those that share an id, or an impression id where they are impressions."""
    found: dict[object, Record] = {}
    for record in sorted(records, key=lambda r: (r["day"], r["ingest"])):
        shown = record["type"] == "shown"
        found.setdefault(("shown", record["imp"]) if shown else record["id"], record)
    return list(found.values())


def of_people(records: Iterable[Record], most: int, delay: int) -> list[Record]:
    """The first `most` records of each user and landing day to become visible."""
    days = defaultdict(list)
    for record in records:
        days[record["user"], record["day"]].append(record)
    ordered = (
        sorted(day, key=lambda r: (visible(r, delay), r["ts"], r["id"])) for day in days.values()
    )
    return [record for day in ordered for record in day[:most]]


def visible(record: Record, delay: int) -> int:
    """The second from which on a record can be seen."""
    return max(record["ts"], record["ingest"] + delay, record["opens"])


def requests(records: Iterable[Record], gap: int) -> dict[str, tuple[object, int]]:
    """The request of each impression by its id, and the second as of which it was ranked."""
    shown = sorted((r for r in records if r["type"] == "shown"), key=lambda r: (r["ts"], r["id"]))
    groups: dict[object, list[Record]] = defaultdict(list)
    last: dict[object, tuple[int, object]] = {}
    for r in shown:
        key: object = (r["day"], r["user"], r["request"])
        if r["request"] is None:
            place = (r["day"], r["user"], r["surface"])
            before, key = last.get(place, (None, None))
            key = key if before is not None and r["ts"] - before <= gap else (*place, r["ts"])
            last[place] = (r["ts"], key)
        groups[key].append(r)
    as_of = {k: min(min(r["ts"], r["ingest"], r["closes"]) for r in g)
             for k, g in groups.items()}  # fmt: skip
    return {r["imp"]: (key, as_of[key]) for key, group in groups.items() for r in group}


def history(records: Iterable[Record], user: str, as_of: int, delay: int) -> list[Record]:
    """What a user's history shows at a second: strictly before it, in order of visibility."""
    seen = [r for r in records if r["user"] == user and visible(r, delay) < as_of]
    return sorted(seen, key=lambda r: (visible(r, delay), r["ts"], r["id"]))


def credit(
    records: list[Record], outcome: Record, touch: str, same: list[str], delay: int
) -> object:
    """The impression id of the last touch before an outcome that could be seen when it could."""
    if outcome["imp"] is not None:
        return outcome["imp"]
    touches = [
        (t["ts"], t["id"], c)
        for t in records
        if t["type"] == touch
        and all(t[k] is not None and t[k] == outcome[k] for k in ("user", *same))
        and t["ts"] <= outcome["ts"]
        and visible(t, delay) <= visible(outcome, delay)
        and (c := credit(records, t, "shown", same, delay)) is not None
    ]
    return max(touches)[2] if touches else None


def label(
    records: list[Record], shown: Record, outcome: str, touch: str, same: list[str],
    window: int, delay: int,
) -> int:  # fmt: skip
    """Whether an outcome within the window, seen by the time it closed, is credited to `shown`."""
    ready = max(shown["ts"] + window, visible(shown, delay))
    return int(any(
        r["type"] == outcome
        and shown["ts"] <= r["ts"] <= shown["ts"] + window
        and visible(r, delay) <= ready
        and credit(records, r, touch, same, delay) == shown["imp"]
        for r in records
    ))  # fmt: skip
