"""P(class | labels of all providers), from audits that report only the classes of campaigns.

Campaigns are bought by the labels of some provider. Within a label of another provider, the people
of such a campaign are then not those of everyone with that label: P(class | label) differs by
campaign, and estimates of one provider alone are biased however many audits there are. Given the
labels of all providers, whom a campaign reached says no more about the class. Log-odds are sums
over providers, as they are for providers that are independent given the class; providers that
repeat each other share what they say.

    P(k | a_1 ... a_S) = softmax_k(log prior_k + sum_s b_s[a_s, k])
    expected share of k in campaign c = sum_n x_cn P(k | labels of combination n)

It is learning from label proportions; the problem is that of 1711.11175.

S providers, n combinations of labels, P labels of all providers, C campaigns, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etl.array_types import Float64, Int64
from etl.errors import UserError
from etl.spec.sections import UNKNOWN_LABEL

RIDGE = 0.1  # precision of the normal prior of each coefficient; with 1, intervals cover too little
NORMAL_95 = 1.959964  # standard errors on each side of a 95 % interval
MAX_CONDITION = 1000.0  # of the shares of labels: above it, errors are amplified as many times


@dataclass(frozen=True)
class CampaignAudits:
    """Campaigns as mixtures of combinations of labels, and what an auditor reports of them.

    Attributes:
        providers: Names of the providers (S).
        label_names: Names of the labels of each provider.
        labels: Index (n, S) of the label of each provider in a combination.
        mixtures: Shares (C, n) of the combinations among the impressions of each campaign.
        audited: Audited impressions (C, K) by class; fractions are allowed.
    """

    providers: tuple[str, ...]
    label_names: tuple[tuple[str, ...], ...]
    labels: Int64
    mixtures: Float64
    audited: Float64

    def one_hot_labels(self, provider: int) -> Float64:
        """One-hot labels (n, labels) of a provider."""
        return np.asarray(np.eye(len(self.label_names[provider]))[self.labels[:, provider]])

    @property
    def design(self) -> Float64:
        """One-hot labels (n, P) of all providers."""
        return np.concatenate([self.one_hot_labels(s) for s in range(len(self.providers))], 1)

    @property
    def prior(self) -> Float64:
        """Shares (K) of the classes among all audited impressions, half a one each more."""
        total = self.audited.sum(0) + 0.5
        return np.asarray(total / total.sum())

    def require_identifiable(self) -> None:
        """Raises UserError if no estimate can tell the labels of a provider apart.

        It names the labels, and the campaigns that would help.
        """
        for position, (provider, names) in enumerate(
            zip(self.providers, self.label_names, strict=True)
        ):
            _require_distinct(provider, names, self.mixtures @ self.one_hot_labels(position))

    def identified_directions(self, impressions: Float64) -> tuple[int, int]:
        """How many directions of the coefficients the audits identify, and of how many.

        All directions are those that change the log-odds of some of the impressions (n): labels of
        a provider that repeats another one add none. The prior decides along the others.
        """
        weights = np.sqrt(impressions / impressions.sum())[:, None]
        _, scales, directions = np.linalg.svd(weights * self.design, full_matrices=False)
        is_seen = scales > scales[0] / MAX_CONDITION
        unit = directions[is_seen].T / scales[is_seen]  # log-odds of root mean square 1
        by_campaign = np.linalg.svd(self.mixtures @ self.design @ unit, compute_uv=False)
        return int((by_campaign > by_campaign[0] / MAX_CONDITION).sum()), int(is_seen.sum())


def _require_distinct(provider: str, names: tuple[str, ...], shares: Float64) -> None:
    """Raises UserError if the shares (C, labels) of campaigns are too similar."""
    is_reached = np.asarray(shares.sum(0) > 0)
    names = tuple(name for name, reached in zip(names, is_reached, strict=True) if reached)
    shares = shares[:, is_reached]  # labels that no campaign reached are left to the prior
    if shares.shape[1] == 1:
        label = names[0]
        wanted = "whom it labels" if label == UNKNOWN_LABEL else f"with labels other than {label}"
        raise UserError(
            f"provider {provider} gave all people of the audited campaigns the label {label}, so "
            f"that nobody audited it: audit a campaign that reaches people {wanted}, or remove it "
            "from the audience's providers"
        )
    if len(shares) < shares.shape[1]:
        raise UserError(
            f"{len(shares)} audited campaigns cannot tell the {shares.shape[1]} labels of "
            f"{provider} apart: audit at least {shares.shape[1]} with different shares of labels"
        )
    # Rare labels have small shares everywhere, which makes them no harder to tell apart.
    _, singular, directions = np.linalg.svd(shares / np.linalg.norm(shares, axis=0))
    condition = float(singular[0] / max(singular[-1], np.finfo(float).tiny))
    if condition <= MAX_CONDITION:
        return
    weights = np.abs(directions[-1])
    mixed = [names[a] for a in np.argsort(-weights) if weights[a] >= weights.max() / 2]
    number = "infinite" if condition > 1e12 else f"{condition:,.0f}"
    raise UserError(
        f"the audited campaigns have too similar shares of the labels of {provider} (condition "
        f"number {number}, at most {MAX_CONDITION:.0f}): {', '.join(sorted(mixed))} cannot be "
        f"distinguished. Audit a campaign that reaches mostly people with the label {mixed[0]}"
    )


@dataclass(frozen=True)
class RateEstimate:
    """Estimated probabilities with their 95 % intervals, arrays of one shape.

    `prior_weight` is the variance of an estimate over that before the audits, on the logit: 0 where
    the audits decide, 1 where the prior does.
    """

    value: Float64
    low: Float64
    high: Float64
    prior_weight: Float64


@dataclass(frozen=True)
class AdditiveModel:
    """Coefficients (P, K), and the covariance (PK, PK) of their errors.

    `dispersion` is the variance of the audits over that of a multinomial, at least 1: impressions
    of one user have the same class, and campaigns may reach other people within labels.
    """

    audits: CampaignAudits
    coefficients: Float64
    covariance: Float64
    dispersion: float

    def class_probabilities(self) -> Float64:
        """P(class | labels) (n, K) of the combinations."""
        return _softmax(np.log(self.audits.prior) + self.audits.design @ self.coefficients)

    def in_target_rates(self, weights: Float64, columns: Sequence[int]) -> RateEstimate:
        """Shares (m) of the classes in `columns`, in mixtures (m, n) of the combinations.

        Intervals are by the delta method, on the logits of the shares.
        """
        probabilities = self.class_probabilities()
        is_target = np.isin(np.arange(probabilities.shape[1]), columns)
        rates = probabilities @ is_target  # (n)
        slopes = probabilities * (is_target - rates[:, None])  # of the rates by logits (n, K)
        design = self.audits.design
        gradient = np.einsum("mn,np,nk->mpk", weights, design, slopes, optimize=True)
        gradient = gradient.reshape(len(weights), -1)
        variance = np.einsum("mi,ij,mj->m", gradient, self.covariance, gradient, optimize=True)
        value = np.clip(weights @ rates, 1e-12, 1 - 1e-12)
        logit = np.log(value / (1 - value))
        error = NORMAL_95 * np.sqrt(variance) / (value * (1 - value))
        low, high = (1 / (1 + np.exp(-(logit + sign * error))) for sign in (-1, 1))
        of_prior = np.maximum((gradient**2).sum(1) / RIDGE, 1e-300)
        return RateEstimate(weights @ rates, low, high, variance / of_prior)

    def confusion(self, provider: int, impressions: Float64) -> RateEstimate:
        """P(class | label) (labels, K) of a provider, over impressions (n) by combination."""
        by_label = self.audits.one_hot_labels(provider).T * impressions  # (labels, n)
        by_label = by_label / by_label.sum(1, keepdims=True)
        columns = [self.in_target_rates(by_label, [k]) for k in range(len(self.audits.prior))]
        return RateEstimate(
            *(
                np.stack([getattr(column, name) for column in columns], 1)
                for name in ("value", "low", "high", "prior_weight")
            )
        )


def fit_additive(audits: CampaignAudits) -> AdditiveModel:
    """Fit by maximum a posteriori; audited impressions of a campaign are multinomial.

    Raises UserError if the audits cannot tell the labels of a provider apart.
    """
    from scipy.optimize import minimize

    audits.require_identifiable()
    design, log_prior, audited = audits.design, np.log(audits.prior), audits.audited
    shape = design.shape[1], audited.shape[1]

    def loss_and_gradient(flat: Float64) -> tuple[float, Float64]:
        coefficients = flat.reshape(shape)
        probabilities = _softmax(log_prior + design @ coefficients)
        shares = np.maximum(audits.mixtures @ probabilities, 1e-300)
        slope = audits.mixtures.T @ (audited / shares)
        of_logits = probabilities * (slope - (probabilities * slope).sum(1, keepdims=True))
        loss = RIDGE / 2 * (coefficients**2).sum() - (audited * np.log(shares)).sum()
        return float(loss), (RIDGE * coefficients - design.T @ of_logits).ravel()

    start = np.zeros(shape[0] * shape[1])
    options = {"maxiter": 2000, "maxfun": 4000}
    best = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=options).x
    probabilities = _softmax(log_prior + design @ best.reshape(shape))
    information = _fisher_information(audits, probabilities)
    ridge = RIDGE * np.eye(len(best))
    num_fitted = float(np.trace(np.linalg.solve(information + ridge, information)))
    dispersion = _dispersion(audits, audits.mixtures @ probabilities, num_fitted)
    covariance = np.asarray(np.linalg.inv(information / dispersion + ridge), np.float64)
    return AdditiveModel(audits, best.reshape(shape), covariance, dispersion)


def _dispersion(audits: CampaignAudits, shares: Float64, num_fitted: float) -> float:
    """Pearson's statistic of the audits over its degrees of freedom, at least 1."""
    expected = np.maximum(audits.audited.sum(1, keepdims=True) * shares, 1e-300)
    statistic = float(((audits.audited - expected) ** 2 / expected).sum())
    campaigns, classes = audits.audited.shape
    freedom = campaigns * (classes - 1) - num_fitted
    return max(1.0, statistic / freedom) if freedom > 0 else 1.0


def _fisher_information(audits: CampaignAudits, probabilities: Float64) -> Float64:
    """The expected information (PK, PK) of the coefficients, given P(class | labels) (n, K)."""
    design, classes = audits.design, probabilities.shape[1]
    shares = np.maximum(audits.mixtures @ probabilities, 1e-300)
    counts = audits.audited.sum(1)
    size = design.shape[1] * classes
    information = np.zeros((size, size))
    for k in range(classes):
        weighted = audits.mixtures * probabilities[:, k]  # (C, n)
        jacobian = -np.einsum("cn,nj,np->cpj", weighted, probabilities, design, optimize=True)
        jacobian[:, :, k] += weighted @ design
        flat = jacobian.reshape(len(counts), size)
        information += flat.T @ (flat * (counts / shares[:, k])[:, None])
    return information


def _softmax(logits: Float64) -> Float64:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))
