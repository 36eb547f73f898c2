"""Time-to-live of embedding rows: rows without recent access are reset.

The user table is hashed, so its rows are reused: a new user should not start with the embedding of
a user who left long ago. Rows of the item table are freed: `training.trainer.item_rows`. N rows of
a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from training.model.embeddings import EmbeddingTables

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
        self.record(ids)
        return self.tables(ids)

    def record(self, ids: Mapping[str, Tensor]) -> None:
        """Record the access to ids (n) of each table."""
        for name, rows in ids.items():
            self.last_days[name][rows] = self.today

    def all_reduce(self) -> None:
        """Set the last access to the maximum over all processes; a collective call."""
        for days in self.last_days.values():
            dist.all_reduce(days, dist.ReduceOp.MAX)

    def expired_rows(self, day: date, ttl_days: int | None) -> dict[str, Tensor]:
        """Rows (n) of each table that expire before a day.

        These are rows that were accessed before, but not in the last `ttl_days` days (None: rows
        never expire).
        """
        oldest = (day - timedelta(days=ttl_days)).toordinal() if ttl_days else NEVER
        return {
            name: ((days > NEVER) & (days < oldest)).nonzero().flatten()
            for name, days in self.last_days.items()
        }

    def reset(self, rows: Mapping[str, Tensor]) -> None:
        """Record that rows were reinitialized and belong to nobody."""
        for name, reset_rows in rows.items():
            self.last_days[name][reset_rows] = NEVER
