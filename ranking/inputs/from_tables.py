"""Batches of stored examples as the arrays that rankers read."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from etl.tables.lake import Lake
from features.encoding.scalar import dequantize_int4
from features.encoding.vectors import concat_vectors
from features.recency import NO_EVENT_AGE
from features.schema import ITEM_TABLE, USER_TABLE
from ranking.inputs.arrays import (
    CandidateFeatures,
    CategoricalIds,
    ItemFeatures,
    PaddedIndex,
    RequestFeatures,
    TeacherHistoryFeatures,
    pad_last,
    pad_slices,
)
from ranking.inputs.recency_features import RecencyArrays, recency_features
from ranking.student.config import InputLimits
from training.data.batch import Batch
from training.data.reader import ExampleReader
from training.teacher.embeddings import TeacherEmbeddings, load_teacher_embeddings


@dataclass(frozen=True)
class RankerInputs:
    """Requests and their candidates; `candidate_index` maps rows of the batch to candidates."""

    requests: RequestFeatures
    candidates: CandidateFeatures
    candidate_index: PaddedIndex


@dataclass(frozen=True)
class InputBuilder:
    """Builds a ranker's inputs from batches of examples and from teacher embeddings."""

    reader: ExampleReader
    teacher_embeddings: TeacherEmbeddings
    input_limits: InputLimits

    def __call__(self, batch: Batch) -> RankerInputs:
        """The arrays of a batch."""
        counts = np.bincount(batch.request_index.numpy(), minlength=len(batch.as_of))
        offsets = np.concatenate(([0], np.cumsum(counts)))
        rows = pad_last(offsets, int(counts.max(initial=0)))
        return RankerInputs(
            self._request_features(batch), self._candidate_features(batch, rows), rows
        )

    def _request_features(self, batch: Batch) -> RequestFeatures:
        history = batch.history
        pad = pad_last(history.offsets.numpy(), self.input_limits.encoded_events)
        item_ids = {ITEM_TABLE: history.item_index} | history.item_categorical
        user_ids = {name: v.numpy() for name, v in batch.user_categorical.items()}
        return RequestFeatures(
            events=ItemFeatures(
                {name: pad(v.numpy()) for name, v in item_ids.items()},
                pad(_concat_vectors(len(history.item_index), history.item_vectors)),
            ),
            types=pad(history.types.numpy()),
            surfaces=pad(history.surfaces.numpy()),
            dwells=pad(history.dwells.numpy()),
            age_seconds=pad(history.age_seconds.numpy()).astype(np.float32),
            user_categorical=user_ids | self._user_table_ids(batch),
            user_numeric=batch.user_numeric.numpy(),
            user_vectors=_concat_vectors(len(batch.as_of), batch.user_vectors),
            teacher_history=self._teacher_history(batch),
        )

    def _user_table_ids(self, batch: Batch) -> CategoricalIds:
        buckets = self.input_limits.user_hash_buckets
        return {USER_TABLE: batch.user_hash.numpy() % buckets} if buckets else {}

    def _candidate_features(self, batch: Batch, index: PaddedIndex) -> CandidateFeatures:
        features = self.reader.features
        ids = {name: index(v.numpy()) for name, v in batch.row_categorical.items()}
        item_ids = {name: ids[name] for name in features.item.categorical}
        return CandidateFeatures(
            items=ItemFeatures(
                {ITEM_TABLE: index(batch.item_index.numpy())} | item_ids,
                index(_concat_vectors(len(batch), batch.row_vectors)),
            ),
            context_categorical={name: ids[name] for name in features.context.categorical},
            context_vectors=index(_concat_vectors(len(batch), batch.context_vectors)),
            numeric=index(batch.row_numeric.numpy(), np.nan),
            surfaces=index(batch.surface.numpy()),
            recency=tuple(
                self._recency_features(batch, name, index) for name in features.similarity_columns
            ),
            mask=index.mask,
        )

    def _recency_features(self, batch: Batch, column: str, index: PaddedIndex) -> RecencyArrays:
        history = batch.history
        recency = recency_features(
            batch.row_categorical[column].numpy(),
            batch.request_index.numpy(),
            history.item_categorical[column].numpy(),
            history.offsets.numpy(),
            history.types.numpy(),
            history.age_seconds.numpy(),
            1 + len(self.reader.features.events),
        )
        return RecencyArrays(
            index(recency.last_age, NO_EVENT_AGE), index(recency.span), index(recency.gap_count)
        )

    def _teacher_history(self, batch: Batch) -> TeacherHistoryFeatures:
        table, as_of, stored = self.reader.items, batch.as_of.numpy(), self.teacher_embeddings
        max_impressions = self.input_limits.teacher_history_length
        pad = pad_slices(*stored.latest(batch.user_ids, as_of, max_impressions))
        item_index = pad(stored.item_index)
        versions = table.versions_at(item_index, np.broadcast_to(as_of[:, None], item_index.shape))
        no_vectors = np.zeros((*item_index.shape, 0), np.float32)
        vectors = [no_vectors, *(v[versions] for v in table.vectors.values())]
        item_ids = {name: v[versions] for name, v in table.categorical.items()}
        embeddings = dequantize_int4(pad(stored.embedding_int4))
        return TeacherHistoryFeatures(
            items=ItemFeatures({ITEM_TABLE: item_index} | item_ids, np.concatenate(vectors, -1)),
            teacher_embeddings=embeddings * pad.mask[..., None].astype(np.float32),
            age_seconds=_age_seconds(pad, as_of, stored.impression_ts),
        )


def load_teacher_history(
    lake: Lake, input_limits: InputLimits, compressor_version: str | None = None
) -> TeacherEmbeddings:
    """The teacher embeddings of a lake, or none if a ranker of these limits reads none.

    They are those of the compressor that the ranker was trained with, by default of the latest one.
    """
    if not input_limits.teacher_history_length:
        return TeacherEmbeddings.empty()
    return load_teacher_embeddings(lake, compressor_version)


def _age_seconds(index: PaddedIndex, as_of: np.ndarray, impression_ts: np.ndarray) -> np.ndarray:
    ages = as_of[:, None] - index(impression_ts)
    return np.where(index.mask, np.maximum(ages, 1), 0).astype(np.float32)


def _concat_vectors(num_rows: int, vectors: Mapping[str, Tensor]) -> np.ndarray:
    return concat_vectors([v.numpy() for v in vectors.values()], num_rows)
