"""Calibration of a student on labels that it has not learned; its prior: earlier rankers."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta

import numpy as np

from etl.errors import UserError
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import Lake
from etl.tables.uri import list_matching
from ranking.registry.manifest import read_manifest
from ranking.registry.ranker import rankers_folder
from ranking.scoring import calibration
from ranking.scoring.calibration import Calibration, PlattScaling
from ranking.scoring.scorer import SCORE_ROWS
from ranking.student.model import TrainedStudent
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.evaluation.predictions import Predictions, predict

DAY_GLOB = "[0-9]" * 8  # a version's name begins with the last day of its training
log = logging.getLogger(__name__)


def fit_calibration(
    lake: Lake, split: DaySplit, student: TrainedStudent, prior: Mapping[str, PlattScaling]
) -> dict[str, Calibration]:
    """Fit calibrations on labels that became final after training, which no model has learned.

    With few positives a calibration stays close to its prior; without a calibration day the prior
    is returned.
    """
    objectives = list(lake.spec.objectives)
    if split.calibration is None:
        return {name: prior.get(name, PlattScaling()) for name in objectives}
    label_delay = timedelta(days=lake.spec.label_maturity_days)
    days = list(date_range(split.calibration - label_delay, split.calibration))
    window = LabelWindow.for_calibration(split, lake.spec)
    return fit_per_objective(predict_window(student, days, window), prior)


def predict_window(
    student: TrainedStudent, days: Sequence[date], window: LabelWindow
) -> Predictions:
    """A student's predictions for the labels of a window, not calibrated."""
    reader = student.input_builder.reader
    batches = reader.batches(days, window, SCORE_ROWS, Shuffle(None))
    return predict(student.logits, batches, list(reader.lake.spec.objectives))


def fit_per_objective(
    predictions: Predictions, prior: Mapping[str, PlattScaling]
) -> dict[str, Calibration]:
    """Fit a calibration for each objective on predictions and their labels."""
    return {
        name: calibration.fit_calibrator(logits, labels, prior=prior.get(name))
        for name, logits, labels in _labeled_logits(predictions)
    }


def refresh_intercepts(
    predictions: Predictions, calibrations: Mapping[str, Calibration]
) -> dict[str, Calibration]:
    """Calibrations whose intercepts are refreshed on predictions and their labels."""
    return {
        name: calibration.refresh_intercept(calibrations[name], logits, labels)
        for name, logits, labels in _labeled_logits(predictions)
    }


def _labeled_logits(
    predictions: Predictions,
) -> Iterator[tuple[str, calibration.Floats, calibration.Labels]]:
    """Each objective with the logits (n) and labels (n) of the rows that have its label."""
    logits = calibration.logit(predictions.probabilities)
    for i, name in enumerate(predictions.objectives):
        has_label = predictions.label_mask[:, i]
        yield name, logits[has_label, i], predictions.labels[has_label, i]


def apply_calibration(
    predictions: Predictions, calibrations: Mapping[str, Calibration]
) -> Predictions:
    """Predictions with calibrated probabilities."""
    logits = calibration.logit(predictions.probabilities)
    calibrated = calibration.calibrate(calibrations, logits, predictions.objectives)
    return replace(predictions, probabilities=calibrated)


def load_earlier_calibrations(lake: Lake, train_last: date) -> list[dict[str, Calibration]]:
    """The calibrations of each surface's latest ranker that was trained until an earlier day.

    A damaged ranker is skipped with a warning.
    """
    calibrations = []
    for surface in lake.spec.ad_surfaces:
        folder = rankers_folder(lake.root, surface)
        names = [path.name for path in list_matching(folder, f"{DAY_GLOB}-*") if path.is_dir()]
        earlier = sorted(name for name in names if name[:8] < f"{train_last:%Y%m%d}")
        if not earlier:
            continue
        try:
            calibrations.append(read_manifest(folder / earlier[-1]).calibration)
        except UserError as error:
            log.warning("skipped in the prior of the calibration: %s", error)
    return calibrations


def pool_calibrations(calibrations: Sequence[Mapping[str, Calibration]]) -> dict[str, PlattScaling]:
    """The mean Platt scaling of each objective over surfaces: geometric for slopes."""
    by_objective: dict[str, list[PlattScaling]] = {}
    for surface_calibrations in calibrations:
        for name, fitted in surface_calibrations.items():
            if isinstance(fitted, PlattScaling):
                by_objective.setdefault(name, []).append(fitted)
    return {
        name: PlattScaling(
            slope=float(np.exp(np.mean([np.log(scaling.slope) for scaling in scalings]))),
            intercept=float(np.mean([scaling.intercept for scaling in scalings])),
        )
        for name, scalings in by_objective.items()
    }
