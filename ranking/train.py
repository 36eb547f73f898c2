"""A surface's ranker: its student with and without GEM's knowledge, calibrated, saved."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from etl.spec.units import each_day
from etl.tables.lake import Lake
from ranking import calibration, ranker
from ranking.student.teacher import Teacher
from ranking.student.train import StudentTraining, TrainedStudent, train_student
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.predictions import Predictions, evaluation_path, predict
from training.split import Split

SCORE_ROWS = 2048
VARIANTS = {"student": False, "distilled": True}


def train_ranker(lake: Lake, surface: str, split: Split, config: StudentTraining) -> Path:
    """Train both variants, keep their test predictions, save the distilled one as the ranker."""
    sequence = next(iter(lake.spec.sequences))
    reader = Reader.newest(lake, sequence, config.model.max_length, surface)
    days = list(each_day(split.train_first, split.train_last))
    folder = ranker.ranker_folder(lake.root, surface)
    for name, distilled in VARIANTS.items():
        teacher = Teacher(lake, days) if distilled else None
        student = train_student(lake, reader, split, config, teacher)
        fitted = fit_calibration(lake, reader, split, student)
        raw = predict(student.serving, _batches(lake, reader, split), list(lake.spec.objectives))
        calibrated(raw, fitted).write(evaluation_path(lake.root, f"{name}-{surface}"), split)
        if distilled:
            version = f"{split.train_last:%Y%m%d}-s{config.seed}"
            ranker.save(
                folder, lake.spec, surface, version, sequence, config.model, student, fitted
            )
    return folder


def fit_calibration(
    lake: Lake, reader: Reader, split: Split, student: TrainedStudent
) -> dict[str, calibration.Platt]:
    """Fitted on labels that became final after training; the identity without a day for it."""
    if split.calibration is None:
        return {name: calibration.Platt() for name in lake.spec.objectives}
    ripening = timedelta(days=lake.spec.ripens_after_days)
    days = list(each_day(split.calibration - ripening, split.calibration))
    batches = reader.batches(days, split.calibrating(lake.spec), SCORE_ROWS, Shuffle(None))
    return calibration.fit(predict(student.serving, batches, list(lake.spec.objectives)))


def calibrated(raw: Predictions, fitted: dict[str, calibration.Platt]) -> Predictions:
    """Predictions with calibrated probabilities."""
    probability = calibration.apply(fitted, raw.probability, raw.objectives)
    return replace(raw, probability=probability)


def _batches(lake: Lake, reader: Reader, split: Split) -> Iterator[Batch]:
    days = list(each_day(split.test_first, split.test_last))
    return reader.batches(days, split.testing(lake.spec), SCORE_ROWS, Shuffle(None))
