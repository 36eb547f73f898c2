"""Pretraining: a student learns GEM's predictions alone before it learns labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from etl.spec.units import DaySplit
from etl.tables import arrow, model_schemas, schemas
from etl.tables.lake import Lake
from ranking.student.config import DistillationConfig, StudentTrainConfig
from ranking.student.position import SwapPositionBias
from ranking.student.trained import new_student
from ranking.trainer.student_trainer import StudentTrainer
from ranking.trainer.train import load_teacher_predictions
from tests.conftest import FIRST, LAST
from tests.ranking.conftest import SMALL
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.evaluation.predictions import predict
from training.teacher.embeddings import TeacherEmbeddings
from training.teacher.predictions import TeacherPredictions

DAYS = [LAST]
SPLIT = DaySplit(
    train_first=FIRST + timedelta(days=1), train_last=LAST, calibration=None, test_first=LAST,
    test_last=LAST, data_until=LAST,
)  # fmt: skip


def trainer_of(lake: Lake, epochs: int, with_teacher: bool = True) -> StudentTrainer:
    distillation = DistillationConfig(pretraining_epochs=epochs)
    config = StudentTrainConfig(model=SMALL, distillation=distillation, batch_rows=64)
    reader = ExampleReader.latest(lake, "behaviour", SMALL.max_length, ("feed",))
    torch.manual_seed(0)
    student = new_student(reader, SMALL, len(reader.items), TeacherEmbeddings.empty())
    return StudentTrainer(
        student, config, TeacherPredictions.of_gem(lake, DAYS) if with_teacher else None
    )


def labels_of(lake: Lake) -> LabelWindow:
    return LabelWindow(0, lake.spec.day_end(LAST))


def batches(trainer: StudentTrainer) -> Sequence[Batch]:
    reader = trainer.student.input_builder.reader
    return list(reader.batches(DAYS, labels_of(reader.lake), 64, Shuffle(None)))


def teacher_loss(trainer: StudentTrainer) -> float:
    """Cross-entropy of the served head towards GEM's probabilities."""
    teacher, total = trainer.loss.teacher, 0.0
    assert teacher is not None
    for batch in batches(trainer):
        predicted = teacher.lookup(batch.impression_ids)
        with torch.no_grad():
            logits = trainer.averaged.logits(batch)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, torch.sigmoid(predicted.logits), reduction="none"
        )
        total += float((losses * predicted.mask).sum())
    return total


@dataclass
class OtherLabels:
    """A reader of the same batches with all labels turned around."""

    reader: ExampleReader

    def __getattr__(self, name: str) -> object:
        return getattr(self.reader, name)

    def batches(self, *arguments: object) -> object:
        for batch in self.reader.batches(*arguments):  # type: ignore[arg-type]
            yield replace(batch, labels=1 - batch.labels)


def test_pretraining_learns_the_teacher_and_reads_no_label(gem_lake: Lake) -> None:
    one, other = trainer_of(gem_lake, 5), trainer_of(gem_lake, 5)
    before = teacher_loss(one)
    torch.manual_seed(1)
    one.pretrain(DAYS, labels_of(gem_lake))
    assert teacher_loss(one) < 0.9 * before
    builder = other.student.input_builder
    swapped = OtherLabels(builder.reader)
    other.student.input_builder = replace(builder, reader=swapped)  # type: ignore[arg-type]
    torch.manual_seed(1)
    other.pretrain(DAYS, labels_of(gem_lake))
    weights = other.student.student.state_dict()
    for name, tensor in one.student.student.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


class RecordedGradient(StudentTrainer):
    """A trainer that keeps the gradient of the served head instead of updating weights."""

    gradient: torch.Tensor

    def _update_weights(self, loss: torch.Tensor) -> None:
        weight = self.student.student.head.weight
        assert weight.grad is not None
        self.gradient = weight.grad.clone()


def test_a_teacher_is_learned_at_the_logged_positions_with_the_effects_of_the_student(
    gem_lake: Lake,
) -> None:
    """A teacher with the student's own logits there teaches nothing, unless effects are lost."""
    plain = DistillationConfig(kind="plain", use_adapter=False)
    model = SMALL.model_copy(update={"dropout": 0.0, "item_dropout": 0.0})
    config = StudentTrainConfig(model=model, distillation=plain, batch_rows=10**6)
    reader = ExampleReader.latest(gem_lake, "behaviour", SMALL.max_length, ("feed",))
    torch.manual_seed(0)
    student = new_student(reader, model, len(reader.items), TeacherEmbeddings.empty())
    bias, window = student.student.position_bias, labels_of(gem_lake)
    assert isinstance(bias, SwapPositionBias)
    torch.nn.init.normal_(bias.coefficients)
    rows = reader.batches(DAYS, window, 10**6, Shuffle(None))
    own = predict(student.logits, rows, reader.features.objectives)
    trainer = RecordedGradient(student, config, TeacherPredictions.of_model(own, "own"))
    trainer.pretrain(DAYS, window)
    gradient = trainer.gradient
    torch.nn.init.zeros_(bias.coefficients)
    trainer.pretrain(DAYS, window)
    assert gradient.norm() < 0.01 * trainer.gradient.norm()


def test_without_a_teacher_or_epochs_nothing_is_pretrained(gem_lake: Lake) -> None:
    for trainer in (
        trainer_of(gem_lake, 1, with_teacher=False),
        trainer_of(gem_lake, 0),
    ):
        before = {k: v.clone() for k, v in trainer.student.student.state_dict().items()}
        trainer.pretrain([FIRST, LAST], labels_of(gem_lake))
        for name, tensor in trainer.student.student.state_dict().items():
            assert torch.equal(tensor, before[name]), name


def test_a_warning_names_the_days_that_the_teacher_has_not_predicted(
    own_gem_lake: Lake, caplog: pytest.LogCaptureFixture
) -> None:
    """Predictions of other surfaces do not count."""
    config = StudentTrainConfig(model=SMALL)
    load_teacher_predictions(own_gem_lake, ("feed",), SPLIT, config)
    assert "GEM has predicted" not in caplog.text
    schema = model_schemas.teacher_predictions(own_gem_lake.spec)
    stored = arrow.snapshot(own_gem_lake, schema)
    examples = arrow.snapshot(own_gem_lake, schemas.examples(own_gem_lake.spec)).read()
    is_feed = np.asarray(examples["surface"]) == own_gem_lake.spec.surface_codes["feed"]
    of_feed = pc.is_in(stored.read()["impression_id"], examples.filter(is_feed)["impression_id"])
    days = [SPLIT.train_first + timedelta(days=n) for n in range(3)]
    of_last = pc.equal(stored.read()["day"], LAST)
    kept = stored.read().filter(pc.or_(pc.invert(of_feed), of_last))
    arrow.replace_rows(own_gem_lake, schema, kept, "true", {})
    assert own_gem_lake.rows_by_day(schema.name)[days[1]] > 0, "of other surfaces"
    load_teacher_predictions(own_gem_lake, ("feed",), SPLIT, config)
    share = pc.sum(pc.and_(of_feed, of_last)).as_py() / pc.sum(of_feed).as_py()
    message = f"feed: GEM has predicted {100 * share:.0f}% of the impressions from {days[0]} to"
    assert f"{message} {LAST} (none on {days[0]}, {days[1]})" in caplog.text
    caplog.clear()
    load_teacher_predictions(own_gem_lake, ("feed",), SPLIT, config.labels_only())
    assert not caplog.text
