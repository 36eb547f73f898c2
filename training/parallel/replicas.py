"""Copies of tables in several groups, kept alike: their rows are averaged every few steps.

Between two times each group learns from its own batches alone (local SGD; 2508.03854). M groups.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed import DistributedModelParallel

from training.parallel.mesh import REPLICATE
from training.parallel.sparse import states_of, weights_of


class Replicas:
    """The copies of a process's shards, averaged every `every` steps.

    The optimizer's state is averaged one time late: what was sent at a time is taken in at the
    next, on top of what was learned meanwhile, so nobody waits for it.
    """

    def __init__(self, tables: DistributedModelParallel, mesh: DeviceMesh, every: int) -> None:
        self.tables, self.every, self.steps = tables, every, 0
        self._group, self._copies = mesh[REPLICATE].get_group(), mesh[REPLICATE].size()
        self._sent: list[tuple[Tensor, Tensor, Tensor, dist.Work]] = []

    def stepped(self) -> None:
        """After a step of all processes."""
        self.steps += 1
        if self._copies > 1 and self.steps % self.every == 0:
            self._average(weights_of(self.tables))
            self._take_in()
            self._send(states_of(self.tables))

    def settle(self) -> None:
        """Make all copies the same, state and all: before they are written."""
        if self._copies > 1:
            self._take_in()
            self._average([*weights_of(self.tables), *states_of(self.tables)])

    def _average(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._group)
            tensor /= self._copies

    def _send(self, states: Sequence[Tensor]) -> None:
        for state in states:
            mine, sum_ = state.clone(), state.clone()
            work = dist.all_reduce(sum_, group=self._group, async_op=True)
            assert work is not None
            self._sent.append((state, mine, sum_, work))

    def _take_in(self) -> None:
        with torch.no_grad():
            for state, mine, sum_, work in self._sent:
                work.wait()
                state += sum_ / self._copies - mine
        self._sent.clear()
