"""The dense part of GEM on several processes: replicated (DDP), or sharded by layer (FSDP2)."""

from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from training.distributed.process_group import REPLICATE, SHARD
from training.model.gem import Gem, GemOutput
from training.model.heads import ZilnDistribution
from training.model.hyformer import HyFormerLayer
from training.model.interaction import DCNv2, FinalMlp
from training.model.interaction.dcn_dhen import DhenLayer
from training.model.interaction.token_mixing import MixerBlock
from training.model.interaction.wukong import WukongLayer
from training.model.running_statistics import RunningStatistics
from training.model.sequence.layers import HstuLayer, TransformerLayer

INTERACTION_LAYERS = (WukongLayer, DhenLayer, DCNv2, FinalMlp, MixerBlock, HyFormerLayer)
SHARDED_LAYERS = (*INTERACTION_LAYERS, HstuLayer, TransformerLayer)

for output_type in (GemOutput, ZilnDistribution):  # FSDP searches the output for tensors
    torch.export.register_dataclass(output_type)


class SynchronizedBuffers(nn.Module):
    """Keeps the buffers of a model equal on all processes.

    Before a step they are broadcast from rank 0, as DDP does, except running statistics: after a
    training step these are of the batches of all processes.
    """

    def __init__(self, core: Gem, dense: nn.Module) -> None:
        """`dense` is the model as it is distributed: itself if FSDP sharded it, else its DDP."""
        super().__init__()
        self.core, self.dense = core, dense
        self.running = [m for m in core.modules() if isinstance(m, RunningStatistics)]

    def forward(self, *inputs: Any) -> GemOutput:
        """The output of the model."""
        statistics = {id(x) for module in self.running for x in module.buffers(recurse=False)}
        for buffer in self.core.buffers():
            if id(buffer) not in statistics:
                dist.broadcast(buffer, 0)
        if not self.core.training:
            return cast("GemOutput", self.dense(*inputs))
        for module in self.running:
            module.start_step()
        output: GemOutput = self.dense(*inputs)
        self._synchronize_statistics()
        return output

    @torch.no_grad()
    def _synchronize_statistics(self) -> None:
        """Add what each process read in the step to the statistics of all of them."""
        increments = [module.increments() for module in self.running]
        tensors = list(chain.from_iterable(increments))
        flat = torch.cat([x.flatten().double() for x in tensors])
        dist.all_reduce(flat)
        parts = iter(flat.split([x.numel() for x in tensors]))
        for module, added in zip(self.running, increments, strict=True):
            module.add([next(parts).view_as(x) for x in added])
            for largest in module.maxima():
                dist.all_reduce(largest, dist.ReduceOp.MAX)


def parallelize(core: Gem, ema: AveragedModel, mesh: DeviceMesh, sharded: bool) -> nn.Module:
    """Wrap a GEM for the processes of a mesh; its moving average is sharded the same way.

    Without `sharded` every process has all weights (DDP). With it each shard group holds them once
    (FSDP); several groups are replicas of each other (HSDP). With one process the model is
    returned unchanged.
    """
    if mesh.size() == 1:
        return core
    if not sharded:
        ddp = DistributedDataParallel(core, find_unused_parameters=True, broadcast_buffers=False)
        return SynchronizedBuffers(core, ddp)
    fsdp_mesh = mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh
    for model in (core, ema.module):
        for layer in layers_to_shard(model):
            fully_shard(layer, mesh=fsdp_mesh)
        root: FSDPModule = fully_shard(model, mesh=fsdp_mesh)
        # Processes with different batches must reduce the same gradients.
        root.set_reduce_scatter_unused_params(True)
    return SynchronizedBuffers(core, core)


def layers_to_shard(core: nn.Module) -> list[nn.Module]:
    """Interaction layers, sequence layers and the trunk, each gathered when it is computed.

    Layers within a layer are gathered with it. The rest of the model is gathered for the whole
    step.
    """
    layers = [
        (name, layer)
        for name, layer in core.named_modules()
        if isinstance(layer, SHARDED_LAYERS) or name == "trunk"
    ]
    return [layer for name, layer in layers if not _is_inside(name, layers)]


def _is_inside(name: str, layers: Iterable[tuple[str, nn.Module]]) -> bool:
    return any(name.startswith(f"{outer}.") for outer, _ in layers)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients to a norm of at most `max_norm` over all weights; returns the norm before.

    With FSDP the norm is that over the shards of all processes; a collective call.
    """
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
