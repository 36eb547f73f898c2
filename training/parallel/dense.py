"""The dense part on many processes: copied (DDP), or its weights spread (FSDP2, HSDP)."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from training.model.gem import Gem, Output
from training.model.value import Worth
from training.parallel.mesh import REPLICATE, SHARD

for passed_through in (Output, Worth):  # FSDP looks for tensors in what a model returns
    torch.export.register_dataclass(passed_through)


class Touched(nn.Module):
    """A GEM whose weights all have a gradient, zero where a batch had no use for them.

    Processes have to agree on what they reduce, and their batches differ. What a model notes of its
    inputs is that of the first process, as with DDP.
    """

    def __init__(self, core: Gem) -> None:
        super().__init__()
        self.core = core

    def forward(self, *inputs: Any) -> Output:
        """What the model puts out."""
        for noted in self.core.buffers():
            dist.broadcast(noted, 0)
        output: Output = self.core(*inputs)
        nothing = sum(weight.sum() for weight in self.core.parameters()) * 0.0
        return replace(output, logits=output.logits + nothing)


def spread(core: Gem, average: AveragedModel, mesh: DeviceMesh, sharded: bool) -> nn.Module:
    """A GEM, spread over the processes of a mesh; its average lies as it does.

    Sharded, a group holds the weights once between its processes (FSDP), and each further group
    again (HSDP). Alone it stays as it is.
    """
    if mesh.size() == 1:
        return core
    if not sharded:
        return DistributedDataParallel(core, find_unused_parameters=True)
    within = mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh
    for model in (core, average.module):
        fully_shard(model, mesh=within)
    return Touched(core)
