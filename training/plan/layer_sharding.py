"""Which dense layers to shard: the fastest choice that fits in memory, by dynamic programming.

The recursion over layers and memory is that of Lattice's Sketch (2512.09200): OPT[l, r] = min over
schemes s of OPT[l - 1, r - R(s)] + T(s). A layer that is replicated keeps its weights, gradient and
moments on each GPU and sums its gradient over all; a sharded one (FSDP) keeps its part, and gathers
its weights for the forward and for the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from training.plan.cost_model import DENSE_BYTES, Hardware, ring_all_reduce_seconds

LayerScheme = Literal["replicate", "shard"]
LAYER_SCHEMES: tuple[LayerScheme, ...] = ("replicate", "shard")
WEIGHT_BYTES = 4
MEMORY_STEPS = 1000  # the memory is divided into so many parts


@dataclass(frozen=True)
class LayerCost:
    """Bytes on a GPU and seconds of communication in a step, of a layer under a scheme."""

    memory: float
    seconds: float


@dataclass(frozen=True)
class LayerPlan:
    """The scheme of each layer, and their bytes and seconds together."""

    schemes: tuple[LayerScheme, ...]
    memory: float
    seconds: float


def layer_cost(hardware: Hardware, parameters: float, gpus: int, scheme: LayerScheme) -> LayerCost:
    """The cost of a layer with some parameters on a number of GPUs.

    Half of an all-reduce is a reduce-scatter or a gather: a sharded layer has three of them.
    """
    all_reduce = ring_all_reduce_seconds(hardware, WEIGHT_BYTES * parameters, gpus)
    if scheme == "replicate":
        return LayerCost(DENSE_BYTES * parameters, all_reduce)
    return LayerCost(DENSE_BYTES * parameters / gpus, 1.5 * all_reduce)


def gathered_bytes(layers: Sequence[float]) -> float:
    """Bytes of the largest layer, which is gathered while it is used if it is sharded."""
    return WEIGHT_BYTES * max(layers, default=0.0)


def plan_layers(
    hardware: Hardware, layers: Sequence[float], gpus: int, memory: float
) -> LayerPlan | None:
    """The fastest schemes of layers, given their parameters, within some bytes of a GPU.

    None if they do not fit even when all are sharded.
    """
    budget = memory - gathered_bytes(layers)
    unit = budget / MEMORY_STEPS
    if unit <= 0:
        return None
    # By used parts of the memory: the seconds of the layers so far, and their schemes.
    best: dict[int, tuple[float, tuple[LayerScheme, ...]]] = {0: (0.0, ())}
    for parameters in layers:
        following: dict[int, tuple[float, tuple[LayerScheme, ...]]] = {}
        for scheme in LAYER_SCHEMES:
            cost = layer_cost(hardware, parameters, gpus, scheme)
            parts = -int(-cost.memory // unit)
            for used, (seconds, schemes) in best.items():
                total = used + parts
                candidate = seconds + cost.seconds, (*schemes, scheme)
                if total <= MEMORY_STEPS and candidate < following.get(total, (float("inf"), ())):
                    following[total] = candidate
        best = following
    if not best:
        return None
    seconds, schemes = min(best.values())
    used_bytes = sum(
        layer_cost(hardware, parameters, gpus, scheme).memory
        for parameters, scheme in zip(layers, schemes, strict=True)
    )
    return LayerPlan(schemes, used_bytes, seconds)
