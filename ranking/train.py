"""A surface's ranker: its student with and without GEM's knowledge, calibrated, exported."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

from etl.spec.units import each_day
from etl.tables.lake import Lake
from etl.tables.place import Place
from ranking import calibration
from ranking.calibration import Calibration
from ranking.package.versions import newest, versions
from ranking.score import SCORE_ROWS
from ranking.student import domain
from ranking.student.config import StudentTraining, TransferConfig
from ranking.student.export import export
from ranking.student.programs import require_compiler
from ranking.student.teacher import Teacher
from ranking.student.train import train_student
from ranking.student.trained import TrainedStudent
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.knowledge.earlier import Earlier, earlier
from training.predictions import Predictions, evaluation_path, predict
from training.split import Split

EXAMPLE_ROWS = 64


def train_ranker(
    lake: Lake, surface: str, split: Split, config: StudentTraining, native: bool = False
) -> Place:
    """Train both variants, keep their test predictions, export the one that learned from GEM.

    `native` compiles its programs for this machine, too; raises UserError without a compiler.
    """
    if native:
        require_compiler()
    alone = {"transfer": TransferConfig(kind="none", share=()), "model": config.model.without_gem()}
    variants = {"student": config.model_copy(update=alone), "distilled": config}
    known = earlier(lake) if config.model.before else Earlier.nothing()
    for name, variant in variants.items():
        student = trained(lake, (surface,), split, variant, known)
        fitted = fit_calibration(lake, split, student)
        calibrated(tested(lake, split, student), fitted).write(
            evaluation_path(lake.root, f"{name}-{surface}"), split
        )
    example = next(_batches(lake, split, student, EXAMPLE_ROWS))
    name, inputs = f"{split.train_last:%Y%m%d}-s{config.seed}", student.assembly(example)
    place = versions(lake.root, surface)
    folder = export(place, student, lake.spec, name, fitted, inputs, native)
    newest(lake.root, surface).swap(folder.name)
    return folder


def train_domain(lake: Lake, name: str, split: Split, config: StudentTraining) -> Place:
    """Train the model of a domain and keep it for the rankers of its surfaces."""
    known = earlier(lake) if config.model.before else Earlier.nothing()
    model = trained(lake, lake.spec.domains[name], split, config, known)
    return domain.keep(model.assembly.reader, name, split.train_last, model)


def trained(
    lake: Lake, surfaces: tuple[str, ...], split: Split, config: StudentTraining, known: Earlier
) -> TrainedStudent:
    """The student of one surface, or of several."""
    reader = Reader.newest(lake, None, config.model.max_length, surfaces)
    days = list(each_day(split.train_first, split.train_last))
    teacher = None if config.transfer.kind == "none" else Teacher(lake, days)
    return train_student(lake, reader, split, config, teacher, known)


def tested(lake: Lake, split: Split, student: TrainedStudent) -> Predictions:
    """What a student says of the test days, not calibrated."""
    batches = _batches(lake, split, student, SCORE_ROWS)
    return predict(student.logits, batches, list(lake.spec.objectives))


def fit_calibration(lake: Lake, split: Split, student: TrainedStudent) -> dict[str, Calibration]:
    """Fitted on labels that became final after training; the identity without a day for it."""
    names = list(lake.spec.objectives)
    if split.calibration is None:
        return {name: calibration.Platt() for name in names}
    ripening = timedelta(days=lake.spec.ripens_after_days)
    days = list(each_day(split.calibration - ripening, split.calibration))
    reader = student.assembly.reader
    batches = reader.batches(days, split.calibrating(lake.spec), SCORE_ROWS, Shuffle(None))
    return fitted_on(predict(student.logits, batches, names))


def fitted_on(found: Predictions) -> dict[str, Calibration]:
    """A calibration for each objective, fitted on predictions and their labels."""
    logits = calibration.logit(found.probability)
    return {
        name: calibration.fit(logits[found.known[:, i], i], found.labels[found.known[:, i], i])
        for i, name in enumerate(found.objectives)
    }


def calibrated(raw: Predictions, fitted: dict[str, Calibration]) -> Predictions:
    """Predictions with calibrated probabilities."""
    logits = calibration.logit(raw.probability)
    return replace(raw, probability=calibration.apply(fitted, logits, raw.objectives))


def _batches(lake: Lake, split: Split, student: TrainedStudent, rows: int) -> Iterator[Batch]:
    days = list(each_day(split.test_first, split.test_last))
    return student.assembly.reader.batches(days, split.testing(lake.spec), rows, Shuffle(None))
