"""Scores of predictions that were made before each update: a sign of life, free with one pass.

They are of this process's batches, with dropout, by weights that are not averaged: an evaluation
is done with `gemline train evaluate`.
"""

import numpy as np
import torch
from torch import Tensor

from training.data.batch import Batch
from training.data.features import Features
from training.loop.metrics import score


class Prequential:
    """Collects a day's logits (B, O) and their labels."""

    def __init__(self, features: Features) -> None:
        self.features = features
        self.parts: list[tuple[np.ndarray, ...]] = []

    def add(self, logits: Tensor, batch: Batch) -> None:
        """The logits of a batch from before the update on it."""
        tensors = (torch.sigmoid(logits), batch.labels, batch.known, batch.surface)
        self.parts.append(tuple(tensor.numpy() for tensor in tensors))

    def scores(self) -> dict[str, float]:
        """`ne_click_feed`, `auc_click_feed`, `calibration_click_feed`, … where both classes are."""
        if not self.parts:
            return {}
        p, labels, known, surface = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        found = score(p, labels, known, surface, self.features.surfaces, self.features.objectives)
        return {
            f"{name}_{s.objective}_{s.surface}": getattr(s, name)
            for s in found
            for name in ("ne", "auc", "calibration")
            if not np.isnan(s.ne)
        }
