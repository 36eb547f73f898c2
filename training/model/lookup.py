"""What is looked up in embedding tables for a batch, each table once.

B rows, R requests, N events of which P are read, d width of a table.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from training.data.batch import Batch
from training.data.features import Features

ITEM = "item"


class Tables(Protocol):
    """Embedding tables, by whatever backend: ids (n) of each table to vectors (n, d)."""

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        ...


def table_rows(features: Features, items: int) -> dict[str, int]:
    """Rows of each table: one for items, shared by candidates and events, one an attribute."""
    groups = (features.user.ids, features.item.ids, features.context.ids)
    return {ITEM: items, **{name: rows for ids in groups for name, rows in ids.items()}}


@dataclass(frozen=True)
class Vectors:
    """Looked-up vectors: `rows` (B, d), `users` (R, d) and `events` (P, d) by table."""

    rows: dict[str, Tensor]
    users: dict[str, Tensor]
    events: dict[str, Tensor]


def look_up(
    tables: Tables, batch: Batch, events: Tensor, items: int, item_dropout: float = 0.0
) -> Vectors:
    """All vectors of a batch, `events` (P) the positions of the events that are read.

    Items beyond the table are row 0, the unknown item.

    `item_dropout` is the share of item ids that are made unknown, so that row 0 is trained and
    the model does not lean on ids alone.
    """
    ids = {
        name: torch.cat((batch.row_ids[name], ids[events]))
        for name, ids in batch.history.item_ids.items()
    }
    item = torch.cat((batch.item, batch.history.items[events]))
    item = torch.where(item < items, item, 0)
    if item_dropout:
        item = torch.where(torch.rand(len(item), device=item.device) < item_dropout, 0, item)
    ids[ITEM] = item
    context = {name: row for name, row in batch.row_ids.items() if name not in ids}
    found = tables(ids | context | batch.user_ids)
    b = len(batch)
    return Vectors(
        rows={name: found[name][:b] for name in ids} | {name: found[name] for name in context},
        users={name: found[name] for name in batch.user_ids},
        events={name: found[name][b:] for name in ids},
    )
