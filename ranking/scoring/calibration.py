"""Calibration of logits on days after training, strictly increasing to preserve the order."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from etl.array_types import Float32, Float64
from etl.spec.base import StrictModel

Labels = Float32
CalibrationKind = Literal["platt", "isotonic"]
MIN_ISOTONIC_POSITIVES = 20  # positives and negatives; with fewer, Platt scaling is fitted
PRIOR_STRENGTH = 10  # the prior counts as this many positives
MIN_BIN_POSITIVES = 50  # per bin of an isotonic calibration
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


class IsotonicCalibration(StrictModel):
    """An isotonic fit interpolated linearly between knots, of slope one outside of them."""

    kind: Literal["isotonic"] = "isotonic"
    logit_knots: tuple[float, ...] = Field(min_length=1)
    calibrated_logits: tuple[float, ...]

    def __call__(self, logits: Float64) -> Float64:
        """Calibrated probabilities, in the same order."""
        first, last = self.logit_knots[0], self.logit_knots[-1]
        outside = np.minimum(logits - first, 0) + np.maximum(logits - last, 0)
        return sigmoid(np.interp(logits, self.logit_knots, self.calibrated_logits) + outside)


Calibration = Annotated[PlattScaling | IsotonicCalibration, Field(discriminator="kind")]


def sigmoid(x: Float64) -> Float64:
    """The logistic function, without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def logit(p: Float64) -> Float64:
    """The logarithm of the odds, of probabilities clipped to PROBABILITY_EPS."""
    p = np.clip(p, PROBABILITY_EPS, 1 - PROBABILITY_EPS)
    return np.asarray(np.log(p) - np.log1p(-p))


def fit_calibrator(
    logits: Float64,
    labels: Labels,
    kind: CalibrationKind = "platt",
    prior: PlattScaling | None = None,
) -> PlattScaling | IsotonicCalibration:
    """Fit a calibration; with few positives it stays near the prior, by default the identity."""
    platt = fit_platt(logits, labels, prior or IDENTITY)
    has_enough = MIN_ISOTONIC_POSITIVES <= labels.sum() <= len(labels) - MIN_ISOTONIC_POSITIVES
    return fit_isotonic(logits, labels, platt) if kind == "isotonic" and has_enough else platt


def fit_platt(logits: Float64, labels: Labels, prior: PlattScaling = IDENTITY) -> PlattScaling:
    """Fit Platt scaling by maximum a posteriori.

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


def fit_isotonic(
    logits: Float64, labels: Labels, fallback: PlattScaling
) -> PlattScaling | IsotonicCalibration:
    """Fit bins of MIN_BIN_POSITIVES positives or more, pooled until they increase.

    Returns the fallback where fewer than two bins are left.
    """
    from sklearn.isotonic import IsotonicRegression

    order = np.argsort(logits, kind="stable")
    x, y = logits[order], labels[order].astype(np.float64)
    last_bin = max(0, y.sum() // MIN_BIN_POSITIVES - 1)
    positives_before = np.cumsum(y) - y
    bins = np.minimum(positives_before // MIN_BIN_POSITIVES, last_bin).astype(np.int64)
    rows = np.bincount(bins)
    mean_logits, rates = np.bincount(bins, x) / rows, np.bincount(bins, y) / rows
    regression = IsotonicRegression().fit(mean_logits, rates, sample_weight=rows)
    levels, first_bin = np.unique(regression.predict(mean_logits), return_index=True)
    if len(levels) < 2:
        return fallback
    pooled_rows = np.add.reduceat(rows, first_bin)
    knots = np.add.reduceat(mean_logits * rows, first_bin) / pooled_rows
    return IsotonicCalibration(logit_knots=tuple(knots), calibrated_logits=tuple(logit(levels)))


def calibrate(
    calibrations: Mapping[str, PlattScaling | IsotonicCalibration],
    logits: Float64,
    objectives: Sequence[str],
) -> Float64:
    """Calibrated probabilities (…, O) of logits (…, O)."""
    return np.stack([calibrations[name](logits[..., i]) for i, name in enumerate(objectives)], -1)
