"""Calibration of logits on days after training, strictly increasing to preserve the order."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from etl.array_types import Float32, Float64
from etl.spec.base import StrictModel

Labels = Float32
PRIOR_STRENGTH = 10  # the prior counts as this many positives
PROBABILITY_EPS = 1e-7


class PlattScaling(StrictModel):
    """sigmoid(slope * logit + intercept) (Platt, 1999); by default the identity on logits."""

    kind: Literal["platt"] = "platt"
    slope: float = 1.0
    intercept: float = 0.0

    def __call__(self, logits: Float64) -> Float64:
        """Calibrated probabilities, in the same order."""
        return sigmoid(self.slope * logits + self.intercept)


IDENTITY = PlattScaling()


def sigmoid(x: Float64) -> Float64:
    """The logistic function, without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def logit(p: Float64) -> Float64:
    """The logarithm of the odds, of probabilities clipped to PROBABILITY_EPS."""
    p = np.clip(p, PROBABILITY_EPS, 1 - PROBABILITY_EPS)
    return np.asarray(np.log(p) - np.log1p(-p))


def fit_platt(logits: Float64, labels: Labels, prior: PlattScaling = IDENTITY) -> PlattScaling:
    """Fit Platt scaling by maximum a posteriori; with few positives it stays near the prior.

    The slope, and the height at the mean logit of positives, have normal priors whose precision is
    that of PRIOR_STRENGTH rare positives. Returns the prior where labels are all equal or the
    fitted slope is not positive.
    """
    if not 0 < labels.sum() < len(labels):
        return prior
    from scipy.optimize import minimize  # not needed for serving

    center = float(logits[labels > 0].mean())
    x = logits - center
    prior_mean = np.array([prior.slope, prior.intercept + prior.slope * center])
    precision = PRIOR_STRENGTH * np.array([float(logits.var()), 1.0])

    def loss_and_gradient(parameters: Float64) -> tuple[float, Float64]:
        slope, height = parameters
        z = slope * x + height
        residual = sigmoid(z) - labels
        deviation = parameters - prior_mean
        log_loss = float((np.logaddexp(0, z) - labels * z).sum())
        gradient = np.array([residual @ x, residual.sum()]) + precision * deviation
        return log_loss + 0.5 * float(precision @ deviation**2), gradient

    slope, height = minimize(loss_and_gradient, prior_mean, jac=True, method="BFGS").x
    if slope <= 0:
        return prior
    return PlattScaling(slope=float(slope), intercept=float(height - slope * center))


def calibrate(
    calibrations: Mapping[str, PlattScaling],
    logits: Float64,
    objectives: Sequence[str],
) -> Float64:
    """Calibrated probabilities (…, O) of logits (…, O)."""
    return np.stack([calibrations[name](logits[..., i]) for i, name in enumerate(objectives)], -1)
