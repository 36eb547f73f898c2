"""Pretraining: a student learns GEM's predictions alone before it learns labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from etl.tables.lake import Lake
from ranking.student.config import DistillationConfig, StudentTrainConfig
from ranking.student.trained import new_student
from ranking.trainer.student_trainer import StudentTrainer
from tests.conftest import FIRST, LAST
from tests.ranking.conftest import SMALL
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.teacher.embeddings import TeacherEmbeddings
from training.teacher.predictions import TeacherPredictions

DAYS = [LAST]


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


def test_without_a_teacher_or_epochs_nothing_is_pretrained(gem_lake: Lake) -> None:
    for trainer in (
        trainer_of(gem_lake, 1, with_teacher=False),
        trainer_of(gem_lake, 0),
    ):
        before = {k: v.clone() for k, v in trainer.student.student.state_dict().items()}
        trainer.pretrain([FIRST, LAST], labels_of(gem_lake))
        for name, tensor in trainer.student.student.state_dict().items():
            assert torch.equal(tensor, before[name]), name
