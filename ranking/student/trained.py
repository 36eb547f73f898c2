"""A student with its tables and what assembles its inputs."""

import torch
from torch import Tensor

from features.inputs import USER
from ranking.inputs import LookUp
from ranking.student.batches import Assembly, Inputs
from ranking.student.config import StudentConfig
from ranking.student.model import Student
from ranking.student.tensors import Gather
from training.data.batch import Batch
from training.data.reader import Reader
from training.knowledge.earlier import Earlier
from training.model.lookup import table_rows
from training.model.plain import PlainTables


class TrainedStudent:
    """A student that learned of the items below `items`; B rows, O objectives, H hidden width."""

    def __init__(
        self, student: Student, tables: PlainTables, items: int, assembly: Assembly
    ) -> None:
        self.student, self.tables, self.items, self.assembly = student, tables, items, assembly

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden layer (B, H); in training some items are made unknown."""
        return self.hidden_of(self.assembly(batch))

    def hidden_of(self, inputs: Inputs) -> Tensor:
        """The last hidden layer (B, H) of what was assembled."""
        look_up = self.look_up()
        found: Tensor = self.student(
            look_up.user(inputs.requests), look_up.candidates(inputs.candidates)
        )
        return found[torch.from_numpy(inputs.rows.there)]

    def look_up(self) -> LookUp[Tensor]:
        """How ids become inputs of the student."""
        dropout = self.student.config.item_dropout if self.student.training else 0.0
        match = self.assembly.reader.features.match
        return LookUp(Gather(self.tables, dropout), torch.from_numpy, match, self.items)

    def logits(self, batch: Batch) -> Tensor:
        """Logits (B, O)."""
        found: Tensor = self.student.head(self.hidden(batch))
        return found


def new_student(
    reader: Reader, config: StudentConfig, items: int, earlier: Earlier
) -> TrainedStudent:
    """A fresh student for `items` items."""
    rows = table_rows(reader.features, items, config.user_rows)
    tables = PlainTables(rows, config.row_width, blank=(USER,))
    assembly = Assembly(reader, earlier, config.reads)
    return TrainedStudent(Student(reader.features, config), tables, items, assembly)
