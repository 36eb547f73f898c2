"""A store made anew from the tables is told what the one before it was told live."""

import itertools

from etl.spec.units import DAY, MICROS
from ranking.online.attributes import Version, tell_items, tell_users
from ranking.online.feed import Event, feed
from ranking.online.log import Told, since
from ranking.online.store import Store

AT_ONCE = 1000


def take_over(old: Store, new: Store, told_ts: int | None = None) -> None:
    """Tell a new store what an old one was told from a time on; doing it twice changes nothing.

    Without a time: what the tables of the new one may not hold yet. A day more than that is told
    again, as logs and live events need not agree when a day ends.
    """
    if told_ts is None:
        told_ts = (new.landed - DAY) * MICROS["s"]
    with old.reading() as txn:
        told = since(txn, told_ts)
        while some := list(itertools.islice(told, AT_ONCE)):
            _tell(new, some)


def _tell(store: Store, told: list[Told]) -> None:
    versions = {"user": tell_users, "item": tell_items}
    for kind, group in itertools.groupby(told, key=lambda one: one.kind):
        if kind == "event":
            feed(store, [Event(**one.fields) for one in group])  # type: ignore[arg-type]
        else:
            for one in group:
                versions[kind](store, [Version(**one.fields)], one.told_ts)  # type: ignore[arg-type]
