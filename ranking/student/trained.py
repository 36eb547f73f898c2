"""A student with its embedding tables and the builder of its inputs: what is trained and exported.

B examples, C candidates, H hidden width, O objectives.
"""

import numpy as np
import torch
from torch import Tensor

from features.schema import ITEM_TABLE, USER_TABLE
from ranking.inputs.arrays import CategoricalIds, InputLookup
from ranking.inputs.from_tables import InputBuilder
from ranking.scoring.predictions import BatchScores
from ranking.student.config import StudentConfig
from ranking.student.model import Student
from ranking.student.position import SwapPositionBias
from training.data.batch import Batch
from training.data.matching import match_batch, matched_gaps
from training.data.reader import ExampleReader
from training.model.embeddings import EmbeddingTables, TorchEmbeddingTables, table_sizes
from training.model.history.search import RecencyEmbedding
from training.teacher.embeddings import TeacherEmbeddings


class EmbeddingLookup:
    """Looks up rows of embedding tables; in training some items are replaced by the unknown one."""

    def __init__(self, tables: EmbeddingTables, item_dropout: float = 0.0) -> None:
        self.tables, self.item_dropout = tables, item_dropout

    def __call__(self, categorical: CategoricalIds, content_vectors: np.ndarray) -> Tensor:
        """Rows of all tables side by side, by name of table, then the content vectors (…, V)."""
        ids = {name: torch.from_numpy(index) for name, index in categorical.items()}
        if self.item_dropout and ITEM_TABLE in ids:
            is_kept = torch.rand(ids[ITEM_TABLE].shape) >= self.item_dropout
            ids[ITEM_TABLE] = ids[ITEM_TABLE] * is_kept
        rows = self.tables(ids)
        in_order = [rows[name] for name in sorted(rows)]
        return torch.cat([*in_order, torch.from_numpy(content_vectors)], -1)


class TrainedStudent:
    """A student with its embedding tables and the builder of its inputs.

    `num_items` is the number of items that it was trained on: items from that index on are unknown.
    `shared_gem` is the version of the GEM whose modules it started with; None without.
    `teacher_versions` are the GEMs whose predictions its weights have learned.
    """

    shared_gem: str | None = None
    teacher_versions: frozenset[str] = frozenset()

    def __init__(
        self,
        student: Student,
        tables: TorchEmbeddingTables,
        num_items: int,
        input_builder: InputBuilder,
    ) -> None:
        self.student, self.tables = student, tables
        self.num_items, self.input_builder = num_items, input_builder

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden layer (B, H) of the examples of a batch.

        In training their gaps between events are added to the population's.
        """
        if self.student.training:
            self._update_inter_arrival(batch)
        inputs, lookup = self.input_builder(batch), self.lookup()
        hidden: Tensor = self.student(
            lookup.user_inputs(inputs.requests), lookup.candidate_inputs(inputs.candidates)
        )
        return hidden[torch.from_numpy(inputs.candidate_index.mask)]

    def _update_inter_arrival(self, batch: Batch) -> None:
        columns = self.input_builder.reader.features.similarity_columns
        for name, recency in zip(columns, self.student.recency, strict=True):
            assert isinstance(recency, RecencyEmbedding)
            gaps = matched_gaps(match_batch(batch, name), batch, recency.num_types)
            recency.inter_arrival.update(gaps)

    def lookup(self) -> InputLookup[Tensor]:
        """The lookup of the student's inputs in its tables."""
        dropout = self.student.config.item_dropout if self.student.training else 0.0
        similarity_columns = self.input_builder.reader.features.similarity_columns
        return InputLookup(
            EmbeddingLookup(self.tables, dropout),
            torch.from_numpy,
            similarity_columns,
            self.num_items,
        )

    def position_effects(self, batch: Batch) -> Tensor:
        """What the logged positions of a batch add to the logits of the served one (B, O)."""
        if self.student.position_bias is None:
            return torch.zeros(1, len(self.input_builder.reader.features.objectives))
        effects: Tensor = self.student.position_bias(self._positions(batch), batch.surface)
        return effects

    def _positions(self, batch: Batch) -> Tensor:
        features = self.input_builder.reader.features
        assert features.position is not None
        return batch.row_numeric[:, features.numeric_columns.index(features.position.column)]

    def learn_position_effects(self, batch: Batch, logits: Tensor, passes: int) -> None:
        """Learn effects of positions from pairs of ads, given logits (B, O) without them.

        Each of the passes over a batch counts as its share of the evidence.
        """
        bias = self.student.position_bias
        if isinstance(bias, SwapPositionBias):
            bias.update(self._positions(batch), batch, logits, passes)

    def logits(self, batch: Batch) -> Tensor:
        """Logits (B, O) of the examples of a batch at their logged positions."""
        return self._logits_of(self.hidden(batch), batch)

    def _logits_of(self, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = self.student.head(hidden) + self.position_effects(batch)
        return logits

    def score(self, batch: Batch) -> BatchScores:
        """Logits at logged positions, and expected values of outcomes, not calibrated.

        Values are NaN for objectives without values, or of which none has been learned.
        """
        hidden = self.hidden(batch)
        logits, head = self._logits_of(hidden, batch), self.student.value_head
        if head is None:
            return BatchScores(logits)
        values = np.full(logits.shape, np.nan)
        values[:, head.objective_index] = head(hidden).detach().double().exp().numpy()
        return BatchScores(logits, values)


def new_student(
    reader: ExampleReader,
    config: StudentConfig,
    num_items: int,
    teacher_embeddings: TeacherEmbeddings,
) -> TrainedStudent:
    """A randomly initialized student for a number of items."""
    rows = table_sizes(reader.features, num_items, config.user_hash_buckets)
    tables = TorchEmbeddingTables(rows, config.embedding_dim, zero_init=(USER_TABLE,))
    input_builder = InputBuilder(reader, teacher_embeddings, config.input_limits)
    return TrainedStudent(Student(reader.features, config), tables, num_items, input_builder)
