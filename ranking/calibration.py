"""Calibration of probabilities on days after training: monotone, so the order stays."""

import numpy as np
import numpy.typing as npt

from etl.spec.base import Strict
from training.predictions import Predictions

Floats = npt.NDArray[np.float64]
LEAST_POSITIVES = 20
EDGE = 1e-7


class Platt(Strict):
    """sigmoid(slope * logit(p) + intercept); the identity unless fitted (Platt, 1999)."""

    slope: float = 1.0
    intercept: float = 0.0

    def __call__(self, p: Floats) -> Floats:
        """Calibrated probabilities, in the same order."""
        return np.asarray(1 / (1 + np.exp(-(self.slope * logit(p) + self.intercept))))


def logit(p: Floats) -> Floats:
    """ln(p / (1 - p)), away from its poles."""
    p = np.clip(p, EDGE, 1 - EDGE)
    return np.asarray(np.log(p) - np.log1p(-p))


def fit_platt(p: Floats, labels: npt.NDArray[np.float32]) -> Platt:
    """The best Platt scaling; the identity for few positives or where it would turn the order."""
    if not LEAST_POSITIVES <= labels.sum() <= len(labels) - LEAST_POSITIVES:
        return Platt()
    from sklearn.linear_model import LogisticRegression  # seconds to import, and not for serving

    model = LogisticRegression(C=1e6).fit(logit(p)[:, None], labels)
    slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
    return Platt(slope=slope, intercept=intercept) if slope > 0 else Platt()


def fit(predictions: Predictions) -> dict[str, Platt]:
    """A calibration for each objective."""
    fitted = {}
    for i, name in enumerate(predictions.objectives):
        known = predictions.known[:, i]
        fitted[name] = fit_platt(predictions.probability[known, i], predictions.labels[known, i])
    return fitted


def apply(fitted: dict[str, Platt], probability: Floats, objectives: tuple[str, ...]) -> Floats:
    """Calibrated probabilities (B, O)."""
    return np.stack([fitted[name](probability[:, i]) for i, name in enumerate(objectives)], 1)
