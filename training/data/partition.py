"""Partitions of examples: some days of one bucket with their labels, sorted by request."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Bools, Float32, Float64, Int64
from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.tables.arrow import Snapshot
from features.encoding.vectors import VectorColumn
from features.ragged import run_starts
from features.schema import FeatureSchema
from training.data.label_window import LabelWindow
from training.data.labels import Labels, label_columns, labels_of

KEY_COLUMNS = ("day", "impression_id", "request_id", "user_id", "item_index", "surface")
HISTORY_POINTER_COLUMNS = ("as_of_ts", "history_length")


@dataclass(frozen=True)
class ExamplePartition:
    """B impressions sorted by request; `request_offsets` (R+1) cut them into R requests.

    `request_ids`, `user_ids`, `user_hashes`, `as_of` and `history_length` have R rows; the last two
    point into the users' histories. All other fields have B rows.
    """

    request_offsets: Int64
    request_ids: npt.NDArray[np.object_]
    user_ids: pa.Array
    user_hashes: Int64
    as_of: Int64
    history_length: Int64
    item_index: Int64
    surface: Int64
    categorical: dict[str, Int64]
    user_numeric: Float32
    numeric: Float32
    vectors: dict[str, VectorColumn]
    labels: Float32
    label_mask: Bools
    outcome_values: Float32
    extra_labels: Float32
    extra_mask: Bools
    swap_weights: Float32
    impression_ids: npt.NDArray[np.object_]

    @cached_property
    def user_ids_array(self) -> npt.NDArray[np.object_]:
        """`user_ids` (R) as a NumPy array."""
        return np.asarray(self.user_ids)


@dataclass(frozen=True)
class PartitionLoader:
    """Reads partitions from the tables `examples` and `impressions`.

    If `surfaces` (codes) is not empty, impressions of other surfaces are skipped.
    """

    spec: DataSpec
    features: FeatureSchema
    examples: Snapshot
    impressions: Snapshot
    surfaces: Sequence[int] = ()

    def load(
        self, days: Sequence[date], bucket: int, label_window: LabelWindow
    ) -> ExamplePartition | None:
        """The impressions that have a label in a window; None if there are none.

        Raises UserError if a label should be final but is null in the table.
        """
        rows = self._read_examples(days, bucket)
        table = self._load_impressions(days, bucket, rows, label_window)
        labels = self._labels_of(days, rows, table, label_window)
        swap_weights = np.zeros((rows.num_rows, 2), np.float32)
        if label_window.includes_swaps:
            swap_weights = neighbour_swap_weights(request_keys(rows), table)
        mask = labels.mask
        if label_window.negative_sampling:
            salt = max(days).toordinal(), bucket
            mask = label_window.negative_sampling(labels.values, mask, *salt)
        selected: Bools = np.logical_or(mask.any(1), label_window.include_unlabelled)
        if label_window.mixes_windows:
            selected |= labels.extra_mask.any(1)
        if self.surfaces:
            selected &= np.isin(rows["surface"].to_numpy(), self.surfaces)
        if not selected.any():
            return None
        rows = rows.filter(pa.array(selected)).combine_chunks()
        return self._partition(rows, labels.of_rows(selected, mask), swap_weights[selected])

    def _read_examples(self, days: Sequence[date], bucket: int) -> pa.Table:
        """The rows of some days, in the order of the table."""
        user, context = self.features.user, self.features.context
        columns = [*KEY_COLUMNS, *HISTORY_POINTER_COLUMNS, *user.categorical, *context.categorical]
        columns += [*user.numeric, *context.numeric, *user.vectors, *context.vectors]
        columns += self.features.counters
        rows = self.examples.read(columns, day=days, bucket=bucket)
        return rows.sort_by([(name, "ascending") for name in self.examples.schema.order_by])

    def _partition(self, rows: pa.Table, labels: Labels, swap_weights: Float32) -> ExamplePartition:
        user, context = self.features.user, self.features.context
        starts = run_starts(request_keys(rows))
        user_ids = rows["user_id"].combine_chunks().take(pa.array(starts))
        request_ids = rows["request_id"].combine_chunks().take(pa.array(starts))
        counters = stack_columns(rows, self.features.counters)
        context_numeric = stack_columns(rows, context.numeric)
        return ExamplePartition(
            request_offsets=np.append(starts, rows.num_rows),
            request_ids=np.asarray(request_ids),
            user_ids=user_ids,
            user_hashes=hash_ids(user_ids),
            as_of=rows["as_of_ts"].to_numpy()[starts],
            history_length=rows["history_length"].to_numpy()[starts].astype(np.int64),
            item_index=rows["item_index"].to_numpy().astype(np.int64),
            surface=rows["surface"].to_numpy().astype(np.int64),
            categorical={
                name: rows[name].to_numpy().astype(np.int64)
                for name in (*user.categorical, *context.categorical)
            },
            user_numeric=stack_columns(rows, user.numeric),
            numeric=np.concatenate(
                (context_numeric, self.features.counter_transform(counters)), axis=1
            ),
            vectors={
                name: VectorColumn(rows[name].combine_chunks(), width)
                for name, width in (user.vectors | context.vectors).items()
            },
            labels=labels.values,
            label_mask=labels.mask,
            outcome_values=labels.outcome_values,
            extra_labels=labels.extra_labels,
            extra_mask=labels.extra_mask,
            swap_weights=swap_weights,
            impression_ids=np.asarray(rows["impression_id"]),
        )

    def _load_impressions(
        self, days: Sequence[date], bucket: int, rows: pa.Table, label_window: LabelWindow
    ) -> pa.Table:
        """The rows of `impressions` (B) of examples."""
        columns = ["impression_id", "day", *label_columns(self.spec, label_window)]
        columns += ["position", "propensity"] if label_window.includes_swaps else []
        table = self.impressions.read(columns, day=days, bucket=bucket)
        index = pc.index_in(impression_keys(rows), impression_keys(table))
        if index.null_count:
            span = f"{min(days)}:{max(days)}"
            raise UserError(f"impressions of {span} lack labels; run `gemline etl labels` for them")
        return table.take(index)

    def _labels_of(
        self, days: Sequence[date], rows: pa.Table, impressions: pa.Table, label_window: LabelWindow
    ) -> Labels:
        draws = np.zeros(rows.num_rows)
        if label_window.mixes_windows:
            draws = window_draws(rows)
        span = f"{min(days)}:{max(days)}"
        return labels_of(self.spec, impressions, draws, label_window, span)


def impression_keys(rows: pa.Table) -> pa.Array:
    """A text for each row (B) of its impression: two days may have the same impression id."""
    day = rows["day"].cast(pa.string())
    return pc.binary_join_element_wise(day, rows["impression_id"], "\x1f").combine_chunks()


def request_keys(rows: pa.Table) -> pa.Array:
    """A text for each row (B) that is the same for all impressions of a request."""
    return pc.binary_join_element_wise(
        rows["user_id"], rows["as_of_ts"].cast(pa.string()), rows["request_id"], "\x1f"
    ).combine_chunks()


def neighbour_swap_weights(requests: pa.Array, impressions: pa.Table) -> Float32:
    """Weights (B, 2) under which two ads at neighbouring positions are as likely in either order.

    The policy draws an ad for each position from those that are left, with the logged propensity p.
    Up to what both orders have in common, ads a and b are drawn in this order with the probability
    1 / (1 - p_a), where a is the upper one. Its inverse is the weight of both.

    Returns:
        The weight of a row as the upper ad of a pair, and as the lower one; 0 without a neighbour
        or without a propensity.
    """
    key = requests.dictionary_encode().indices.to_numpy()
    position = impressions["position"].fill_null(-1).to_numpy()
    propensity = impressions["propensity"].fill_null(1).to_numpy()
    order = np.lexsort((position, key))
    upper, lower = order[:-1], order[1:]
    is_pair = (key[upper] == key[lower]) & (position[lower] == position[upper] + 1)
    is_pair &= position[upper] >= 0
    weights = np.zeros((len(order), 2), np.float32)
    weights[upper, 0] = weights[lower, 1] = np.where(is_pair, 1 - propensity[upper], 0)
    return weights


def hash_ids(ids: pa.Array) -> Int64:
    """The CRC-32 of each id (n), the same on every machine."""
    encoded = ids.dictionary_encode()
    hashes = np.array([crc32(name.encode()) for name in encoded.dictionary.to_pylist()], np.int64)
    return np.asarray(hashes[encoded.indices.to_numpy()], np.int64)


def stack_columns(rows: pa.Table, names: Iterable[str]) -> Float32:
    """Stacked columns (B, F); nulls are NaN."""
    columns = [rows[name].to_numpy().astype(np.float32) for name in names]
    return np.stack(columns, 1) if columns else np.zeros((rows.num_rows, 0), np.float32)


def window_draws(rows: pa.Table) -> Float64:
    """Uniform numbers in [0, 1) of rows (B), from hashes of user, time and item."""
    user = hash_ids(rows["user_id"].combine_chunks()).astype(np.uint64)
    seconds = rows["as_of_ts"].to_numpy().astype(np.uint64)
    items = rows["item_index"].to_numpy().astype(np.uint64)
    requests = (user * np.uint64(0x9E3779B97F4A7C15)) ^ seconds  # the constants are SplitMix64's
    return _uniform(~(requests ^ (items << np.uint64(40))))


def _uniform(hashes: npt.NDArray[np.uint64]) -> Float64:
    """Numbers in [0, 1) from hashes (n), whose bits are mixed."""
    mixed = hashes * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    return np.asarray((mixed >> np.uint64(32)) / 2.0**32)
