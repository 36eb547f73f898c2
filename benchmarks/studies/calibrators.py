"""Calibrators that are compared prequentially: none, an intercept, offsets by segment, and MCGrad.

Each turns the probabilities of served rows into calibrated ones, hour by hour, from rows whose
labels were final before the hour. MCGrad (2509.19884; parameters of package `mcgrad` 0.1.5)
boosts trees on the segments and on the logit itself in rounds, and is fitted once a day.

n rows, O objectives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.studies.refit_predictions import ServedRows, ServingLog
from etl.array_types import Bools, Float64, Int64
from ranking.inputs.segments import SegmentValues
from ranking.scoring.calibration import Labels, logit, sigmoid
from ranking.scoring.offset_updates import refresh_offsets
from ranking.scoring.offsets import (
    CalibrationOffsets,
    LabeledRows,
)

if TYPE_CHECKING:
    import lightgbm

HOUR = 3600
Calibrator = Callable[[ServingLog], Float64]  # what is added to the logits of served rows (n, O)
Rows = Int64


def no_offsets(log: ServingLog) -> Float64:
    """Platt scaling alone, as the gate accepted it."""
    return np.zeros_like(log.served.served)


def hourly_offsets(log: ServingLog, with_segments: bool) -> Float64:
    """The product's offsets, refreshed each hour: an intercept, and segments if wanted."""
    final, served, spec = log.final, log.served, log.spec
    segments = spec.calibration_segments if with_segments else ()
    added = np.zeros_like(served.served)
    start = int(served.as_of.min()) // HOUR * HOUR
    offsets = CalibrationOffsets(surface="", labels_until=start)
    served_segments = {name: served.predictions.segments[name] for name in segments}
    objectives = list(spec.objectives)
    for hour in range(start, int(served.as_of.max()) + 1, HOUR):
        rows = {}
        for name, seconds in log.mature_at.items():
            is_new = (seconds >= offsets.labels_until) & (seconds < hour)
            rows[name] = labeled(final, name, np.flatnonzero(is_new), segments)
        offsets = refresh_offsets(offsets, rows, hour)
        now = np.flatnonzero((served.as_of >= hour) & (served.as_of < hour + HOUR))
        logits = logit(served.predictions.predictions.probabilities[now])
        at_hour = {name: values[now] for name, values in served_segments.items()}
        added[now] = offsets(logits, at_hour, objectives)
    return added


def take_rows(rows: LabeledRows, mask: Bools) -> LabeledRows:
    """The rows of a mask (n)."""
    segments = {name: values[mask] for name, values in rows.segments.items()}
    return LabeledRows(rows.probabilities[mask], rows.labels[mask], segments)


def labeled(
    rows: ServedRows, objective: str, chosen: Rows, segments: tuple[str, ...]
) -> LabeledRows:
    """Those of the chosen rows that have a label of an objective."""
    predictions = rows.predictions.predictions
    column = predictions.objectives.index(objective)
    chosen = chosen[predictions.label_mask[chosen, column]]
    return LabeledRows(
        predictions.probabilities[chosen, column],
        predictions.labels[chosen, column],
        {name: rows.predictions.segments[name][chosen] for name in segments},
    )


TREES = {
    "objective": "binary",
    "learning_rate": 0.02873,
    "num_leaves": 5,
    "max_depth": 5,
    "min_child_samples": 160,
    "lambda_l2": 0.00913,
    "min_gain_to_split": 0.15,
    "deterministic": True,
    "num_threads": 1,
    "verbose": -1,
    "seed": 42,
}
NUM_TREES, HOLDOUT_EVERY = 94, 3
MAX_ROUNDS, MAX_LOGIT = 2, 10.0
MIN_ROWS = 1000  # with fewer, slopes are not bounded by data


