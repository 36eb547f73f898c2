"""Response curves of campaigns: conversions by daily spend, with what campaigns share.

    conversions_cd ~ Poisson(arrived_cd exp(level_c + log hill(r_cd, k_c) - log hill(1, k_c)))
    hill(r, k) = r / (r + k),  r_cd = spend_cd / reference_c,  k_c = exp(log_half_c)
    level_c = x_c g + u_c,  log_half_c = x_c h + v_c,  u_c ~ N(0, su^2),  v_c ~ N(0, sv^2)

`level` is the log of the daily conversions at the reference spend, where the elasticity is
k / (1 + k). At k times the reference spend (half-saturation) a campaign has half of the conversions
that it can have at most. x_c are an intercept, the log of the reference spend (the
scale of the budget) and the campaign's groups. A campaign with few conversions has the curve of its
groups and scale, and moves away from it as its own evidence grows (empirical Bayes: su and sv are
estimated; the posterior is normal at its mode).

C campaigns, n days of campaigns, p columns of x.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from etl.array_types import Float64, Int64
from etl.errors import UserError

ITERATIONS, TOLERANCE = 100, 1e-6  # of the mode
UPDATES, UPDATE_TOLERANCE = 50, 0.01  # of the standard deviations, relative
INITIAL_SD = 0.5, 0.5  # of levels and log half-saturations
MIN_SD = 0.02
UNSHARED_SD = 5.0, 1.5
FIXED_PRECISION = 0.04  # of the coefficients of x: a standard deviation of 5
LOG_HALF_PRIOR = 0.85  # mean of the intercept of h: an elasticity of 0.7, returns diminish
LOG_HALF_PRIOR_PRECISION = 1.0
MAX_STEP = 2.0  # of a coefficient, in an iteration


@dataclass(frozen=True)
class CampaignDays:
    """Days of campaigns, and what campaigns have in common.

    Attributes:
        campaigns: Names (C).
        groups: Groups (C, g) of each campaign, such as vertical, objective and surface.
        campaign: Campaign (n) of each day.
        spend: Spend (n), above 0.
        conversions: Conversions (n) that have arrived.
        arrived: Share (n) of the day's conversions that can have arrived by now.
    """

    campaigns: tuple[str, ...]
    groups: npt.NDArray[np.str_]
    campaign: Int64
    spend: Float64
    conversions: Float64
    arrived: Float64

    @property
    def reference(self) -> Float64:
        """The geometric mean (C) of a campaign's daily spend."""
        days = np.bincount(self.campaign, minlength=len(self.campaigns))
        sums = np.bincount(self.campaign, np.log(self.spend), len(self.campaigns))
        return np.asarray(np.exp(sums / np.maximum(days, 1)))


@dataclass(frozen=True)
class ResponseCurves:
    """The curves of campaigns: means and covariances of level and log_half.

    Attributes:
        reference: Spend (C) at which `level` is the log of the daily conversions.
        mean: Level and log_half (C, 2).
        own_covariance: Of both (C, 2, 2), if what campaigns share were known.
        shared_factor: Changes of both (C, 2, q) by q independent standard normal variables: the
            errors of what campaigns share.
        dispersion: Variance of conversions over that of a Poisson, at least 1.
    """

    campaigns: tuple[str, ...]
    reference: Float64
    mean: Float64
    own_covariance: Float64
    shared_factor: Float64
    dispersion: float

    @property
    def covariance(self) -> Float64:
        """The covariance (C, 2, 2) of a campaign's level and log_half."""
        return self.own_covariance + self.shared_factor @ self.shared_factor.swapaxes(1, 2)

    def log_conversions(self, spend: Float64) -> tuple[Float64, Float64]:
        """Mean and standard deviation (C) of the log of expected daily conversions."""
        log_ratio = np.log(spend / self.reference)
        level, log_half = self.mean.T
        basis = _slopes(log_ratio, log_half)
        mean = level + _log_hill(log_ratio, log_half)
        variance = np.einsum("ci,cij,cj->c", basis, self.covariance, basis)
        return mean, np.sqrt(np.maximum(variance, 0))

    def interval(self, spend: Float64, z: float = 1.959964) -> tuple[Float64, Float64]:
        """The 95 % interval (C) of expected daily conversions."""
        mean, deviation = self.log_conversions(spend)
        return np.exp(mean - z * deviation), np.exp(mean + z * deviation)

    def draw(self, rng: np.random.Generator) -> "ResponseCurves":
        """One draw of all curves from their posterior, for Thompson sampling."""
        own_factor = np.linalg.cholesky(self.own_covariance + 1e-12 * np.eye(2))
        own = own_factor @ rng.standard_normal((len(self.campaigns), 2, 1))
        shared = self.shared_factor @ rng.standard_normal(self.shared_factor.shape[2])
        return replace(
            self,
            mean=self.mean + own[..., 0] + shared,
            own_covariance=np.zeros_like(self.own_covariance),
            shared_factor=np.zeros_like(self.shared_factor),
        )


