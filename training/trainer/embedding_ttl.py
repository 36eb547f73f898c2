"""Time-to-live of embedding rows: rows without recent access are reset.

The item table is a ring and the user table is hashed, so rows are reused: a new user should not
start with the embedding of a user who left long ago. N rows of a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from features.schema import ITEM_TABLE
from training.model.embeddings import EmbeddingTables, ItemRowMap

NEVER = 0  # not accessed since the row was initialized


@dataclass
class LastAccess:
    """Embedding tables that record the day of each row's last access.

    `last_days` (N, by table) and `today` are ordinals of days.
    """

    tables: EmbeddingTables
    last_days: dict[str, Tensor]
    today: int = NEVER

    @classmethod
    def never_accessed(cls, tables: EmbeddingTables, rows: Mapping[str, int]) -> "LastAccess":
        """The state of newly initialized tables; `rows` is the number of rows by table name."""
        last_days = {name: torch.full((n,), NEVER, dtype=torch.int32) for name, n in rows.items()}
        return cls(tables, last_days)

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up ids (n) of each table, and record the access."""
        for name, rows in ids.items():
            self.last_days[name][rows] = self.today
        return self.tables(ids)

    def all_reduce(self) -> None:
        """Set the last access to the maximum over all processes; a collective call."""
        for days in self.last_days.values():
            dist.all_reduce(days, dist.ReduceOp.MAX)

    def expired_rows(
        self, new_items: Tensor, item_rows: ItemRowMap, day: date, ttl_days: int | None
    ) -> dict[str, Tensor]:
        """Rows (n) of each table to reset before a day.

        These are rows that were accessed before, but not in the last `ttl_days` days (None: never
        expire), and rows of old items that are reused by the day's `new_items` (n).
        """
        oldest = (day - timedelta(days=ttl_days)).toordinal() if ttl_days else NEVER
        is_expired = {
            name: (days > NEVER) & (days < oldest) for name, days in self.last_days.items()
        }
        reused = item_rows(new_items[new_items >= item_rows.num_rows])
        is_expired[ITEM_TABLE][reused] = self.last_days[ITEM_TABLE][reused] > NEVER
        return {name: mask.nonzero().flatten() for name, mask in is_expired.items()}

    def reset(self, expired: Mapping[str, Tensor]) -> None:
        """Record that rows were reinitialized."""
        for name, rows in expired.items():
            self.last_days[name][rows] = NEVER
