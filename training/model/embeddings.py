"""Embedding tables, their sizes, the look-up of a batch, and rows of numeric features.

B rows (candidates), R requests, P events that are read, I items, n ids or examples, F numeric
features, d embedding width.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etl.tables.schemas import RESERVED_ITEM_INDICES
from features.schema import ITEM_TABLE, USER_TABLE, FeatureSchema
from training.data.batch import Batch


class EmbeddingTables(Protocol):
    """Interface of the embedding back ends: ids (n) by table to vectors (n, d) by table."""

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""


@dataclass(frozen=True)
class ItemRowMap:
    """Maps item indexes to rows of a table of `num_rows` rows; row 0 is that of the unknown item.

    Rows are assigned in a ring: when the table is full, new items take the rows of the oldest ones,
    so the table has a fixed size. `known` (I) marks the items that the model has been trained on.
    """

    num_rows: int
    known: Tensor

    def __call__(self, items: Tensor) -> Tensor:
        """Map item indexes (n) to table rows (n)."""
        inside = items < len(self.known)
        known = inside & self.known[torch.where(inside, items, 0)]
        return torch.where(known, 1 + (items - 1) % (self.num_rows - 1), 0)


def item_row_map_up_to(count: int) -> ItemRowMap:
    """The map in which each item below `count` has its own row, and other items row 0."""
    return ItemRowMap(count, torch.arange(count) >= RESERVED_ITEM_INDICES)


def table_sizes(features: FeatureSchema, item_rows: int, user_buckets: int = 0) -> dict[str, int]:
    """Rows of each embedding table, by name.

    One table for items, shared by candidates and events; one for each categorical attribute; one
    for users if `user_buckets` is not 0.
    """
    sizes = {ITEM_TABLE: item_rows}
    if user_buckets:
        sizes[USER_TABLE] = user_buckets
    for group in (features.user, features.item, features.context):
        sizes |= group.categorical
    return sizes


@dataclass(frozen=True)
class EmbeddingVectors:
    """Vectors by table: `candidates` (B, d), `users` (R, d) and `events` (P, d)."""

    candidates: dict[str, Tensor]
    users: dict[str, Tensor]
    events: dict[str, Tensor]


def lookup_embeddings(
    tables: EmbeddingTables,
    batch: Batch,
    event_positions: Tensor,
    item_row_map: ItemRowMap,
    item_dropout: float = 0.0,
    user_buckets: int = 0,
) -> EmbeddingVectors:
    """Look up all vectors of a batch, with one call to the tables.

    Args:
        tables: The embedding back end.
        batch: The batch.
        event_positions: Positions (P) of the events that are read.
        item_row_map: Rows of the items.
        item_dropout: Probability that an item is replaced by the unknown item, which trains row 0
            and keeps the model from relying on ids alone.
        user_buckets: Rows of the user table; 0 for no table.
    """
    # Tables that candidates and events share: ids of the B candidates, then of the P events.
    shared_ids = {
        name: torch.cat((batch.row_categorical[name], ids[event_positions]))
        for name, ids in batch.history.item_categorical.items()
    }
    item = item_row_map(torch.cat((batch.item_index, batch.history.item_index[event_positions])))
    if item_dropout:
        item = torch.where(torch.rand(len(item), device=item.device) < item_dropout, 0, item)
    shared_ids[ITEM_TABLE] = item
    context_ids = {
        name: ids for name, ids in batch.row_categorical.items() if name not in shared_ids
    }
    user_ids = dict(batch.user_categorical)
    if user_buckets:
        user_ids[USER_TABLE] = batch.user_hash % user_buckets
    vectors = tables(shared_ids | context_ids | user_ids)
    rows = len(batch)
    candidates = {name: vectors[name][:rows] for name in shared_ids}
    candidates |= {name: vectors[name] for name in context_ids}
    return EmbeddingVectors(
        candidates=candidates,
        users={name: vectors[name] for name in user_ids},
        events={name: vectors[name][rows:] for name in shared_ids},
    )


class TorchEmbeddingTables(nn.Module):
    """One sparse `nn.Embedding` for each table: ids (…) to vectors (…, d).

    Used by students, and by GEM on platforms without fbgemm. Tables in `zero_init` are initialized
    with zeros, so that untrained rows have no effect.
    """

    def __init__(
        self, table_sizes: dict[str, int], width: int, zero_init: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(rows, width, sparse=True) for name, rows in table_sizes.items()}
        )
        for key, weight in self.named_parameters():
            nn.init.normal_(weight, std=0.0 if key.split(".")[-2] in zero_init else 0.05)

    def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        return {name: self.tables[name](values) for name, values in ids.items()}

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """AdaGrad; with sparse gradients it reads and writes only the rows of a batch."""
        return torch.optim.Adagrad(self.parameters(), lr=learning_rate, eps=1e-8)


class GroupedFeatureRows(nn.Module):
    """Feature vectors (n, d) to interaction rows (n, d), low-cardinality features grouped.

    A separate row for a feature with few values would cost as much as a row of a strong feature,
    and its interactions are mostly noise. Features with fewer than `threshold` values are
    concatenated and projected to `shared_rows` rows (Wukong, 2403.02545, section 3.1).
    """

    def __init__(
        self, cardinalities: Mapping[str, int], width: int, threshold: int, shared_rows: int
    ) -> None:
        super().__init__()
        small = [name for name, size in cardinalities.items() if size < threshold]
        self.low_cardinality = tuple(small) if len(small) > shared_rows else ()
        self.high_cardinality = tuple(
            name for name in cardinalities if name not in self.low_cardinality
        )
        self.shared_rows = shared_rows if self.low_cardinality else 0
        self.rows = len(self.high_cardinality) + self.shared_rows
        self.project = (
            nn.Linear(len(self.low_cardinality) * width, shared_rows * width)
            if self.low_cardinality
            else None
        )

    def forward(self, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows (n, d): those of high-cardinality features first, then the shared ones."""
        rows = [vectors[name] for name in self.high_cardinality]
        if self.project:
            grouped = torch.cat([vectors[name] for name in self.low_cardinality], 1)
            rows += self.project(grouped).chunk(self.shared_rows, 1)
        return rows


