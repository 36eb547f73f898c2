"""Fewer negatives: which labels of 0 are learned from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Thinning:
    """Which negatives of each objective are learned from: a share (O) of them, drawn by a seed.

    A model that is told of it stays unbiased: training/loop/loss.py.
    """

    shares: tuple[float, ...]
    seed: int

    def __call__(
        self, labels: npt.NDArray[np.float32], known: npt.NDArray[np.bool_], *salt: int
    ) -> npt.NDArray[np.bool_]:
        """Of the labels (B, O) that are known those that are learned from; all positive ones."""
        drawn = np.random.default_rng([self.seed, *salt]).random(labels.shape)
        return known & ((labels > 0) | (drawn < self.shares))
