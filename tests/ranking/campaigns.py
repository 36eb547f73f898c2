"""Simulated campaigns with known response curves, and files of their days."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from etl.array_types import Float64
from ranking.roi.curves import CampaignDays, ResponseCurves, fit_curves

SCALES = np.repeat([20.0, 2000.0], 12)
COUNT = len(SCALES)


def true_conversions(spend: Float64, level: Float64, log_half: Float64) -> Float64:
    """Expected conversions of a campaign with spends of `SCALES` as the reference."""
    ratio = spend / SCALES
    return np.asarray(np.exp(level) * ratio * (1 + np.exp(log_half)) / (ratio + np.exp(log_half)))


def market(seed: int, days: int, spread: float = 0.4) -> tuple[CampaignDays, Float64, Float64]:
    """Days of campaigns of two scales and three verticals; levels, log half-saturations."""
    rng = np.random.default_rng(seed)
    vertical = rng.integers(0, 3, COUNT)
    level = np.log(SCALES / 8) + 0.4 * rng.standard_normal(3)[vertical]
    level += 0.2 * rng.standard_normal(COUNT)
    log_half = 0.6 + 0.3 * rng.standard_normal(COUNT)
    spends = SCALES[:, None] * np.exp(spread * rng.standard_normal((COUNT, days)))
    expected = np.stack([true_conversions(spends[:, d], level, log_half) for d in range(days)], 1)
    campaign_days = CampaignDays(
        tuple(f"c{c:02d}" for c in range(COUNT)),
        vertical[:, None].astype(str),
        np.repeat(np.arange(COUNT), days),
        spends.ravel(),
        rng.poisson(expected).ravel().astype(float),
        np.ones(COUNT * days),
    )
    return campaign_days, level, log_half


def some_curves(seed: int) -> tuple[ResponseCurves, Float64, Float64]:
    """Curves, values of a conversion, and current spends."""
    rng = np.random.default_rng(seed)
    curves = fit_curves(market(seed, days=5)[0])
    return curves, np.exp(rng.standard_normal(COUNT)), SCALES * np.exp(0.3 * rng.random(COUNT))


def write_campaign_days(path: Path, days: CampaignDays, **columns: object) -> Path:
    """Write a CSV file of campaign days; `columns` replace some, and None leaves one out."""
    count = len(days.spend) // COUNT
    rows = {
        "campaign": [days.campaigns[c] for c in days.campaign],
        "day": [f"2026-01-{d + 1:02d}" for _ in range(COUNT) for d in range(count)],
        "spend": days.spend,
        "conversions": days.conversions,
        "value": 12 * days.conversions,
        "vertical": [days.groups[c, 0] for c in days.campaign],
        "currency": ["EUR"] * len(days.spend),
    }
    table = {name: column for name, column in (rows | columns).items() if column is not None}
    pa_csv.write_csv(pa.table(table), path)
    return path
