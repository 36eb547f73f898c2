"""Histories of live users: their newest events, in the order in which they became visible."""

from dataclasses import dataclass

import numpy as np

from ranking.online.layout import HISTORY

SPARE = 64  # events kept beyond what is read: for requests that are older than the newest event


@dataclass(frozen=True)
class Histories:
    """The last `most` events of a user, of the types in `codes`; of all where there are none."""

    codes: tuple[int, ...]
    most: int

    def with_event(self, stored: bytes, event: np.ndarray, now: int) -> bytes | None:
        """A user's events and one more, which came at a second; None if its type is not read."""
        if self.codes and int(event["type"][0]) not in self.codes:
            return None
        rows = np.concatenate((np.frombuffer(stored, HISTORY), event))
        if len(rows) > 1 and rows[-2]["visible"] >= rows[-1]["visible"]:
            rows = rows[np.lexsort((rows["event"], rows["happened"], rows["visible"]))]
        return rows[self.first_kept(rows["visible"], now) :].tobytes()

    def first_kept(self, visible: np.ndarray, now: int) -> int:
        """The first event to keep, by the seconds (N) from which a user's events are visible.

        All that become visible later than `now` stay, and as many before as are read.
        """
        return max(0, int(np.searchsorted(visible, now)) - self.most - SPARE)

    def seen(self, stored: bytes, as_of: int) -> np.ndarray:
        """The events that were visible strictly before a second, oldest first."""
        rows = np.frombuffer(stored, HISTORY)
        return rows[: np.searchsorted(rows["visible"], as_of)][-self.most :]
