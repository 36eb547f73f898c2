"""Data parallelism of the dense part: replicated (DDP) or sharded (FSDP2, HSDP)."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from training.distributed.process_group import REPLICATE, SHARD
from training.model.gem import Gem, GemOutput
from training.model.heads import ZilnDistribution

for output_type in (GemOutput, ZilnDistribution):  # FSDP searches the output for tensors
    torch.export.register_dataclass(output_type)


class FullGradientWrapper(nn.Module):
    """Gives every parameter a gradient (zero if a batch does not use it), and broadcasts buffers.

    With FSDP all processes must reduce the same gradients, although their batches differ.
    Buffers, such as running statistics, are taken from rank 0, as with DDP.
    """

    def __init__(self, core: Gem) -> None:
        super().__init__()
        self.core = core

    def forward(self, *inputs: Any) -> GemOutput:
        """The output of the model."""
        for buffer in self.core.buffers():
            dist.broadcast(buffer, 0)
        output: GemOutput = self.core(*inputs)
        zero = sum(weight.sum() for weight in self.core.parameters()) * 0.0
        return replace(output, logits=output.logits + zero)


def parallelize(core: Gem, ema: AveragedModel, mesh: DeviceMesh, sharded: bool) -> nn.Module:
    """Wrap a GEM for the processes of a mesh; its moving average is sharded the same way.

    Without `sharded` every process has all weights (DDP). With it each shard group holds them once
    (FSDP); several groups are replicas of each other (HSDP). With one process the model is
    returned unchanged.
    """
    if mesh.size() == 1:
        return core
    if not sharded:
        return DistributedDataParallel(core, find_unused_parameters=True)
    fsdp_mesh = mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh
    for model in (core, ema.module):
        fully_shard(model, mesh=fsdp_mesh)
    return FullGradientWrapper(core)
