"""The dense part of GEM on several processes: replicated (DDP), or sharded by layer (FSDP2)."""

from collections.abc import Iterable
from typing import Any

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
from training.model.sequence.layers import HstuLayer, TransformerLayer

SHARDED_LAYERS = (
    WukongLayer,
    DhenLayer,
    DCNv2,
    FinalMlp,
    MixerBlock,
    HyFormerLayer,
    HstuLayer,
    TransformerLayer,
)

for output_type in (GemOutput, ZilnDistribution):  # FSDP searches the output for tensors
    torch.export.register_dataclass(output_type)


class BufferBroadcast(nn.Module):
    """Broadcasts buffers, such as running statistics, from rank 0 before a step, as DDP does."""

    def __init__(self, core: Gem) -> None:
        super().__init__()
        self.core = core

    def forward(self, *inputs: Any) -> GemOutput:
        """The output of the model."""
        for buffer in self.core.buffers():
            dist.broadcast(buffer, 0)
        output: GemOutput = self.core(*inputs)
        return output


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
        for layer in layers_to_shard(model):
            fully_shard(layer, mesh=fsdp_mesh)
        root: FSDPModule = fully_shard(model, mesh=fsdp_mesh)
        # Processes with different batches must reduce the same gradients.
        root.set_reduce_scatter_unused_params(True)
    return BufferBroadcast(core)


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
