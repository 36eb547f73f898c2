"""Simulated users with a known class, labels of four data providers, and audits of campaigns.

S providers, A labels (the classes, and unknown), K classes, n combinations of labels, C campaigns.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from etl.array_types import Float64, Int64
from features.audience.additive import CampaignAudits

PROVIDERS = ("exact", "broad", "careless", "copy")
CLASSES = ("18-24", "25-34", "35-54", "55+")
UNKNOWN = "unknown"
LABELS = (*CLASSES, UNKNOWN)
SHARES = (0.4, 0.3, 0.2, 0.1)
ACCURACY, COVERAGE = (0.85, 0.6, 0.3, 0.7), (0.35, 0.8, 0.95, 0.6)
COPY_RATE = 0.7  # of the last provider, which repeats the second
SKEW = 1.5  # concentration of the Dirichlet distribution of wrong labels
CAMPAIGN_IMPRESSIONS, AUDITED = 4000, 500
BID_CONCENTRATION = 0.6


@dataclass(frozen=True)
class AudienceWorld:
    """Users (N): their class, and the label (N, S) of each provider."""

    rng: np.random.Generator
    classes: Int64
    labels: Int64

    @classmethod
    def draw(cls, seed: int, users: int = 200_000) -> "AudienceWorld":
        """Users whose labels are wrong in ways of each provider's own; the last one copies."""
        rng = np.random.default_rng(seed)
        classes = rng.choice(len(CLASSES), users, p=SHARES)
        stated: list[Int64] = []
        for accuracy in ACCURACY:
            wrong = rng.choice(len(CLASSES), users, p=rng.dirichlet(np.full(len(CLASSES), SKEW)))
            stated.append(np.where(rng.random(users) < accuracy, classes, wrong))
        stated[-1] = np.where(rng.random(users) < COPY_RATE, stated[1], stated[-1])
        is_known = rng.random((users, len(PROVIDERS))) < COVERAGE
        labels = np.where(is_known, np.stack(stated, 1), LABELS.index(UNKNOWN))
        return cls(rng, classes, labels)

    @cached_property
    def _combined(self) -> tuple[Int64, npt.NDArray[np.intp]]:
        combinations, index = np.unique(self.labels, axis=0, return_inverse=True)
        return combinations, index.ravel()

    @property
    def impressions(self) -> Float64:
        """Users (n) by combination of labels, each with one impression."""
        combinations, index = self._combined
        return np.bincount(index, minlength=len(combinations)).astype(float)

    def audits(self, campaigns: int) -> CampaignAudits:
        """Audits of campaigns, each of which bids by the labels of one provider."""
        combinations, index = self._combined
        mixtures = np.zeros((campaigns, len(combinations)))
        audited = np.zeros((campaigns, len(CLASSES)))
        for c in range(campaigns):
            bid = self.rng.dirichlet(np.full(len(LABELS), BID_CONCENTRATION))
            weight = bid[self.labels[:, self.rng.integers(len(PROVIDERS))]]
            reached = self.rng.choice(len(weight), CAMPAIGN_IMPRESSIONS, p=weight / weight.sum())
            mixtures[c] = np.bincount(index[reached], minlength=len(combinations))
            panel = self.classes[reached[:AUDITED]]
            audited[c] = np.bincount(panel, minlength=len(CLASSES))
        mixtures /= CAMPAIGN_IMPRESSIONS
        names = (LABELS,) * len(PROVIDERS)
        return CampaignAudits(PROVIDERS, names, combinations, mixtures, audited)

    def confusion(self, provider: int) -> Float64:
        """The true P(class | label) (A, K) of a provider."""
        joint = np.zeros((len(LABELS), len(CLASSES)))
        np.add.at(joint, (self.labels[:, provider], self.classes), 1)
        return np.asarray(joint / joint.sum(1, keepdims=True))


def proportional(audits: CampaignAudits, provider: int) -> Float64:
    """The obvious estimate: shares of each campaign, attributed to its labels in proportion."""
    weights = audits.mixtures @ audits.one_hot_labels(provider)
    shares = audits.audited / audits.audited.sum(1, keepdims=True)
    return np.asarray(weights.T @ shares / weights.sum(0)[:, None])


def least_squares(audits: CampaignAudits, provider: int) -> Float64:
    """P(class | label) (A, K) of one provider alone: least squares on the simplex."""
    from scipy.optimize import nnls

    weights = audits.mixtures @ audits.one_hot_labels(provider)
    shares = audits.audited / audits.audited.sum(1, keepdims=True)
    num_labels, num_classes = weights.shape[1], shares.shape[1]
    large = 1e3  # weight of the equations that the probabilities of a label sum to one
    sums = large * np.kron(np.eye(num_labels), np.ones(num_classes))
    system = np.concatenate((np.kron(weights, np.eye(num_classes)), sums))
    right = np.concatenate((shares.ravel(), np.full(num_labels, large)))
    solution, _ = nnls(system, right, maxiter=100 * system.shape[1])
    matrix = solution.reshape(num_labels, num_classes)
    return np.asarray(matrix / matrix.sum(1, keepdims=True))
