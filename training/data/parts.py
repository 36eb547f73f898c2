"""How the requests of a chunk are cut to batches: even in rows and in events of history."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
MOST_EVENTS = 2**19  # of a batch: its event tokens of width 64 take 128 MB


@dataclass(frozen=True)
class Shuffle:
    """The order in which a pass goes through rows: a seed, or None for the stored order."""

    seed: int | None

    def __call__(self, values: Int64, *salt: int) -> Int64:
        """The values in the order of the seed and the salt."""
        if self.seed is None:
            return values
        return np.random.default_rng([self.seed, *salt]).permutation(values)

    def parts(self, sizes: Int64, events: Int64, rows: int, *salt: int) -> list[Int64]:
        """The requests (R) in parts of about `rows` rows, fewer where they have many events.

        `sizes` and `events` (R) are the rows and the events of each.
        """
        count = max(1, round(sizes.sum() / rows), -(-int(events.sum()) // MOST_EVENTS))
        requests = np.arange(len(sizes))
        if self.seed is None:
            return cut(requests, sizes + events if events.sum() > MOST_EVENTS else sizes, count)
        mixed = self(requests, *salt)
        parts = deal(mixed, (sizes + events)[mixed], count)
        return [parts[i] for i in self(np.arange(len(parts)), *salt, 1)]


def cut(requests: Int64, cost: Int64, count: int) -> list[Int64]:
    """Consecutive parts of about the same cost; `cost` is that of each request."""
    until = np.cumsum(cost)
    edges = np.searchsorted(until, until[-1] * np.arange(1, count) / count, side="right")
    return [part for part in np.split(requests, edges) if len(part)]


def deal(requests: Int64, cost: Int64, count: int) -> list[Int64]:
    """Parts of about the same number and cost: the costliest are dealt first, to and fro."""
    order = np.argsort(-cost, kind="stable")
    turn, place = np.divmod(np.arange(len(requests)), count)
    part = np.where(turn % 2, count - 1 - place, place)
    found = requests[order][np.argsort(part, kind="stable")]
    return np.split(found, np.cumsum(np.bincount(part, minlength=count))[:-1])
