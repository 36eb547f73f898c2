"""Negative sampling, the order of an epoch, and packing of requests into batches.

B rows, O objectives, R requests.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
MAX_BATCH_EVENTS = 2**19  # event tokens of width 64 then take 128 MB


@dataclass(frozen=True)
class NegativeSampling:
    """Random sampling of each objective's negatives, at `rates` (O).

    The loss corrects for it, so that predictions stay unbiased: `training.trainer.step.Loss`.
    """

    rates: tuple[float, ...]
    seed: int

    def __call__(
        self, labels: npt.NDArray[np.float32], label_mask: npt.NDArray[np.bool_], *salt: int
    ) -> npt.NDArray[np.bool_]:
        """The mask (B, O) without negatives that are not sampled; all positives are kept."""
        draws = np.random.default_rng([self.seed, *salt]).random(labels.shape)
        return label_mask & ((labels > 0) | (draws < self.rates))


@dataclass(frozen=True)
class Shuffle:
    """The order of an epoch: random, determined by a seed; with None the stored order."""

    seed: int | None

    def __call__(self, values: Int64, *salt: int) -> Int64:
        """The values in the order of the seed and the salt."""
        if self.seed is None:
            return values
        return np.random.default_rng([self.seed, *salt]).permutation(values)

    def split(self, sizes: Int64, events: Int64, rows: int, *salt: int) -> list[Int64]:
        """The requests (R) of each batch, batches of about `rows` rows and of even cost.

        `sizes` and `events` (R) are the rows and the history events of each request. Batches with
        long histories have fewer rows.
        """
        batches_for_events = -(-int(events.sum()) // MAX_BATCH_EVENTS)
        count = max(1, round(sizes.sum() / rows), batches_for_events)
        requests = np.arange(len(sizes))
        if self.seed is None:
            is_heavy = events.sum() > MAX_BATCH_EVENTS
            return split_by_cost(requests, sizes + events if is_heavy else sizes, count)
        shuffled = self(requests, *salt)
        batches = balance_by_cost(shuffled, (sizes + events)[shuffled], count)
        return [batches[i] for i in self(np.arange(len(batches)), *salt, 1)]


def split_by_cost(requests: Int64, cost: Int64, count: int) -> list[Int64]:
    """Consecutive parts of about the same total `cost`; costs are given per request."""
    cumulative = np.cumsum(cost)
    edges = np.searchsorted(cumulative, cumulative[-1] * np.arange(1, count) / count, side="right")
    return [part for part in np.split(requests, edges) if len(part)]


def balance_by_cost(requests: Int64, cost: Int64, count: int) -> list[Int64]:
    """Parts of about the same size and total cost: dealt in snake order, the costliest first."""
    order = np.argsort(-cost, kind="stable")
    turn, position = np.divmod(np.arange(len(requests)), count)
    part = np.where(turn % 2, count - 1 - position, position)
    dealt = requests[order][np.argsort(part, kind="stable")]
    return np.split(dealt, np.cumsum(np.bincount(part, minlength=count))[:-1])
