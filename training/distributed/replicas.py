"""Copies of the embedding tables on replica groups, averaged every few steps.

2D sparse parallelism, 2508.03854. n rows, d table width, T tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from training.distributed.process_group import REPLICATE
from training.distributed.sharding import LocalShard, local_shards


class TouchedRows:
    """The rows of this process's shards that were looked up, by any process of its group.

    Only these can have changed. `masks` are (n), by table.
    """

    def __init__(self, tables: DistributedModelParallel) -> None:
        shards = shards_by_table(tables.state_dict())
        self.masks = {
            name: torch.zeros(len(shard.rows), dtype=torch.uint8, device=shard.rows.device)
            for name, shard in shards.items()
        }
        tables.module.collection.register_post_lookup_tracker_fn(self._record)

    def _record(self, features: KeyedJaggedTensor, *_: Any) -> None:
        """Record a look-up; its ids are relative to the shards of this process."""
        for name, lookup in features.to_dict().items():
            if name in self.masks:
                self.masks[name].index_fill_(0, lookup.values().long(), 1)

    def take(self, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Rows (n) that any replica touched since the last call, by table; a collective call.

        The host waits for their number, on which the size of the exchange of rows depends.
        """
        flat = torch.cat(list(self.masks.values())) if self.masks else torch.zeros(0)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
        parts = flat.split([len(mask) for mask in self.masks.values()])
        for mask in self.masks.values():
            mask.zero_()
        return {
            name: part.nonzero().flatten() for name, part in zip(self.masks, parts, strict=True)
        }


def shards_by_table(values: dict[str, Any]) -> dict[str, LocalShard]:
    """The shard of each table, or of a table's optimizer state, that this process holds."""
    return {
        key.split(".")[-2]: shard for key, value in values.items() for shard in local_shards(value)
    }


@dataclass(frozen=True)
class RowsOfShards:
    """Some rows (n, …) of several tensors, which are reduced as one flat tensor."""

    tensors: Sequence[Tensor]
    rows: Sequence[Tensor]

    def gather(self) -> Tensor:
        """A flat copy of the rows."""
        return torch.cat(
            [x[rows].flatten() for x, rows in zip(self.tensors, self.rows, strict=True)]
        )

    def scatter(self, flat: Tensor) -> None:
        """Write rows from a flat tensor."""
        sizes = [len(rows) * x[:1].numel() for x, rows in zip(self.tensors, self.rows, strict=True)]
        for x, rows, part in zip(self.tensors, self.rows, flat.split(sizes), strict=True):
            values = part.view(len(rows), *x.shape[1:])
            x.index_put_((rows,), values)


@dataclass(frozen=True)
class PendingAverage:
    """An all-reduce in progress: the rows, the copy that was sent, and the resulting sum."""

    state: RowsOfShards
    sent: Tensor
    total: Tensor
    work: dist.Work


class ReplicaSync:
    """Averages the touched rows over the replica groups every `sync_every` steps.

    All rows are sent in one all-reduce; rows that no group looked up since the last one are equal
    already. The average of the optimizer state is applied one synchronization later, on top of the
    changes since then, so that no step waits for it.
    """

    def __init__(self, tables: DistributedModelParallel, mesh: DeviceMesh, sync_every: int) -> None:
        self.tables, self.sync_every = tables, sync_every
        self._group, self._num_replicas = mesh[REPLICATE].get_group(), mesh[REPLICATE].size()
        self._touched = TouchedRows(tables) if self._num_replicas > 1 else None
        self._pending: PendingAverage | None = None

    @torch.no_grad()
    def after_step(self, steps: int) -> None:
        """Synchronize if it is due after so many steps; all processes must call this.

        Steps are counted from the start of training, so that a resumed one synchronizes after the
        same steps.
        """
        if self._touched and steps % self.sync_every == 0:
            rows = self._touched.take(self._group)
            self._average(self._weights(rows))
            self._apply_pending()
            self._start_state_reduce(rows)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make weights and optimizer states of all replicas equal, e.g. before a checkpoint."""
        if self._touched:
            rows = self._touched.take(self._group)
            self._apply_pending()
            self._average(self._weights(rows), self._states(rows))

    def _weights(self, rows: dict[str, Tensor]) -> RowsOfShards:
        shards = shards_by_table(self.tables.state_dict())
        return RowsOfShards([shards[name].rows for name in rows], list(rows.values()))

    def _states(self, rows: dict[str, Tensor]) -> RowsOfShards:
        tensors, selected = [], []
        for key, values in self.tables.fused_optimizer.state_dict()["state"].items():
            for value in values.values():
                for shard in local_shards(value):
                    tensors.append(shard.rows)
                    selected.append(rows[key.split(".")[-2]])
        return RowsOfShards(tensors, selected)

    def _average(self, *parts: RowsOfShards) -> None:
        flat = [part.gather() for part in parts if part.tensors]
        if not flat:
            return
        total = torch.cat(flat)
        dist.all_reduce(total, group=self._group)
        total.div_(self._num_replicas)
        for part, values in zip(
            [part for part in parts if part.tensors], total.split(list(map(len, flat))), strict=True
        ):
            part.scatter(values)

    def _start_state_reduce(self, rows: dict[str, Tensor]) -> None:
        state = self._states(rows)
        if not state.tensors:
            return
        sent = state.gather()
        total = sent.clone()
        work = dist.all_reduce(total, group=self._group, async_op=True)
        assert work is not None
        self._pending = PendingAverage(state, sent, total, work)

    def _apply_pending(self) -> None:
        if self._pending:
            self._pending.work.wait()
            sent, mean = self._pending.sent, self._pending.total / self._num_replicas
            now = self._pending.state.gather()
            # A row that has not changed since gets the mean to the last bit, as on all replicas.
            self._pending.state.scatter(torch.where(now == sent, mean, now + (mean - sent)))
            self._pending = None
