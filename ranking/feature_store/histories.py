"""Histories of users in a feature store: how they are read and extended.

Events of days before the last one with data are final. A store has them in the table `history`,
which only a build writes, so that the next store can copy it (see carried_histories.py). The table
`recent_history` has the events of the last day, and those posted while the store is live.

N rows of one user, oldest first.
"""

from dataclasses import dataclass

import numpy as np

from ranking.feature_store.storage import HISTORY_DTYPE, Txn

# Events kept beyond the history length, for requests that are older than the most recent event.
SPARE_EVENTS = 64


@dataclass(frozen=True)
class HistoryRetention:
    """Retention of user histories: the last `max_events` events of the types in `event_codes`.

    An empty `event_codes` keeps events of all types.
    """

    event_codes: tuple[int, ...]
    max_events: int

    def append_event(self, txn: Txn, user_key: bytes, event: np.ndarray, now: int) -> None:
        """Add one event (1), ingested at `now` (seconds), to the recent events of a user.

        Events of types that histories do not have are ignored.
        """
        if self.event_codes and int(event["type"][0]) not in self.event_codes:
            return
        rows = merge_rows(read_rows(txn, "recent_history", user_key), event)
        txn.put("recent_history", user_key, self.retained(rows, now).tobytes())

    def retained(self, rows: np.ndarray, now: int) -> np.ndarray:
        """The rows (N) to keep at a second: the most recent visible ones, and all later ones."""
        num_visible = int(np.searchsorted(rows["visible_ts"], now))
        return rows[max(0, num_visible - self.max_events - SPARE_EVENTS) :]

    def is_full(self, rows: np.ndarray, now: int) -> bool:
        """Whether `retained` keeps no more visible rows, so that it may have dropped some."""
        num_visible = int(np.searchsorted(rows["visible_ts"], now))
        return num_visible >= self.max_events + SPARE_EVENTS

    def visible_events(self, txn: Txn, user_key: bytes, as_of: int) -> np.ndarray:
        """The most recent `max_events` events visible strictly before a second, oldest first."""
        final, recent = (read_rows(txn, table, user_key) for table in ("history", "recent_history"))
        rows = merge_rows(final, recent)
        return rows[: np.searchsorted(rows["visible_ts"], as_of)][-self.max_events :]


def read_rows(txn: Txn, table: str, user_key: bytes) -> np.ndarray:
    """The rows (N) of a user in one of the two tables."""
    return np.frombuffer(txn.get(table, user_key), HISTORY_DTYPE)


def without_dropped(rows: np.ndarray, first_ts: int, num_at_first: int) -> np.ndarray:
    """The rows (N) of a user after those that compaction has dropped.

    They begin with the last `num_at_first` of those that became visible in the second `first_ts`.
    """
    begin, end = (int(np.searchsorted(rows["visible_ts"], first_ts, s)) for s in ("left", "right"))
    return rows[max(begin, end - num_at_first) :]


def merge_rows(rows: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Rows and further ones, both sorted, in the order of visibility, event time and event id."""
    if not len(rows) or not len(added):
        return added if len(added) else rows
    merged = np.concatenate((rows, added))
    if rows[-1]["visible_ts"] >= added[0]["visible_ts"]:
        return merged[np.lexsort((merged["event"], merged["event_ts"], merged["visible_ts"]))]
    return merged
