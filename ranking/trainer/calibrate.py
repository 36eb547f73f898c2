"""Calibration of a student on labels that it has not learned; its prior: earlier rankers."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date

import numpy as np

from etl.errors import UserError
from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from etl.tables.uri import list_matching
from ranking.registry.calibration_offsets import replace_offsets
from ranking.registry.manifest import read_manifest
from ranking.registry.promotion import predict_labels
from ranking.registry.ranker import (
    live_version,
    load_ranker,
    rankers_folder,
    validate_ranker,
)
from ranking.scoring import calibration
from ranking.scoring.calibration import IDENTITY, PlattScaling
from ranking.scoring.offset_updates import refresh_offsets, refresh_value_offsets
from ranking.scoring.offsets import INTERCEPT, CalibrationOffsets, RankerCalibration
from ranking.scoring.predictions import SegmentedPredictions, predict_by_segment
from ranking.scoring.scorer import SCORE_ROWS, input_builder
from ranking.student.trained import TrainedStudent
from ranking.trainer.label_days import days_with_labels, require_examples
from ranking.trainer.net_rates import first_window, refresh_from_retractions
from ranking.trainer.student_trainer import StudentTrainer
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.evaluation.predictions import Predictions

DAY_GLOB = "[0-9]" * 8  # a version's name begins with the last day of its training
log = logging.getLogger(__name__)


def fit_calibration(
    lake: Lake, split: DaySplit, trainer: StudentTrainer, prior: Mapping[str, PlattScaling]
) -> RankerCalibration:
    """Fit a calibration on labels that became final after training, which no model has learned.

    With few positives it stays close to its prior; without a calibration day the prior is returned.
    """
    student = trainer.averaged
    (surface,) = student.input_builder.reader.surfaces
    trained_until = lake.spec.day_end(split.train_last)
    offsets = CalibrationOffsets(surface=surface, labels_until=trained_until)
    reader, recent = student.input_builder.reader, first_window(trained_until)
    offsets = refresh_from_retractions(offsets, reader, student.num_items, recent)
    if split.calibration is None:
        scalings = {name: prior.get(name, PlattScaling()) for name in lake.spec.objectives}
        return RankerCalibration(scalings, offsets)
    window = LabelWindow.for_calibration(split, lake.spec)
    window = replace(window, mixes_windows=trainer.config.mix_windows)
    held_out_predictions = predict_window(student, days_with_labels(reader, window), window)
    calibration = RankerCalibration(
        fit_per_objective(held_out_predictions.predictions, prior), offsets
    )
    return drop_intercept_and_slope(
        refresh_calibration(calibration, held_out_predictions, student, window)
    )


def drop_intercept_and_slope(calibration: RankerCalibration) -> RankerCalibration:
    """The calibration without the intercept and the slope of its offsets.

    After a fit they have learned the same labels again, from a prior of their own: where positives
    are few, the prior of the fit would count half.
    """
    assert calibration.offsets is not None
    by_objective = {
        name: {segment: found for segment, found in offsets.items() if segment != INTERCEPT}
        for name, offsets in calibration.offsets.by_objective.items()
    }
    changes = {"by_objective": by_objective, "slopes": {}}
    return replace(calibration, offsets=calibration.offsets.model_copy(update=changes))


def predict_window(
    student: TrainedStudent, days: Sequence[date], window: LabelWindow
) -> SegmentedPredictions:
    """A student's predictions for the labels of a window, not calibrated."""
    reader = student.input_builder.reader
    batches = reader.batches(days, window, SCORE_ROWS, Shuffle(None))
    return predict_by_segment(student.score, batches, reader.lake.spec, student.num_items)


def fit_per_objective(
    predictions: Predictions, prior: Mapping[str, PlattScaling]
) -> dict[str, PlattScaling]:
    """Fit a calibration for each objective on predictions and their labels."""
    fitted = {}
    for i, name in enumerate(predictions.objectives):
        is_final = predictions.label_mask[:, i]
        logits = calibration.logit(predictions.probabilities[is_final, i])
        labels = predictions.labels[is_final, i]
        fitted[name] = calibration.fit_platt(logits, labels, prior.get(name, IDENTITY))
    return fitted


