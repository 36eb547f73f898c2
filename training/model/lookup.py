"""What is looked up in embedding tables for a batch, each table once.

B rows, R requests, N events of which P are read, d width of a table.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from etl.tables.contracts import RESERVED_ITEMS
from features.inputs import ITEM, USER, Features
from training.data.batch import Batch


class Tables(Protocol):
    """Embedding tables, by whatever backend: ids (n) of each table to vectors (n, d)."""

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        ...


@dataclass(frozen=True)
class ItemRows:
    """Which row of a table of `rows` rows an item has; row 0 is the unknown item's.

    New items take the rows of the oldest ones when the table is full (a ring), so that it never
    grows and no new item stays unknown. `known` (I) tells the items that the model has learned.
    """

    rows: int
    known: Tensor

    def __call__(self, items: Tensor) -> Tensor:
        """Item indexes (n) to rows (n)."""
        inside = items < len(self.known)
        known = inside & self.known[torch.where(inside, items, 0)]
        return torch.where(known, 1 + (items - 1) % (self.rows - 1), 0)


def first_items(count: int) -> ItemRows:
    """A row for each of the items below `count`, and for no other."""
    return ItemRows(count, torch.arange(count) >= RESERVED_ITEMS)


def table_rows(features: Features, items: int, users: int = 0) -> dict[str, int]:
    """Rows of each table: one for items, shared by candidates and events, one an attribute.

    A table of `users` rows where there are any.
    """
    groups = (features.user.ids, features.item.ids, features.context.ids)
    own = {ITEM: items} | ({USER: users} if users else {})
    return own | {name: rows for ids in groups for name, rows in ids.items()}


@dataclass(frozen=True)
class Vectors:
    """Looked-up vectors: `rows` (B, d), `users` (R, d) and `events` (P, d) by table."""

    rows: dict[str, Tensor]
    users: dict[str, Tensor]
    events: dict[str, Tensor]


def look_up(
    tables: Tables,
    batch: Batch,
    events: Tensor,
    items: ItemRows,
    dropout: float = 0.0,
    users: int = 0,
) -> Vectors:
    """All vectors of a batch, `events` (P) the positions of the events that are read.

    `dropout` is the share of items that are made unknown, so that row 0 is trained and the model
    does not lean on ids alone; `users` the rows of their table, if they have one.
    """
    ids = {
        name: torch.cat((batch.row_ids[name], ids[events]))
        for name, ids in batch.history.item_ids.items()
    }
    item = items(torch.cat((batch.item, batch.history.items[events])))
    if dropout:
        item = torch.where(torch.rand(len(item), device=item.device) < dropout, 0, item)
    ids[ITEM] = item
    context = {name: row for name, row in batch.row_ids.items() if name not in ids}
    user_ids = dict(batch.user_ids)
    if users:
        user_ids[USER] = batch.user % users
    found = tables(ids | context | user_ids)
    b = len(batch)
    return Vectors(
        rows={name: found[name][:b] for name in ids} | {name: found[name] for name in context},
        users={name: found[name] for name in user_ids},
        events={name: found[name][b:] for name in ids},
    )
