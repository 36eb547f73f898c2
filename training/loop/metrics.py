"""NE, AUC and calibration by surface and objective: torchrec's NE and calibration.

AUC is scikit-learn's: torchrec's depends on the order of rows with equal predictions.

NE is the logloss over the entropy of the base rate of the same rows (torchrec); 1.0 is a model
that knows the base rate and nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score
from torchrec.metrics.calibration import compute_calibration
from torchrec.metrics.ne import compute_cross_entropy, compute_ne

Floats = npt.NDArray[np.floating]
ETA = 1e-12


@dataclass(frozen=True)
class Score:
    """One model on the rows of one surface (or `all`) and one objective; logloss in nats."""

    surface: str
    objective: str
    rows: int
    positives: int
    ne: float
    logloss: float
    auc: float
    calibration: float


def score(
    predicted: Floats, labels: Floats, known: npt.NDArray[np.bool_], surface: npt.NDArray[np.int64],
    surfaces: Sequence[str], objectives: Sequence[str],
) -> list[Score]:  # fmt: skip
    """Scores of probabilities (B, O), for all surfaces together and for each; NaN if one-class."""
    scores = []
    for name, code in (("all", None), *((s, i) for i, s in enumerate(surfaces, 1))):
        here = np.ones(len(surface), bool) if code is None else surface == code
        for column, objective in enumerate(objectives):
            rows = here & known[:, column]
            if rows.any():
                scores.append(_one(name, objective, predicted[rows, column], labels[rows, column]))
    return scores


def mean_auc(group: npt.NDArray[np.int64], labels: Floats, predicted: Floats) -> float:
    """The mean of the AUC within each group that has both classes; NaN where none has."""
    _, of = np.unique(group, return_inverse=True)
    _, place = np.unique(np.stack((of, predicted), 1), axis=0, return_inverse=True)
    rows = np.bincount(of)
    rank = rankdata(place) - (rows.cumsum() - rows)[of]
    positives = np.bincount(of, labels)
    both = (positives > 0) & (positives < rows)
    above = np.bincount(of, rank * labels) - positives * (positives + 1) / 2
    pairs = positives * (rows - positives)
    return float((above[both] / pairs[both]).mean()) if both.any() else float("nan")


def _one(surface: str, objective: str, predicted: Floats, labels: Floats) -> Score:
    p = torch.from_numpy(np.clip(predicted, ETA, 1 - ETA).astype(np.float64))
    y = torch.from_numpy(labels.astype(np.float64))
    weight = torch.ones_like(y)
    positives, n = y.sum(), weight.sum()
    entropy = compute_cross_entropy(y, p, weight, ETA).sum()
    both = 0 < positives < n
    nan = float("nan")
    return Score(
        surface=surface,
        objective=objective,
        rows=int(n),
        positives=int(positives),
        ne=float(compute_ne(entropy, n, positives, n - positives, ETA)) if both else nan,
        logloss=float(entropy / n) * math.log(2),  # torchrec's is in bits
        auc=float(roc_auc_score(y, p)) if both else nan,
        calibration=float(compute_calibration(p.sum(), positives)) if both else nan,
    )
