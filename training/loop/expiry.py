"""Rows of tables that nobody has asked for in a long time start anew; all others stay as they are.

A table of items is a ring and one of users goes by hash: who gets a row next should not begin as
one that is long gone. N rows of a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from features.inputs import ITEM
from training.model.lookup import ItemRows, Tables

NEVER = 0  # since the row was made


@dataclass
class Asked:
    """Tables, and when each row of each was last asked for: `days` (N) by name, as ordinals."""

    tables: Tables
    days: dict[str, Tensor]
    today: int = NEVER

    @classmethod
    def never(cls, tables: Tables, rows: Mapping[str, int]) -> "Asked":
        """Of tables of so many rows, by name."""
        days = {name: torch.full((n,), NEVER, dtype=torch.int32) for name, n in rows.items()}
        return cls(tables, days)

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        for name, asked in ids.items():
            self.days[name][asked] = self.today
        return self.tables(ids)

    def told_by_all(self) -> None:
        """Whatever any process was asked for."""
        for days in self.days.values():
            dist.all_reduce(days, dist.ReduceOp.MAX)

    def gone(
        self, new: Tensor, ring: ItemRows, day: date, after_days: int | None
    ) -> dict[str, Tensor]:
        """Rows (n) of each table that are to start a day anew.

        Those that were asked for, but not in `after_days` days, and those of old items of which
        the day's `new` items (n) take the place.
        """
        oldest = (day - timedelta(days=after_days)).toordinal() if after_days else NEVER
        found = {name: (days > NEVER) & (days < oldest) for name, days in self.days.items()}
        taken = ring(new[new >= ring.rows])
        found[ITEM][taken] = self.days[ITEM][taken] > NEVER
        return {name: rows.nonzero().flatten() for name, rows in found.items()}

    def forget(self, gone: Mapping[str, Tensor]) -> None:
        """Rows were made anew."""
        for name, rows in gone.items():
            self.days[name][rows] = NEVER
