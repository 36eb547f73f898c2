"""Embedding tables, their sizes, the look-up of a batch, and rows of features.

B rows (candidates), R requests, P events that are read, I items, n ids or examples, F numeric
features, d embedding width.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from etl.tables.schemas import RESERVED_ITEM_INDICES
from features.schema import ITEM_TABLE, USER_TABLE, FeatureSchema
from training.data.batch import Batch


class EmbeddingTables(Protocol):
    """Interface of the embedding back ends: ids (n) by table to vectors (n, d) by table."""

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""


NO_ITEM = -1  # the item of a row that is free
UNKNOWN_ITEM_ROW = 0  # of items without a row of their own
UNKNOWN_VALUE_ROW = 1  # of a table of an attribute; row 0 is a missing value


@dataclass(frozen=True)
class ItemRowMap:
    """Maps item indexes to rows of the item table; `row_items` (N) is the item of each row.

    An item without a row of its own reads row 0, that of the unknown item. No two items share
    another row.
    """

    row_items: Tensor

    @cached_property
    def _rows_by_offset(self) -> tuple[int, Tensor]:
        """The lowest item L with a row, and the rows of items L - 1, L, ... up to one too far."""
        rows = (self.row_items > NO_ITEM).nonzero().flatten()
        items = self.row_items[rows]
        if not len(items):
            return 0, rows.new_zeros(2)
        first, last = int(items.min()), int(items.max())
        by_offset = rows.new_zeros(last - first + 3)
        by_offset[items - first + 1] = rows
        return first, by_offset

    def __call__(self, items: Tensor) -> Tensor:
        """Map item indexes (n) to table rows (n)."""
        first, rows = self._rows_by_offset
        return rows[(items - (first - 1)).clamp(0, len(rows) - 1)]


def item_row_map_up_to(count: int) -> ItemRowMap:
    """The map in which each item below `count` has the row of its index, and other items row 0."""
    items = torch.arange(count)
    return ItemRowMap(torch.where(items >= RESERVED_ITEM_INDICES, items, NO_ITEM))


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
    """Vectors by table: `candidates` (B, d), `users` (R, d) and `events` (P, d).

    The vectors of `unknown_events` (P) are not those of their items but of the unknown item; None
    if nothing asks.
    """

    candidates: dict[str, Tensor]
    users: dict[str, Tensor]
    events: dict[str, Tensor]
    unknown_events: Tensor | None = None

    @classmethod
    def of_batch(
        cls, batch: Batch, vectors: Mapping[str, Tensor], unknown_events: Tensor | None = None
    ) -> "EmbeddingVectors":
        """The vectors (n, d) of the `table_ids` of a batch, divided by its parts."""
        shared = {
            name: vectors[name].split((len(batch), len(vectors[name]) - len(batch)))
            for name in (*batch.history.item_categorical, ITEM_TABLE)
        }
        user_tables = [name for name in (*batch.user_categorical, USER_TABLE) if name in vectors]
        return cls(
            candidates={name: vectors[name] for name in batch.row_categorical}
            | {name: of_candidates for name, (of_candidates, _) in shared.items()},
            users={name: vectors[name] for name in user_tables},
            events={name: of_events for name, (_, of_events) in shared.items()},
            unknown_events=unknown_events,
        )

    def map(
        self, transform: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    ) -> "EmbeddingVectors":
        """The vectors after a transformation of each part."""
        candidates, users, events = map(transform, (self.candidates, self.users, self.events))
        return EmbeddingVectors(candidates, users, events, self.unknown_events)


def lookup_embeddings(
    tables: EmbeddingTables,
    batch: Batch,
    event_positions: Tensor,
    item_rows: Callable[[Tensor], Tensor],
    user_buckets: int = 0,
) -> EmbeddingVectors:
    """Look up all vectors of a batch, with one call to the tables; see `table_ids`."""
    ids = table_ids(batch, event_positions, item_rows, user_buckets)
    return EmbeddingVectors.of_batch(batch, tables(ids))


def table_ids(
    batch: Batch,
    event_positions: Tensor,
    item_rows: Callable[[Tensor], Tensor],
    user_buckets: int = 0,
) -> dict[str, Tensor]:
    """The ids that a batch looks up, by table.

    Those of tables that candidates and events share are of the B candidates, then of the P events.

    Args:
        batch: The batch.
        event_positions: Positions (P) of the events that are read.
        item_rows: Maps item indexes to rows of the item table.
        user_buckets: Rows of the user table; 0 for no table.
    """
    shared_ids = {
        name: torch.cat((batch.row_categorical[name], ids[event_positions]))
        for name, ids in batch.history.item_categorical.items()
    }
    shared_ids[ITEM_TABLE] = item_rows(
        torch.cat((batch.item_index, batch.history.item_index[event_positions]))
    )
    user_ids = dict(batch.user_categorical)
    if user_buckets:
        user_ids[USER_TABLE] = batch.user_hash % user_buckets
    return batch.row_categorical | shared_ids | user_ids


class NarrowEmbeddings(nn.Module):
    """Vectors (n, d) of attributes with few values as linear maps of their first w entries.

    w = factor * rows^(1/4), so that a feature of few values has few parameters. With a factor of 0,
    and for all tables where w is not below d, vectors stay as they are. The unused entries are
    stored, because TorchRec's collection has one width; these tables are small.
    """

    def __init__(self, cardinalities: Mapping[str, int], width: int, factor: float) -> None:
        super().__init__()
        self.by_table = nn.ModuleDict()
        for name, rows in cardinalities.items():
            narrow = math.ceil(factor * rows**0.25)
            if 0 < narrow < width:
                linear = self.by_table[name] = nn.Linear(narrow, width, bias=False)
                nn.init.normal_(linear.weight, std=narrow**-0.5)

    def forward(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Vectors (n, d) of all tables, by name."""
        return {name: self._project(name, values) for name, values in vectors.items()}

    def _project(self, name: str, values: Tensor) -> Tensor:
        if name not in self.by_table:
            return values
        linear = cast("nn.Linear", self.by_table[name])
        projected: Tensor = linear(values[:, : linear.in_features])
        return projected


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


SHARED_ROW = "shared|{}"


class GroupedFeatureRows(nn.Module):
    """Feature vectors (n, d) to interaction rows (n, d), low-cardinality features grouped.

    A separate row for a feature with few values would cost as much as a row of a strong feature,
    and its interactions are mostly noise. Features with fewer than `threshold` values are
    concatenated and projected to `shared_rows` rows (Wukong, 2403.02545, section 3.1).
    `trained_rows` are the names of the rows of a trained model, which stay as they are.
    """

    def __init__(
        self,
        cardinalities: Mapping[str, int],
        width: int,
        threshold: int,
        shared_rows: int,
        trained_rows: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        small = [name for name, size in cardinalities.items() if size < threshold]
        shares = len(small) > shared_rows
        if trained_rows is not None:
            shares = SHARED_ROW.format(0) in trained_rows
            small = [name for name in small if name not in trained_rows]
        self.low_cardinality = tuple(small) if shares else ()
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

    @property
    def row_names(self) -> tuple[str, ...]:
        """The names of the rows: features with their own row, then numbered shared ones."""
        return (*self.high_cardinality, *map(SHARED_ROW.format, range(self.shared_rows)))

    def forward(self, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows (n, d): those of high-cardinality features first, then the shared ones."""
        rows = [vectors[name] for name in self.high_cardinality]
        if self.project:
            grouped = torch.cat([vectors[name] for name in self.low_cardinality], 1)
            rows += self.project(grouped).chunk(self.shared_rows, 1)
        return rows
