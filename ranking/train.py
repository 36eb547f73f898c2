"""A surface's ranker: its student with and without GEM's knowledge, calibrated, exported."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta

import numpy as np

from etl.errors import UserError
from etl.spec.units import each_day
from etl.tables.lake import Lake
from etl.tables.place import Place, listed
from ranking import calibration
from ranking.calibration import Calibration, Platt
from ranking.package.manifest import read as read_manifest
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
log = logging.getLogger(__name__)
DATED = "[0-9]" * 8  # a version's name begins with the last day of its training


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
    prior = pooled(earlier_calibrations(lake, split.train_last))
    for name, variant in variants.items():
        student = trained(lake, (surface,), split, variant, known)
        fitted = fit_calibration(lake, split, student, prior)
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


def fit_calibration(
    lake: Lake, split: Split, student: TrainedStudent, prior: Mapping[str, Platt]
) -> dict[str, Calibration]:
    """Fitted on labels that became final after training, of rows that no model has learned of.

    With few outcomes it stays near the prior, and is the prior without a day for it.
    """
    names = list(lake.spec.objectives)
    if split.calibration is None:
        return {name: prior.get(name, Platt()) for name in names}
    ripening = timedelta(days=lake.spec.ripens_after_days)
    days = list(each_day(split.calibration - ripening, split.calibration))
    reader = student.assembly.reader
    batches = reader.batches(days, split.calibrating(lake.spec), SCORE_ROWS, Shuffle(None))
    return fitted_on(predict(student.logits, batches, names), prior)


def fitted_on(found: Predictions, prior: Mapping[str, Platt]) -> dict[str, Calibration]:
    """A calibration for each objective, fitted on predictions and their labels."""
    logits = calibration.logit(found.probability)
    return {
        name: calibration.fit(
            logits[found.known[:, i], i],
            found.labels[found.known[:, i], i],
            prior=prior.get(name),
        )
        for i, name in enumerate(found.objectives)
    }


def earlier_calibrations(lake: Lake, train_last: date) -> list[dict[str, Calibration]]:
    """Of each surface, the calibrations of its newest ranker that was trained on earlier days.

    One that is damaged is named in the log and left out.
    """
    found = []
    for surface in lake.spec.ad_surfaces:
        folder = versions(lake.root, surface)
        names = [path.name for path in listed(folder, f"{DATED}-*") if path.is_dir()]
        before = [name for name in names if name[:8] < f"{train_last:%Y%m%d}"]
        try:
            found += [read_manifest(folder / name).calibration for name in sorted(before)[-1:]]
        except UserError as error:
            log.warning("left out of the prior of calibration: %s", error)
    return found


def pooled(calibrations: Sequence[Mapping[str, Calibration]]) -> dict[str, Platt]:
    """The mean calibration of each objective over surfaces."""
    by_name: dict[str, list[Platt]] = {}
    for surface in calibrations:
        for name, found in surface.items():
            if isinstance(found, Platt):
                by_name.setdefault(name, []).append(found)
    return {
        name: Platt(
            slope=float(np.exp(np.mean([np.log(one.slope) for one in found]))),
            intercept=float(np.mean([one.intercept for one in found])),
        )
        for name, found in by_name.items()
    }


def calibrated(raw: Predictions, fitted: dict[str, Calibration]) -> Predictions:
    """Predictions with calibrated probabilities."""
    logits = calibration.logit(raw.probability)
    return replace(raw, probability=calibration.apply(fitted, logits, raw.objectives))


def _batches(lake: Lake, split: Split, student: TrainedStudent, rows: int) -> Iterator[Batch]:
    days = list(each_day(split.test_first, split.test_last))
    return student.assembly.reader.batches(days, split.testing(lake.spec), rows, Shuffle(None))
