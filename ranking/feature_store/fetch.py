"""Fetches the features of a live request, as the arrays that rankers read.

The features are those that `features/` computes offline for a logged request, read from the feature
store as of the time of the request.

C candidates of one request, N events of its user, F numeric features.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np

from features.encoding.scalar import dequantize_int4
from features.schema import ITEM_TABLE, USER_TABLE
from ranking.feature_store.counter_keys import context_key_values_of_request, counter_key_values
from ranking.feature_store.encoded_attributes import EncodedAttributes
from ranking.feature_store.items import read_item_records
from ranking.feature_store.request import RankRequest, encode_context, validate_request
from ranking.feature_store.storage import (
    BID_DTYPE,
    TEACHER_HISTORY_DTYPE,
    UNKNOWN,
    Txn,
    latest_versions,
    storage_key,
)
from ranking.feature_store.store import FeatureStore
from ranking.inputs.arrays import (
    CandidateFeatures,
    CategoricalIds,
    ItemFeatures,
    RequestFeatures,
    TeacherHistoryFeatures,
)
from ranking.inputs.recency_features import RecencyArrays, recency_features
from ranking.scoring.candidates import CandidateBids
from ranking.student.config import InputLimits


@dataclass(frozen=True)
class RankInputs:
    """What a ranker and the auction read of one request and its candidates (C).

    `is_known_item` (C) is False for candidates that the store has never seen.
    """

    requests: RequestFeatures
    candidates: CandidateFeatures
    bids: CandidateBids
    is_known_item: np.ndarray


@dataclass(frozen=True)
class FeatureFetcher:
    """Fetches the inputs of a ranker with given limits from a feature store."""

    store: FeatureStore
    input_limits: InputLimits

    def __call__(self, request: RankRequest) -> RankInputs:
        """Fetch the inputs of a request, as of its time or now.

        Raises:
            UserError: The request does not fit the spec.
        """
        validate_request(self.store.spec, request)
        as_of = int(time.time()) if request.as_of is None else request.as_of
        with self.store.read_transaction() as txn:
            snapshot = RequestSnapshot(self.store, self.input_limits, txn, request, as_of)
            return snapshot.rank_inputs()


@dataclass(frozen=True)
class RequestSnapshot:
    """One request against one snapshot of the store; `as_of` in seconds."""

    store: FeatureStore
    input_limits: InputLimits
    txn: Txn
    request: RankRequest
    as_of: int

    def rank_inputs(self) -> RankInputs:
        """All inputs of the request."""
        user_key = storage_key(self.request.user)
        history = self.store.histories.visible_events(self.txn, user_key, self.as_of)
        events = history[-self.input_limits.max_length :]
        return RankInputs(
            requests=self._request_features(events),
            candidates=self._candidate_features(events),
            bids=self._candidate_bids(),
            is_known_item=self._item_records["index"] != UNKNOWN,
        )

    def _request_features(self, events: np.ndarray) -> RequestFeatures:
        encoded = events[-self.input_limits.encoded_events :]
        if not len(events):
            encoded = np.zeros(1, events.dtype)  # padding
        ages = (self.as_of - encoded["visible_ts"]) * (len(events) > 0)
        stored = self.txn.get("users", storage_key(self.request.user))
        user = latest_versions([stored], self.store.layout.user, self.as_of)
        categorical = id_columns(user, self.store.layout.features.user.categorical)
        return RequestFeatures(
            events=self._item_features(encoded["item"]),
            types=_with_request_axis(encoded["type"]),
            surfaces=_with_request_axis(encoded["surface"]),
            dwells=_with_request_axis(encoded["dwell"]),
            age_seconds=ages.astype(np.float32)[None],
            user_categorical=categorical | self._user_hash_ids(),
            user_numeric=user["numbers"].copy(),
            user_vectors=user["content_vectors"].copy(),
            teacher_history=self._teacher_history(),
        )

    def _user_hash_ids(self) -> CategoricalIds:
        buckets = self.input_limits.user_hash_buckets
        if not buckets:
            return {}
        return {USER_TABLE: np.array([crc32(self.request.user.encode()) % buckets])}

    def _teacher_history(self) -> TeacherHistoryFeatures:
        stored = self.txn.get("teacher_history", storage_key(self.request.user))
        rows = np.frombuffer(stored, TEACHER_HISTORY_DTYPE)
        num_visible = int(np.searchsorted(rows["visible_ts"], self.as_of))
        first = max(0, num_visible - self.input_limits.teacher_history_length)
        rows = rows[first:num_visible]
        has_history = len(rows) > 0
        if not has_history:
            rows = np.zeros(1, TEACHER_HISTORY_DTYPE)  # padding
        embeddings = dequantize_int4(rows["teacher_embedding_int4"])
        ages = np.maximum(self.as_of - rows["impression_ts"], 1) * has_history
        return TeacherHistoryFeatures(
            items=self._item_features(rows["item"]),
            teacher_embeddings=embeddings[None] * np.float32(has_history),
            age_seconds=ages.astype(np.float32)[None],
        )

    def _candidate_features(self, events: np.ndarray) -> CandidateFeatures:
        spec, features = self.store.spec, self.store.layout.features
        indices = np.maximum(self._item_records["index"], 0)
        versions = self._item_versions(indices)
        items = self._items_of_versions(indices, versions)
        count = len(self.request.candidates)
        context = encode_context(spec, features.context, self.request, self.as_of)
        context = context.repeated(count // len(self.request.contexts))
        counts = features.counter_transform(self._counter_values(context))
        numeric = np.concatenate((versions["numbers"], context.numbers, counts), 1)
        return CandidateFeatures(
            items=items,
            context_categorical={
                name: ids[None]
                for name, ids in zip(features.context.categorical, context.ids.T, strict=True)
            },
            context_vectors=context.vectors[None],
            numeric=numeric[None],
            surfaces=np.full((1, count), spec.surface_codes[self.request.surface]),
            recency=self._recency_features(items.categorical, events),
            mask=np.ones((1, count), bool),
        )

    def _recency_features(
        self, candidate_ids: CategoricalIds, events: np.ndarray
    ) -> tuple[RecencyArrays, ...]:
        """Recency features of the candidates, for each attribute by which items are compared."""
        features = self.store.layout.features
        event_versions = self._item_versions(events["item"])
        columns = list(features.item.categorical)
        result = []
        for name in features.similarity_columns:
            recency = recency_features(
                candidate_values=candidate_ids[name][0],
                request_index=np.zeros(len(self.request.candidates), np.int64),
                event_values=event_versions["ids"][:, columns.index(name)],
                offsets=np.array([0, len(events)]),
                types=events["type"].astype(np.int64),
                age_seconds=self.as_of - events["visible_ts"],
                num_types=1 + len(features.events),
            )
            result.append(
                RecencyArrays(recency.last_age[None], recency.span[None], recency.gap_count[None])
            )
        return tuple(result)

    @cached_property
    def _item_records(self) -> np.ndarray:
        """The item records of the candidates (C)."""
        return read_item_records(self.store.layout, self.txn, self.request.candidates)

    def _counter_values(self, context: EncodedAttributes) -> np.ndarray:
        """The counters of each candidate (C, counters), in the order of the spec."""
        counters, request = self.store.counters, self.request
        key_values = counter_key_values(
            self.store.layout,
            self.txn,
            request.user,
            request.surface,
            self._item_records,
            self.as_of,
        )
        key_values |= context_key_values_of_request(self.store.layout, context)
        record_keys = counters.record_keys(key_values)
        distinct = list({key: None for column in record_keys for key in column})
        row_of_key = {key: row for row, key in enumerate(distinct)}
        rows = np.array([[row_of_key[key] for key in column] for column in record_keys])
        values = counters.values(self.txn, distinct, self.as_of)[rows.T]
        return np.asarray(values.reshape(len(request.candidates), -1), np.float32)

    def _item_features(self, indices: np.ndarray) -> ItemFeatures:
        """Features of items (n), given by their indices, with an axis for the request (1, n)."""
        return self._items_of_versions(indices, self._item_versions(indices))

    def _items_of_versions(self, indices: np.ndarray, versions: np.ndarray) -> ItemFeatures:
        columns = id_columns(versions, self.store.layout.features.item.categorical)
        categorical = {name: column[None] for name, column in columns.items()}
        return ItemFeatures(
            {ITEM_TABLE: _with_request_axis(indices)} | categorical,
            versions["content_vectors"][None].copy(),
        )

    def _item_versions(self, indices: np.ndarray) -> np.ndarray:
        """The attribute versions of items (n), valid strictly before the request."""
        distinct, position = np.unique(indices.astype(np.int64), return_inverse=True)
        keys = [int(index).to_bytes(4, "big") for index in distinct]
        stored = self.txn.get_many("item_versions", keys)
        versions = latest_versions(stored, self.store.layout.item, self.as_of)
        return np.asarray(versions[position])

    def _candidate_bids(self) -> CandidateBids:
        """The bids (C) that were valid strictly before the request."""
        auction = self.store.spec.auction
        goals = [None, *(auction.goal_objectives if auction else ())]
        stored = self.txn.get_many("bids", [storage_key(item) for item in self.request.candidates])
        bids = latest_versions(stored, BID_DTYPE, self.as_of)
        return CandidateBids(
            bids=bids["bid"],
            goals=[goals[goal] for goal in bids["goal"]],
            target_roas=bids["target_roas"],
            advertisers=bids["advertiser"],
        )


def _with_request_axis(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64)[None]


def id_columns(versions: np.ndarray, names: Iterable[str]) -> CategoricalIds:
    """The categorical ids of versions (n), by attribute."""
    return dict(zip(names, versions["ids"].T.copy(), strict=True))
