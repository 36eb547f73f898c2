"""Probabilities of simulated impressions at the served position, compared with the true ones there.

The simulator's truth is at the logged positions; its effect of a position on the logits is known.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.studies.refit_predictions import ServedRows
from etl.array_types import Float64
from etl.simulator.ads import CLICK_POSITION, LONG_VIEW_POSITION
from etl.simulator.config import SURFACES
from etl.spec.model import DataSpec
from ranking.report.data import true_probabilities
from ranking.scoring.calibration import logit, sigmoid


def true_at_served_position(rows: ServedRows, spec: DataSpec, surface: str, raw: Path) -> Float64:
    """The true probabilities (n, O) of served rows, had they been at the served position."""
    predictions = rows.predictions.predictions
    truth = true_probabilities(predictions, str(raw))
    assert truth is not None and spec.position_bias is not None
    assert (truth.impression_ids == predictions.impression_ids).all()
    logged, position = truth.probabilities, rows.positions
    moved = position - spec.position_bias.served_position
    column = {name: i for i, name in enumerate(predictions.objectives)}
    click_effect = CLICK_POSITION[SURFACES.index(surface)]
    at_served = logged.copy()
    for name, effect in (("click", click_effect), ("long_view", LONG_VIEW_POSITION)):
        at_served[:, column[name]] = sigmoid(logit(logged[:, column[name]]) - effect * moved)
    clicks = at_served[:, column["click"]] / logged[:, column["click"]]
    at_served[:, column["conversion"]] = logged[:, column["conversion"]] * clicks
    return at_served


def share_of_logged_outcomes(surfaces: Sequence[ServedRows], raw: Path) -> Float64:
    """Final positives over the true expectation (O): some outcomes are logged too late to count."""
    positives, expected = [], []
    for rows in surfaces:
        predictions = rows.predictions.predictions
        truth = true_probabilities(predictions, str(raw))
        assert truth is not None
        positives.append((predictions.labels * predictions.label_mask).sum(0))
        expected.append((truth.probabilities * predictions.label_mask).sum(0))
    return np.asarray(np.sum(positives, 0) / np.sum(expected, 0))