def fit_curves(days: CampaignDays, shared: bool = True) -> ResponseCurves:
    """The curves of all campaigns; not `shared`, each campaign is fitted by itself.

    Raises UserError if there are no conversions.
    """
    if not days.conversions.sum() > 0:
        raise UserError("no campaign has a conversion: response curves need some")
    x = _design(days)
    model = _MixedModel(days, x)
    deviations = np.array(INITIAL_SD if shared else UNSHARED_SD)
    dispersion = 1.0
    for _ in range(UPDATES):
        model.solve(deviations, dispersion)
        dispersion = model.dispersion()
        if not shared:
            break
        new = np.maximum(model.effect_deviations(), MIN_SD)
        converged = np.abs(np.log(new / deviations)).max() < UPDATE_TOLERANCE
        deviations = new
        if converged:
            break
    model.solve(deviations, dispersion)
    return model.curves(dispersion)


def _design(days: CampaignDays) -> Float64:
    """X (C, p): intercept, log of the reference spend, and groups, centered."""
    scale = np.log(np.maximum(days.reference, 1e-12))
    columns = [scale - scale.mean()]
    for group in days.groups.T:
        names = np.unique(group)
        columns += [(group == name) - float(np.mean(group == name)) for name in names[1:]]
    return np.stack([np.ones(len(days.campaigns)), *columns], 1)


