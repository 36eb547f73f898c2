"""Calibration of logits on days after training: strictly increasing, so the order stays."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from etl.spec.base import Strict

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.float32]
Kind = Literal["platt", "isotonic"]
LEAST_POSITIVES = 20  # of an isotonic calibration
PRIOR_POSITIVES = 10  # as many positives a prior counts for
STEP_POSITIVES = 50  # of a step of an isotonic calibration: fewer say little
EDGE = 1e-7


class Platt(Strict):
    """sigmoid(slope * logit + intercept); the identity unless fitted (Platt, 1999)."""

    kind: Literal["platt"] = "platt"
    slope: float = 1.0
    intercept: float = 0.0

    def __call__(self, logits: Floats) -> Floats:
        """Calibrated probabilities, in the same order."""
        return sigmoid(self.slope * logits + self.intercept)


IDENTITY = Platt()


class Isotonic(Strict):
    """Steps of an isotonic fit of logits, joined by straight lines; beyond them of slope one."""

    kind: Literal["isotonic"] = "isotonic"
    given: tuple[float, ...] = Field(min_length=1)
    wanted: tuple[float, ...]

    def __call__(self, logits: Floats) -> Floats:
        """Calibrated probabilities, in the same order."""
        first, last = self.given[0], self.given[-1]
        outside = np.minimum(logits - first, 0) + np.maximum(logits - last, 0)
        return sigmoid(np.interp(logits, self.given, self.wanted) + outside)


Calibration = Annotated[Platt | Isotonic, Field(discriminator="kind")]


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def logit(p: Floats) -> Floats:
    """ln(p / (1 - p)), away from its poles."""
    p = np.clip(p, EDGE, 1 - EDGE)
    return np.asarray(np.log(p) - np.log1p(-p))


def fit(
    logits: Floats, labels: Labels, kind: Kind = "platt", prior: Platt | None = None
) -> Platt | Isotonic:
    """The best of a kind; few positives leave it near the prior, the identity by default."""
    found = fit_platt(logits, labels, prior or IDENTITY)
    enough = LEAST_POSITIVES <= labels.sum() <= len(labels) - LEAST_POSITIVES
    return fit_isotonic(logits, labels, found) if kind == "isotonic" and enough else found


def fit_platt(logits: Floats, labels: Labels, prior: Platt = IDENTITY) -> Platt:
    """Maximum a posteriori; the prior itself where there is no outcome, or the order would turn.

    The prior is a normal distribution of the slope and of the intercept at the mean logit of
    outcomes, as narrow as `PRIOR_POSITIVES` rare outcomes would make it.
    """
    if not 0 < labels.sum() < len(labels):
        return prior
    from scipy.optimize import minimize  # not for serving

    centre = float(logits[labels > 0].mean())
    x, spread = logits - centre, float(logits.var())
    start = np.array([prior.slope, prior.intercept + prior.slope * centre])
    weights = PRIOR_POSITIVES * np.array([spread, 1.0])

    def loss(at: Floats) -> tuple[float, Floats]:
        z = at[0] * x + at[1]
        off = sigmoid(z) - labels
        value = float((np.logaddexp(0, z) - labels * z).sum())
        from_prior = at - start
        gradient = np.array([off @ x, off.sum()]) + weights * from_prior
        return value + 0.5 * float(weights @ from_prior**2), gradient

    slope, height = minimize(loss, start, jac=True, method="BFGS").x
    if slope <= 0:
        return prior
    return Platt(slope=float(slope), intercept=float(height - slope * centre))


def fit_isotonic(logits: Floats, labels: Labels, fallback: Platt) -> Platt | Isotonic:
    """Steps of `STEP_POSITIVES` positives or more, pooled until they rise; else the fallback."""
    from sklearn.isotonic import IsotonicRegression

    order = np.argsort(logits, kind="stable")
    x, y = logits[order], labels[order].astype(np.float64)
    last = max(0, y.sum() // STEP_POSITIVES - 1)
    step = np.minimum((np.cumsum(y) - y) // STEP_POSITIVES, last).astype(np.int64)
    rows = np.bincount(step)
    centre, share = np.bincount(step, x) / rows, np.bincount(step, y) / rows
    risen = IsotonicRegression().fit(centre, share, sample_weight=rows).predict(centre)
    levels, first = np.unique(risen, return_index=True)
    if len(levels) < 2:
        return fallback
    pooled = np.add.reduceat(centre * rows, first) / np.add.reduceat(rows, first)
    return Isotonic(given=tuple(pooled), wanted=tuple(logit(levels)))


def apply(fitted: Mapping[str, Platt | Isotonic], logits: Floats, names: Sequence[str]) -> Floats:
    """Calibrated probabilities (…, O) of logits (…, O)."""
    return np.stack([fitted[name](logits[..., i]) for i, name in enumerate(names)], -1)
