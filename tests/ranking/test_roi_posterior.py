"""The Laplace posterior of response curves is that of a Metropolis sampler."""

import numpy as np
import pytest

from etl.array_types import Float64
from ranking.roi.curves import (
    FIXED_PRECISION,
    LOG_HALF_PRIOR,
    LOG_HALF_PRIOR_PRECISION,
    CampaignDays,
    _design,
    _MixedModel,
)
from tests.ranking.campaigns import SCALES, market

DEVIATIONS = np.array([0.3, 0.4])
STEPS, BURN_IN = 40_000, 5_000


def log_likelihood(days: CampaignDays, curves: Float64, log_ratio: Float64) -> Float64:
    """Log likelihood (C) of levels and log half-saturations (C, 2), up to a constant."""
    level, log_half = curves[days.campaign].T
    rate = level + log_ratio - np.logaddexp(log_ratio, log_half) + np.logaddexp(0, log_half)
    by_day = days.conversions * rate - np.exp(rate)
    return np.bincount(days.campaign, by_day, len(curves)).astype(float)


def metropolis(days: CampaignDays, model: _MixedModel, seed: int) -> Float64:
    """Draws (draws, C, 2) of curves: Metropolis steps of each, and Gibbs steps of what they share.

    Given the coefficients of x, curves are independent; given curves, coefficients are normal.
    """
    rng, x = np.random.default_rng(seed), model.x
    log_ratio = np.log(days.spend / days.reference[days.campaign])
    prior_precision = np.array([FIXED_PRECISION, LOG_HALF_PRIOR_PRECISION])
    prior_mean = np.zeros_like(model.fixed)
    prior_mean[:, 0] = model.prior_mean[0, 0], LOG_HALF_PRIOR
    precision = [
        x.T @ x / s**2 + p * np.eye(x.shape[1])
        for s, p in zip(DEVIATIONS, prior_precision, strict=True)
    ]
    factors = [np.linalg.cholesky(np.linalg.inv(matrix)) for matrix in precision]
    proposal = 1.5 * np.linalg.cholesky(model.random_covariance)
    fixed, curves = model.fixed.copy(), model.curves(1.0).mean.copy()
    likelihood, kept = log_likelihood(days, curves, log_ratio), []
    for step in range(STEPS):
        prior = x @ fixed.T
        proposed = curves + np.einsum("cij,cj->ci", proposal, rng.standard_normal(curves.shape))
        new = log_likelihood(days, proposed, log_ratio)
        squares = (((curves - prior) ** 2 - (proposed - prior) ** 2) / DEVIATIONS**2).sum(1) / 2
        accepted = np.log(rng.random(len(curves))) < new - likelihood + squares
        curves = np.where(accepted[:, None], proposed, curves)
        likelihood = np.where(accepted, new, likelihood)
        for k in range(2):
            right = x.T @ curves[:, k] / DEVIATIONS[k] ** 2 + prior_precision[k] * prior_mean[k]
            mean = np.linalg.solve(precision[k], right)
            fixed[k] = mean + factors[k] @ rng.standard_normal(len(mean))
        if step >= BURN_IN and step % 5 == 0:
            kept.append(curves)
    return np.array(kept)


@pytest.mark.proof
def test_laplace_means_and_deviations_are_those_of_a_metropolis_sampler() -> None:
    """A week of campaigns of a few and of hundreds of conversions a day."""
    days, _, _ = market(0, days=7)
    model = _MixedModel(days, _design(days))
    model.solve(DEVIATIONS, 1.0)
    laplace, draws = model.curves(1.0), metropolis(days, model, 0)
    deviation = np.sqrt(np.diagonal(laplace.covariance, axis1=1, axis2=2))
    shift = (draws.mean(0) - laplace.mean) / deviation
    ratio = draws.std(0) / deviation
    assert np.abs(shift).max() < 0.3
    assert ratio.min() > 0.85 and ratio.max() < 1.2
    low, high = laplace.interval(1.3 * SCALES)
    level, log_half = np.moveaxis(draws, 2, 0)
    log_ratio = np.log(1.3 * SCALES / days.reference)
    rate = level + log_ratio - np.logaddexp(log_ratio, log_half) + np.logaddexp(0, log_half)
    drawn = [laplace.draw(np.random.default_rng(seed)) for seed in range(2000)]
    total = [
        np.exp(curves.log_conversions(1.3 * SCALES)[0])[SCALES == 20].sum() for curves in drawn
    ]
    sampled = np.exp(rate)[:, SCALES == 20].sum(1)  # of small campaigns, whose errors are shared
    assert np.std(np.log(total)) == pytest.approx(np.std(np.log(sampled)), rel=0.1)
    inside = ((np.log(low) <= rate) & (rate <= np.log(high))).mean(0)
    assert inside.min() > 0.93 and inside.max() < 0.97
