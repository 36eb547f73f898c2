"""Histories of live users: their newest events, in the order in which they became visible."""

from dataclasses import dataclass

import numpy as np

from ranking.online.layout import HISTORY

SPARE = 64  # events kept beyond what is read: some are not yet visible


@dataclass(frozen=True)
class Histories:
    """The last `most` events of a user, of the types in `codes`; of all where there are none."""

    codes: tuple[int, ...]
    most: int

    def with_event(self, stored: bytes, event: np.ndarray) -> bytes | None:
        """A user's events and one more, in order; None where it is of a type that is not read."""
        if self.codes and int(event["type"][0]) not in self.codes:
            return None
        rows = np.concatenate((np.frombuffer(stored, HISTORY), event))
        if len(rows) > 1 and rows[-2]["visible"] >= rows[-1]["visible"]:
            rows = rows[np.lexsort((rows["event"], rows["happened"], rows["visible"]))]
        return rows[-(self.most + SPARE) :].tobytes()

    def seen(self, stored: bytes, as_of: int) -> np.ndarray:
        """The events that were visible strictly before a second, oldest first."""
        rows = np.frombuffer(stored, HISTORY)
        return rows[: np.searchsorted(rows["visible"], as_of)][-self.most :]
