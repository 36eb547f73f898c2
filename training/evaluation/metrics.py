"""Normalized entropy (NE), AUC and calibration by surface and objective.

NE is the logloss over the entropy of the base rate of the same rows; 1.0 is a model that predicts
the base rate. NE and calibration are computed by torchrec, AUC by scikit-learn, because the AUC of
torchrec depends on the order of rows with equal predictions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torchrec.metrics.calibration import compute_calibration
from torchrec.metrics.ne import compute_cross_entropy, compute_ne

from etl.array_types import Bools, Floats, Int64
from features.schema import FeatureSchema
from training.data.batch import Batch
from training.evaluation.predictions import Predictions
from training.model.gem import GemOutput
from training.trainer.step import Loss

ETA = 1e-12
READ_EVERY = 64  # steps between readings of outputs from the device


@dataclass(frozen=True)
class SliceMetrics:
    """Metrics of one model on one surface (or `all`) and one objective; logloss in nats."""

    surface: str
    objective: str
    rows: int
    positives: int
    ne: float
    logloss: float
    auc: float
    calibration: float


def slice_metrics(
    predicted: Floats,
    labels: Floats,
    label_mask: Bools,
    surface: Int64,
    surfaces: Sequence[str],
    objectives: Sequence[str],
) -> list[SliceMetrics]:
    """Metrics of probabilities (B, O), over all surfaces and by surface (B, codes from 1).

    Slices without rows are omitted; NE, AUC and calibration are NaN if all labels are equal.
    """
    slices = {"all": np.ones(len(surface), bool)}
    slices |= {name: surface == code for code, name in enumerate(surfaces, 1)}
    metrics = []
    for name, in_slice in slices.items():
        for column, objective in enumerate(objectives):
            rows = in_slice & label_mask[:, column]
            if rows.any():
                p, y = predicted[rows, column], labels[rows, column]
                metrics.append(_slice_metrics(name, objective, p, y))
    return metrics


def score_predictions(predictions: Predictions, surfaces: Sequence[str] = ()) -> list[SliceMetrics]:
    """Metrics of predictions over all surfaces, and by surface if their names are given."""
    return slice_metrics(
        predictions.probabilities,
        predictions.labels,
        predictions.label_mask,
        predictions.surface,
        surfaces,
        predictions.objectives,
    )


def ne_by_objective(predictions: Predictions) -> dict[str, float]:
    """NE of each objective over all surfaces."""
    return {part.objective: part.ne for part in score_predictions(predictions)}


def mean_group_auc(group: Int64, labels: Floats, predicted: Floats) -> float:
    """The mean AUC over the groups with both classes; NaN if there are none."""
    _, group = np.unique(group, return_inverse=True)
    _, position = np.unique(np.stack((group, predicted), 1), axis=0, return_inverse=True)
    rows = np.bincount(group)
    rank = rankdata(position) - (rows.cumsum() - rows)[group]
    positives = np.bincount(group, labels)
    has_both = (positives > 0) & (positives < rows)
    if not has_both.any():
        return float("nan")
    # Mann-Whitney: pairs of a positive and a negative in which the positive ranks higher.
    concordant = np.bincount(group, rank * labels) - positives * (positives + 1) / 2
    pairs = positives * (rows - positives)
    return float((concordant[has_both] / pairs[has_both]).mean())


def _slice_metrics(surface: str, objective: str, predicted: Floats, labels: Floats) -> SliceMetrics:
    p = torch.from_numpy(np.clip(predicted, ETA, 1 - ETA).astype(np.float64))
    y = torch.from_numpy(labels.astype(np.float64))
    weight = torch.ones_like(y)
    positives, n = y.sum(), weight.sum()
    entropy = compute_cross_entropy(y, p, weight, ETA).sum()
    has_both = 0 < positives < n
    nan = float("nan")
    return SliceMetrics(
        surface=surface,
        objective=objective,
        rows=int(n),
        positives=int(positives),
        ne=float(compute_ne(entropy, n, positives, n - positives, ETA)) if has_both else nan,
        logloss=float(entropy / n) * math.log(2),  # torchrec uses bits
        auc=float(roc_auc_score(y, p)) if has_both else nan,
        calibration=float(compute_calibration(p.sum(), positives)) if has_both else nan,
    )


class PrequentialMetrics:
    """Metrics of predictions that were made before the update on their batch.

    They need no additional pass over the data and show whether training is healthy. They cover the
    batches and sampled rows of this process, with dropout and without averaged weights; use
    `gemline train evaluate` for an evaluation.
    """

    def __init__(self, features: FeatureSchema, loss: Loss) -> None:
        self.features = features
        self.loss = loss
        self.parts: list[tuple[npt.NDArray[Any], ...]] = []
        self._on_device: list[tuple[Tensor, ...]] = []

    def update(self, output: GemOutput, batch: Batch) -> None:
        """Add the output of a batch, computed before the update on it."""
        logits = self.loss.sampled_logits(output.logits.detach())
        expected = (
            output.value_distribution.expected_value(logits).detach()
            if output.value_distribution
            else logits.new_zeros(())
        )
        tensors = (
            torch.sigmoid(logits),
            batch.labels,
            batch.label_mask,
            batch.surface,
            expected.expand_as(logits),
            batch.outcome_values,
        )
        self._on_device.append(tensors)
        if len(self._on_device) >= READ_EVERY:
            self._read()

    def _read(self) -> None:
        """Bring what was added since the last time to the host, which waits for the device."""
        if self._on_device:
            columns = zip(*self._on_device, strict=True)
            self.parts.append(tuple(torch.cat(column).cpu().numpy() for column in columns))
            self._on_device.clear()

    def compute(self) -> dict[str, float]:
        """The metrics by name, such as `ne_click_feed`, `auc_click_feed`, `calibration_click_feed`.

        Slices without both classes are omitted. `value_conversion` is the ratio of the
        expected to the actual value.
        """
        self._read()
        if not self.parts:
            return {}
        p, labels, mask, surface, expected, values = (
            np.concatenate(arrays) for arrays in zip(*self.parts, strict=True)
        )
        objectives = self.features.objectives
        metrics: dict[str, float] = {}
        expected_sums, value_sums = (expected * mask).sum(0), (values * mask).sum(0)
        for name, expected_sum, value_sum in zip(
            objectives, expected_sums, value_sums, strict=True
        ):
            if expected_sum and value_sum:
                metrics[f"value_{name}"] = float(expected_sum / value_sum)
        for part in slice_metrics(p, labels, mask, surface, self.features.surfaces, objectives):
            if not np.isnan(part.ne):
                metrics[f"ne_{part.objective}_{part.surface}"] = part.ne
                metrics[f"auc_{part.objective}_{part.surface}"] = part.auc
                metrics[f"calibration_{part.objective}_{part.surface}"] = part.calibration
        return metrics
