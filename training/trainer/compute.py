"""How GEM is computed: precision, compilation and activation checkpointing.

These options do not change the results, except for rounding errors, which are large with FP8.
"""

import os

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from etl.runtime.cache import user_cache
from training.config import ComputeConfig
from training.distributed.dense import INTERACTION_LAYERS
from training.model.gem import Gem
from training.model.sequence.layers import HstuLayer, TransformerLayer
from training.model.sequence.pyramid import PersonalizedFFNBlock, PyramidLevel
from training.precision.linear import apply_precision_map
from training.precision.precision_map import PrecisionMap

Blocks = tuple[type[nn.Module], ...]
SEQUENCE_BLOCKS: Blocks = (TransformerLayer, HstuLayer, PersonalizedFFNBlock)
COMPILED_BLOCKS: Blocks = (*INTERACTION_LAYERS, *SEQUENCE_BLOCKS)
CHECKPOINTED_BLOCKS: dict[str, Blocks] = {
    "none": (),
    "sequence": (PyramidLevel,),
    "blocks": (PyramidLevel, *INTERACTION_LAYERS),
}


def apply_compute_config(
    core: Gem,
    config: ComputeConfig,
    precision_map: PrecisionMap | None = None,
    backend: str = "inductor",
) -> None:
    """Apply a configuration to the blocks of a GEM, in place; parameter names do not change.

    With fp8 linear layers are computed as `precision_map` says, other products in bf16. Compiled
    code is cached for the user, to speed up the next start.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache("compiled")))
    for block in core.modules():
        if config.compiled and isinstance(block, COMPILED_BLOCKS):
            _compile(block, backend)
        if isinstance(block, CHECKPOINTED_BLOCKS[config.activation_checkpointing]):
            checkpoint(block)
    # With bf16, matrix products that stay in fp32 may use TF32 on CUDA.
    torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
    if config.precision == "fp8" and precision_map:
        apply_precision_map(core, precision_map)
    if config.precision in ("bf16", "fp8"):
        _autocast_bf16(core.interaction)
        _autocast_bf16(core.history.encoder)
        _autocast_bf16(core.trunk)


def _compile(block: nn.Module, backend: str) -> None:
    """Compile a block once for all batch sizes: sizes not fixed by weights are dynamic."""
    compiled = torch.compile(block.forward, dynamic=True, fullgraph=True, backend=backend)
    block.forward = compiled


def _autocast_bf16(module: nn.Module) -> None:
    """Compute matrix products in bf16; weights, residual sums and heads stay in fp32."""
    device = next(module.parameters()).device.type
    block = torch.autocast(device, torch.bfloat16)(module.forward)
    module.forward = block
