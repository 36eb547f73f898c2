"""How GEM is computed: in which precision, what is compiled, and what is computed once more.

None of this changes what is learned, but for rounding.
"""

import os

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from etl.cache import user_cache
from training.config import ComputeOptions
from training.model.gem import Gem
from training.model.interaction import DCNv2, TwoStreams
from training.model.interaction.dhen import DhenLayer
from training.model.interaction.wukong import WukongLayer
from training.model.sequence.level import Level

Blocks = tuple[type[nn.Module], ...]
DENSE: Blocks = (WukongLayer, DhenLayer, DCNv2, TwoStreams)
AGAIN: dict[str, Blocks] = {"nothing": (), "sequence": (Level,), "blocks": (Level, *DENSE)}


def prepare(core: Gem, options: ComputeOptions, backend: str = "inductor") -> None:
    """Have blocks of a GEM computed as told; their parameters and names stay.

    What was compiled stays in the user's cache, so the next start is a warm one.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache("compiled")))
    for block in core.modules():
        if options.compiled and isinstance(block, DENSE):
            _compile(block, backend)
        if isinstance(block, AGAIN[options.recompute]):
            checkpoint(block)
    if options.precision == "bf16":
        for side in (core.interaction, core.history.encoder):
            _in_bf16(side)


def _compile(block: nn.Module, backend: str) -> None:
    """Once for all sizes of a batch: every size that weights do not tell is a symbol."""
    compiled = torch.compile(block.forward, dynamic=True, backend=backend)
    block.forward = compiled


def _in_bf16(side: nn.Module) -> None:
    """Products of a whole side; weights, sums of residual streams and heads stay fp32."""
    device = next(side.parameters()).device.type
    block = torch.autocast(device, torch.bfloat16)(side.forward)
    side.forward = block
