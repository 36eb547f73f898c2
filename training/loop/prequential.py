"""Scores of predictions that were made before each update: a sign of life, free with one pass.

They are of this process's batches, with dropout, by weights that are not averaged, on the rows that
were learned from: an evaluation is done with `gemline train evaluate`.
"""

import numpy as np
import torch

from features.inputs import Features
from training.data.batch import Batch
from training.loop.loss import Loss
from training.loop.metrics import score
from training.model.gem import Output


class Prequential:
    """Collects what a day's batches were predicted to be, and what they were."""

    def __init__(self, features: Features, loss: Loss) -> None:
        self.features = features
        self.loss = loss
        self.parts: list[tuple[np.ndarray, ...]] = []

    def add(self, output: Output, batch: Batch) -> None:
        """What was put out for a batch before the update on it."""
        logits = self.loss.among(output.logits.detach())
        expected = output.worth.expected(logits).detach() if output.worth else logits.new_zeros(())
        told = batch.labels, batch.known, batch.surface, expected.expand_as(logits), batch.values
        self.parts.append(tuple(t.numpy() for t in (torch.sigmoid(logits), *told)))

    def scores(self) -> dict[str, float]:
        """`ne_click_feed`, `auc_click_feed`, `calibration_click_feed`, … where both classes are.

        And `value_conversion`, the sum of the values that were expected over that of the real ones.
        """
        if not self.parts:
            return {}
        p, labels, known, surface, expected, values = (
            np.concatenate(part) for part in zip(*self.parts, strict=True)
        )
        found = score(p, labels, known, surface, self.features.surfaces, self.features.objectives)
        worth = {
            f"value_{name}": float((expected * known)[:, i].sum() / (values * known)[:, i].sum())
            for i, name in enumerate(self.features.objectives)
            if (expected * known)[:, i].any() and (values * known)[:, i].any()
        }
        return worth | {
            f"{name}_{s.objective}_{s.surface}": getattr(s, name)
            for s in found
            for name in ("ne", "auc", "calibration")
            if not np.isnan(s.ne)
        }