def refresh_calibration(
    ranker_calibration: RankerCalibration,
    held_out_predictions: SegmentedPredictions,
    student: TrainedStudent,
    window: LabelWindow,
) -> RankerCalibration:
    """The calibration with offsets that have learned a window, by a student that has not.

    Args:
        ranker_calibration: The calibration.
        held_out_predictions: The student's predictions of the window's labels, not calibrated.
        student: The student.
        window: The window.
    """
    offsets = ranker_calibration.offsets
    assert offsets is not None
    calibrated = held_out_predictions.calibrated(replace(ranker_calibration, offsets=None))
    reader, num_items = student.input_builder.reader, student.num_items
    learned = refresh_all_offsets(offsets, calibrated, reader, num_items, window)
    return replace(ranker_calibration, offsets=learned)


def refresh_all_offsets(
    offsets: CalibrationOffsets,
    calibrated: SegmentedPredictions,
    reader: ExampleReader,
    num_items: int,
    window: LabelWindow,
) -> CalibrationOffsets:
    """Offsets that have learned the labels, the values and the retractions of a window.

    Args:
        offsets: The offsets before.
        calibrated: Predictions of the window's labels, calibrated without offsets.
        reader: Reads the outcomes that can no longer be retracted.
        num_items: How many items the ranker knows.
        window: The window.
    """
    elapsed = window.end - offsets.labels_until
    with_values = refresh_value_offsets(offsets, calibrated.outcomes, elapsed)
    learned = refresh_offsets(with_values, calibrated.labeled(), window.end)
    return refresh_from_retractions(learned, reader, num_items, window)


def load_earlier_calibrations(lake: Lake, train_last: date) -> list[dict[str, PlattScaling]]:
    """The calibrations of each surface's latest ranker that was trained until an earlier day.

    Those of objectives that the surface does not have are left out: nothing was fitted. A damaged
    ranker is skipped with a warning.
    """
    calibrations = []
    for surface in lake.spec.ad_surfaces:
        folder = rankers_folder(lake.root, surface)
        names = [path.name for path in list_matching(folder, f"{DAY_GLOB}-*") if path.is_dir()]
        earlier = sorted(name for name in names if name[:8] < f"{train_last:%Y%m%d}")
        if not earlier:
            continue
        try:
            fitted = read_manifest(folder / earlier[-1]).calibration
        except UserError as error:
            log.warning("skipped in the prior of the calibration: %s", error)
            continue
        objectives = [n for n in lake.spec.objectives if surface in lake.spec.surfaces_of(n)]
        calibrations.append({name: fitted[name] for name in objectives if name in fitted})
    return calibrations


def pool_calibrations(
    calibrations: Sequence[Mapping[str, PlattScaling]],
) -> dict[str, PlattScaling]:
    """The mean Platt scaling of each objective over surfaces: geometric for slopes."""
    by_objective: dict[str, list[PlattScaling]] = {}
    for surface_calibrations in calibrations:
        for name, fitted in surface_calibrations.items():
            by_objective.setdefault(name, []).append(fitted)
    return {
        name: PlattScaling(
            slope=float(np.exp(np.mean([np.log(scaling.slope) for scaling in scalings]))),
            intercept=float(np.mean([scaling.intercept for scaling in scalings])),
        )
        for name, scalings in by_objective.items()
    }


def refresh_live_calibration(lake: Lake, surface: str, data_until: int) -> CalibrationOffsets:
    """Refresh the offsets of a surface's live ranker on labels final by an epoch second.

    Returns:
        The offsets, which are unchanged if they have learned all of these labels.

    Raises:
        UserError: No ranker is live, it was saved before offsets existed, or there are no examples
            of the latest days.
    """
    folder = live_version(lake.root, surface)
    ranker = validate_ranker(load_ranker(folder), lake.root, surface)
    offsets = ranker.offsets
    if offsets is None:
        raise UserError(
            f"the live ranker of {surface} was saved without calibration offsets: run `gemline "
            "rank train`, then `gemline rank promote`"
        )
    if offsets.labels_until >= data_until:
        return offsets
    training = ranker.manifest.training
    window = LabelWindow(
        offsets.labels_until,
        data_until,
        only_unlearned=True,
        mixes_windows=training is not None and training.config.mix_windows,
    )
    reader = input_builder(ranker, lake).reader
    require_examples(reader, offsets.labels_until, data_until)
    days = days_with_labels(reader, window)
    calibrated = predict_labels(replace(ranker, offsets=None), lake, days, window)
    refreshed = refresh_all_offsets(offsets, calibrated, reader, ranker.manifest.num_items, window)
    replace_offsets(folder, refreshed)
    return refreshed