class _MixedModel:
    """Fisher scoring for the mode of g, h (2p) and u, v (C, 2), and the covariance there."""

    def __init__(self, days: CampaignDays, x: Float64) -> None:
        self.days, self.x = days, x
        self.log_ratio = np.log(days.spend / days.reference[days.campaign])
        # Fixed effects: (level, log_half) x columns of x.
        rate = days.conversions.sum() / max(days.arrived.sum(), 1e-12)
        self.fixed = np.zeros((2, x.shape[1]))
        self.fixed[:, 0] = np.log(max(rate, 1e-6)), LOG_HALF_PRIOR
        self.prior_mean = np.zeros_like(self.fixed)
        self.prior_mean[:, 0] = np.log(max(rate, 1e-6)), LOG_HALF_PRIOR
        self.prior_precision = np.full_like(self.fixed, FIXED_PRECISION)
        self.prior_precision[1] = LOG_HALF_PRIOR_PRECISION
        self.random = np.zeros((len(x), 2))
        self.random_covariance = np.zeros((len(x), 2, 2))
        self.own_covariance: Float64 = np.zeros((len(x), 2, 2))
        self.shared_factor: Float64 = np.zeros((len(x), 2, self.fixed.size))

    def expected(self) -> Float64:
        """Expected conversions (n)."""
        level, log_half = (self.x @ self.fixed.T + self.random)[self.days.campaign].T
        log_rate = level + _log_hill(self.log_ratio, log_half)
        return np.asarray(self.days.arrived * np.exp(np.clip(log_rate, -30, 30)))

    def solve(self, deviations: Float64, dispersion: float) -> None:
        """Find the mode for given standard deviations of u and v."""
        count, precision = len(self.x), np.diag(deviations**-2.0)
        p2 = self.fixed.size
        for _ in range(ITERATIONS):
            mean = self.expected()
            weight, residual = mean / dispersion, (self.days.conversions - mean) / dispersion
            log_half = (self.x @ self.fixed.T + self.random)[self.days.campaign, 1]
            basis = _slopes(self.log_ratio, log_half)  # (n, 2)
            outer = np.einsum("n,ni,nj->nij", weight, basis, basis)
            blocks = np.zeros((count, 2, 2))
            np.add.at(blocks, self.days.campaign, outer)
            slope = np.zeros((count, 2))
            np.add.at(slope, self.days.campaign, residual[:, None] * basis)
            # Gradient and Hessian: fixed effects act on a campaign's curve through x.
            gradient_random = slope - self.random @ precision
            gradient_fixed = slope.T @ self.x - self.prior_precision * (
                self.fixed - self.prior_mean
            )
            inner = np.linalg.inv(blocks + precision)  # (C, 2, 2)
            hessian = np.einsum("cij,cp,cq->ipjq", blocks, self.x, self.x).reshape(p2, p2)
            hessian += np.diag(self.prior_precision.ravel())
            cross = np.einsum("cij,cp->cipj", blocks, self.x).reshape(count, p2, 2)
            reduced = hessian - np.einsum("cab,cbd,ced->ae", cross, inner, cross, optimize=True)
            right = gradient_fixed.ravel() - np.einsum(
                "cab,cbd,cd->a", cross, inner, gradient_random
            )
            step_fixed = np.linalg.solve(reduced, right)
            step_random = np.einsum(
                "cij,cj->ci", inner, gradient_random - np.einsum("cab,a->cb", cross, step_fixed)
            )
            largest = max(np.abs(step_fixed).max(), np.abs(step_random).max())
            scale = min(1.0, MAX_STEP / largest) if largest > 0 else 1.0
            self.fixed = self.fixed + scale * step_fixed.reshape(self.fixed.shape)
            self.random = self.random + scale * step_random
            if largest < TOLERANCE:
                break
        fixed_covariance = np.linalg.inv(reduced)
        self.random_covariance = inner + np.einsum(
            "cij,caj,ab,cbk,ckl->cil", inner, cross, fixed_covariance, cross, inner, optimize=True
        )
        # Curve = x (fixed) + random, where the fixed effects also move the mean of random.
        on_curve = np.einsum("ij,cp->cijp", np.eye(2), self.x).reshape(count, 2, p2)
        through = on_curve - np.einsum("cij,caj->cia", inner, cross)
        self.own_covariance = np.asarray(inner, dtype=np.float64)
        self.shared_factor = np.asarray(
            through @ np.linalg.cholesky(fixed_covariance), dtype=np.float64
        )

    def effect_deviations(self) -> Float64:
        """Standard deviations of u and v by expectation maximization."""
        variances = self.random**2 + np.diagonal(self.random_covariance, axis1=1, axis2=2)
        return np.asarray(np.sqrt(variances.mean(0)))

    def dispersion(self) -> float:
        """Pearson's statistic over its degrees of freedom, at least 1."""
        mean = np.maximum(self.expected(), 1e-12)
        statistic = float(((self.days.conversions - mean) ** 2 / mean).sum())
        freedom = len(mean) - len(self.x)
        return max(1.0, statistic / freedom) if freedom > 0 else 1.0

    def curves(self, dispersion: float) -> ResponseCurves:
        """The curves at the mode."""
        return ResponseCurves(
            self.days.campaigns,
            self.days.reference,
            self.x @ self.fixed.T + self.random,
            self.own_covariance,
            self.shared_factor,
            dispersion,
        )


def _log_hill(log_ratio: Float64, log_half: Float64) -> Float64:
    """log(hill(r, k) / hill(1, k)) of log r and log k."""
    return np.asarray(log_ratio - np.logaddexp(log_ratio, log_half) + np.logaddexp(0, log_half))


def _slopes(log_ratio: Float64, log_half: Float64) -> Float64:
    """Slopes (..., 2) of the log of conversions by level and log_half."""
    by_log_half = _sigmoid(log_half) - _sigmoid(log_half - log_ratio)
    return np.stack([np.ones_like(log_ratio), by_log_half], -1)


def _sigmoid(x: Float64) -> Float64:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))