class RunningStandardizer(nn.Module):
    """Standardizes values (B, F) by running mean and variance; NaN and infinite values become 0.

    In training the statistics are updated with a batch before it is scaled, so training and serving
    apply the same formula.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, num_features: int, max_count: float = 20_000) -> None:
        super().__init__()
        self.max_count = max_count
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))
        self.register_buffer("count", torch.zeros(num_features))

    def forward(self, values: Tensor) -> Tensor:
        """(B, F) to (B, F), clipped to six standard deviations."""
        finite = values.isfinite()
        if self.training:
            self._update(torch.where(finite, values, torch.nan))
        scaled = (values - self.mean) * torch.rsqrt(self.variance + 1e-6)
        return torch.where(finite, scaled, 0.0).clamp(-6, 6)

    @torch.no_grad()
    def _update(self, values: Tensor) -> None:
        """Merge the statistics of a batch (Chan's parallel formula); NaN is not counted.

        The count is capped at `max_count`, which makes the statistics a moving average.
        """
        count = (~values.isnan()).sum(0)
        mean = values.nanmean(0).nan_to_num(0.0)
        variance = ((values - mean) ** 2).nanmean(0).nan_to_num(0.0)
        weight = count / (self.count + count).clamp(min=1)
        delta = mean - self.mean
        self.variance += weight * (variance - self.variance + (1 - weight) * delta**2)
        self.mean += weight * delta
        self.count.copy_((self.count + count).clamp(max=self.max_count))


BINS, BIN_RANGE = 16, 3.0  # equal bins from -3 to 3 standard deviations


class NumericRows(NamedTuple):
    """`rows` (B, rows, d) for the interaction module, and the `standardized` values (B, F)."""

    rows: Tensor
    standardized: Tensor


class NumericEmbedding(nn.Module):
    """Values (B, F), NaN where missing, to `rows` rows of width d, by an MLP.

    The first linear layer adds a learned vector of each value's bin, initialized with zeros: a
    piecewise constant function, as in trees (binned numeric embeddings, 2203.05556).
    """

    bin_offsets: Tensor

    def __init__(self, num_features: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.standardizer = RunningStandardizer(num_features)
        self.linear = nn.Linear(2 * num_features, hidden)
        self.bins = nn.Parameter(torch.zeros(max(1, num_features) * BINS, hidden))
        self.out = nn.Linear(hidden, rows * width)
        self.rows = rows
        self.register_buffer("bin_offsets", torch.arange(num_features) * BINS, persistent=False)

    def forward(self, values: Tensor) -> NumericRows:
        """Rows and standardized values; a missing value counts as the mean and is flagged."""
        scaled = self.standardizer(values)
        h = self.linear(torch.cat((scaled, (~values.isfinite()).float()), 1))
        if values.shape[1]:
            bins = ((scaled + BIN_RANGE) * (BINS / (2 * BIN_RANGE))).long().clamp(0, BINS - 1)
            h = h + F.embedding_bag(bins + self.bin_offsets, self.bins, mode="sum")
        return NumericRows(self.out(torch.relu(h)).unflatten(1, (self.rows, -1)), scaled)
