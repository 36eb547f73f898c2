"""The value of a conversion by campaign, shrunk to that of all campaigns, and how sure it is.

C campaigns, m days of campaigns.
"""

import numpy as np
import numpy.typing as npt

from etl.array_types import Float64

SHRINKAGE = 20.0  # conversions that the mean value of all campaigns counts as


def value_per_conversion(
    campaign: npt.NDArray[np.intp], conversions: Float64, value: Float64, count: int
) -> tuple[Float64, Float64]:
    """Value (C) of a conversion, and the standard error (C) of its log, of days (m).

    The error is that of a mean of the campaign's conversions and of SHRINKAGE ones of all
    campaigns. How values vary between conversions is the same share of the mean in all campaigns,
    and is estimated from days; how means vary between campaigns, from campaigns.
    """
    totals, values = (
        np.bincount(campaign, column, count).astype(float) for column in (conversions, value)
    )
    mean = values.sum() / max(totals.sum(), 1e-12)
    shrunk = (values + SHRINKAGE * mean) / (totals + SHRINKAGE)
    if not mean > 0:
        return shrunk, np.zeros(count)
    within = _variance_of_conversions(campaign, conversions, value, totals, values)
    between = _variance_of_campaigns(totals, values, mean, within)
    own = totals / (totals + SHRINKAGE)
    prior = (1 - own) * mean / np.maximum(shrunk, 1e-12 * mean)
    return shrunk, np.sqrt(own**2 * within / np.maximum(totals, 1e-12) + prior**2 * between)


def _variance_of_conversions(
    campaign: npt.NDArray[np.intp],
    conversions: Float64,
    value: Float64,
    totals: Float64,
    values: Float64,
) -> float:
    """Variance of the value of a conversion over the squared mean of its campaign."""
    means = values / np.maximum(totals, 1e-12)
    is_known = (conversions > 0) & (means[campaign] > 0)
    number, of_day = conversions[is_known], campaign[is_known]
    freedom = len(number) - len(np.unique(of_day))
    if freedom <= 0:
        return 0.0
    ratio = value[is_known] / (number * means[of_day])
    return float((number * (ratio - 1) ** 2).sum() / freedom)


def _variance_of_campaigns(totals: Float64, values: Float64, mean: float, within: float) -> float:
    """Variance of the campaigns' values of a conversion over the squared mean, by moments."""
    is_known = totals > 0
    number, ratio = totals[is_known], values[is_known] / (totals[is_known] * mean)
    scale = number.sum() - (number**2).sum() / number.sum()
    if scale <= 0:
        return 0.0
    noise = within * (ratio**2).mean() * (len(number) - 1)
    excess = (number * (ratio - 1) ** 2).sum() - noise
    return max(0.0, float(excess / scale))