def daily_mcgrad(log: ServingLog) -> Float64:
    """MCGrad, fitted each day on all rows so far whose labels are final."""
    final, served, spec = log.final, log.served, log.spec
    added = np.zeros_like(served.served)
    segments = tuple(served.predictions.segments)
    probabilities = served.predictions.predictions.probabilities
    for day in log.days:
        start, end = spec.day_start(day), spec.day_end(day)
        now = np.flatnonzero((served.as_of >= start) & (served.as_of < end))
        values = {name: served.predictions.segments[name][now] for name in segments}
        for column, name in enumerate(spec.objectives):
            known = labeled(final, name, np.flatnonzero(log.mature_at[name] < start), segments)
            if len(known.labels) >= MIN_ROWS and 0 < known.labels.sum() < len(known.labels):
                mcgrad = McGrad.fit(known)
                before = logit(probabilities[now, column])
                added[now, column] = mcgrad(before, values) - before
    return added


@dataclass(frozen=True)
class McGrad:
    """Rounds of boosted trees on segments and the logit, each followed by a slope."""

    rounds: tuple[tuple["lightgbm.Booster", float], ...]

    @classmethod
    def fit(cls, rows: LabeledRows) -> "McGrad":
        """As many rounds as lower the log loss of held-out rows, then those on all rows."""
        held_out = np.arange(len(rows.labels)) % HOLDOUT_EVERY == 0
        fitted = cls._fit_rounds(take_rows(rows, ~held_out), MAX_ROUNDS)
        tested = take_rows(rows, held_out)
        losses = [_log_loss(z, tested.labels) for z in fitted.all_logits(tested)]
        worse = np.flatnonzero(np.diff(losses) >= 0)
        best = int(worse[0]) if len(worse) else MAX_ROUNDS
        return cls._fit_rounds(rows, best)

    @classmethod
    def _fit_rounds(cls, rows: LabeledRows, num_rounds: int) -> "McGrad":
        import lightgbm

        z = _clip(logit(rows.probabilities))
        rounds = []
        for _ in range(num_rounds):
            x = _features(z, rows.segments)
            data = lightgbm.Dataset(x, rows.labels, init_score=z, free_raw_data=True)
            booster = lightgbm.train(TREES, data, NUM_TREES)
            z = z + np.asarray(booster.predict(x, raw_score=True))
            slope = _fit_slope(z, rows.labels)
            rounds.append((booster, slope))
            z = slope * z
        return cls(tuple(rounds))

    def all_logits(self, rows: LabeledRows) -> list[Float64]:
        """The logits (n) of rows after none, one, … and all rounds."""
        z = _clip(logit(rows.probabilities))
        results = [z]
        for booster, slope in self.rounds:
            x = _features(z, rows.segments)
            z = slope * (z + np.asarray(booster.predict(x, raw_score=True)))
            results.append(z)
        return results

    def __call__(self, logits: Float64, segments: SegmentValues) -> Float64:
        """Calibrated logits (n)."""
        no_labels = np.zeros(0, np.float32)
        return self.all_logits(LabeledRows(sigmoid(logits), no_labels, segments))[-1]


def _features(z: Float64, segments: SegmentValues) -> Float64:
    return np.stack([*segments.values(), z], 1).astype(np.float64)


def _clip(z: Float64) -> Float64:
    return np.clip(z, -MAX_LOGIT, MAX_LOGIT)


def _log_loss(z: Float64, labels: Labels) -> float:
    return float((np.logaddexp(0, z) - labels * z).sum())


def _fit_slope(z: Float64, labels: Labels) -> float:
    from scipy.optimize import minimize_scalar

    return float(
        minimize_scalar(
            lambda slope: _log_loss(slope * z, labels), bounds=(1e-8, 50), method="bounded"
        ).x
    )


PLATT, PRODUCT = "Platt scaling at the gate", "offsets by segment, by the hour"
CALIBRATORS: Mapping[str, Calibrator] = {
    PLATT: no_offsets,
    "intercept, by the hour": partial(hourly_offsets, with_segments=False),
    PRODUCT: partial(hourly_offsets, with_segments=True),
    "MCGrad, by the day": daily_mcgrad,
}
