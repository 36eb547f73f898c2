"""Training a surface's student: labels alone, or labels and GEM's knowledge."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from etl.spec.base import Strict
from etl.spec.units import each_day
from etl.tables.lake import Lake
from ranking.student.model import Student, StudentConfig, StudentOutput
from ranking.student.teacher import Teacher
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.loop.loss import masked_loss
from training.model.lookup import first_items, look_up, table_rows
from training.model.plain import PlainTables
from training.split import Split


class DistillConfig(Strict):
    """Distillation through the auxiliary head; `weight` 0 learns from labels alone."""

    weight: float = 1.0
    gradient_scale: float = 1.0
    label_scale: float = 1.0


class StudentTraining(Strict):
    """How a student is trained."""

    model: StudentConfig = StudentConfig()
    distill: DistillConfig = DistillConfig()
    passes: int = 2
    batch_rows: int = 256
    dense_rate: float = 2e-3
    sparse_rate: float = 0.05
    weight_decay: float = 0.01
    seed: int = 0


class TrainedStudent:
    """A student with its tables, ready to score."""

    def __init__(self, student: Student, tables: PlainTables, items: int) -> None:
        self.student, self.tables, self.items = student, tables, items
        self._rows = first_items(items)

    def __call__(self, batch: Batch, config: StudentTraining | None = None) -> StudentOutput:
        """Logits of a batch; with a configuration, as in training."""
        dropout = config.model.item_dropout if config else 0.0
        scale = config.distill.gradient_scale if config else 1.0
        output: StudentOutput = self.student(
            batch, look_up(self.tables, batch, batch.history.positions, self._rows, dropout), scale
        )
        return output

    def serving(self, batch: Batch) -> Tensor:
        """Logits (B, O) of the served head."""
        return self(batch).serving


def new_student(reader: Reader, config: StudentConfig, items: int) -> TrainedStudent:
    """A fresh student for `items` items."""
    tables = PlainTables(table_rows(reader.features, items), config.row_width)
    return TrainedStudent(Student(reader.features, config), tables, items)


def train_student(
    lake: Lake, reader: Reader, split: Split, config: StudentTraining, teacher: Teacher | None
) -> TrainedStudent:
    """Train on the training days; `teacher` None or weight 0 leaves GEM out."""
    torch.manual_seed(config.seed)
    known = reader.items.known_by(split.train_last)
    model = new_student(reader, config.model, 1 + int(np.flatnonzero(known).max(initial=0)))
    dense = torch.optim.AdamW(
        model.student.parameters(),
        lr=config.dense_rate,
        weight_decay=config.weight_decay,
        fused=True,
    )
    sparse = model.tables.optimizer(config.sparse_rate)
    what = "with" if teacher and config.distill.weight else "without"
    batches = _passes(lake, reader, split, config)
    for batch in tqdm(
        batches, desc=f"{reader.surface} student {what} GEM", unit="batch", disable=None
    ):
        loss = _loss(model(batch, config), batch, teacher, config.distill)
        for optimizer in (dense, sparse):
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in (dense, sparse):
            optimizer.step()
    model.student.eval()
    return model


def _passes(lake: Lake, reader: Reader, split: Split, config: StudentTraining) -> Iterable[Batch]:
    days = list(each_day(split.train_first, split.train_last))
    for number in range(config.passes):
        shuffle = Shuffle(config.seed * 1000 + number)
        yield from reader.batches(days, split.learning(lake.spec), config.batch_rows, shuffle)


def _loss(
    output: StudentOutput, batch: Batch, teacher: Teacher | None, distill: DistillConfig
) -> Tensor:
    """Labels on the serving head, GEM's scores on the other (ExFM eq. 3-5)."""
    loss = masked_loss(output.serving, batch.labels, batch.known, len(batch))
    if teacher is None or not distill.weight:
        return loss
    logits, there = teacher.look_up(batch.impressions)
    wanted = (torch.sigmoid(logits) * distill.label_scale).clamp(0, 1)
    each = F.binary_cross_entropy_with_logits(output.distilled, wanted, reduction="none")
    return loss + distill.weight * (each * there[:, None]).sum() / len(batch)
