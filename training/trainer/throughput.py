"""Throughput of training: effective training time, model cost, and FLOPs utilization (MFU).

FLOPs are those of matrix products, two per multiply-add, counted on one batch of real (ragged)
tokens; a backward pass costs as much as two forward passes. Embedding lookups have none.
Computations shared by the rows of a request are counted once.
"""

import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from training.data.batch import Batch
from training.distributed.device import CPU
from training.model.embeddings import table_sizes
from training.trainer.state import TrainState

FIRST_STEP, STEPS = "first step", "steps"
MATMUL_SIZES = {"cpu": 512, "cuda": 4096}
DENSE_STATE_COPIES = 4  # weights, their average, AdamW's two moments
FLOAT_BYTES = 4


class Timeline:
    """The seconds of a process by activity, without gaps.

    `start` is its start on the monotonic clock, by default now.
    """

    def __init__(self, start: float | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.monotonic() if start is None else start

    def record(self, name: str) -> None:
        """Attribute the time since the last call to an activity."""
        now = time.monotonic()
        self.seconds[name] += now - self._last
        self._last = now

    def record_step(self) -> None:
        """Attribute it to a training step; the first, which compiles, is counted separately."""
        self.record(STEPS if FIRST_STEP in self.seconds else FIRST_STEP)

    @property
    def effective_time_ratio(self) -> float:
        """Effective training time: the share of all seconds spent on training steps."""
        return self.seconds[STEPS] / max(sum(self.seconds.values()), 1e-9)

    def __str__(self) -> str:
        """One line, the longest activity first."""
        longest = sorted(self.seconds.items(), key=lambda span: -span[1])
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)
        return f"effective training time {self.effective_time_ratio:.0%}: {parts}"


@dataclass(frozen=True)
class ModelCost:
    """The size of a model, and its FLOPs per example, forward and backward."""

    dense_parameters: int
    table_parameters: int
    table_rows: int
    flops_per_example: float

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and optimizer states; row-wise AdaGrad keeps one number per row."""
        dense = DENSE_STATE_COPIES * self.dense_parameters
        return FLOAT_BYTES * (dense + self.table_parameters + self.table_rows)

    def __str__(self) -> str:
        """The line that training prints."""
        return (
            f"{self.dense_parameters / 1e6:.2f} M dense parameters, "
            f"{self.table_parameters / 1e6:.1f} M in tables, "
            f"{self.memory_bytes / 1e6:,.0f} MB with optimizers, "
            f"{self.flops_per_example / 1e6:.1f} MFLOP per example"
        )


def measure_cost(state: TrainState, batch: Batch) -> ModelCost:
    """The cost of a model, measured on a batch; the model does not change."""
    model, config = state.model, state.manifest.training
    sizes = config.gem_config
    was_training = model.core.training
    model.core.eval()
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch)
    model.core.train(was_training)
    tables = table_sizes(model.core.features, config.item_table_rows, sizes.user_hash_buckets)
    rows = sum(tables.values())
    return ModelCost(
        dense_parameters=sum(p.numel() for p in model.core.parameters()),
        table_parameters=rows * sizes.embedding_dim,
        table_rows=rows,
        flops_per_example=3 * counter.get_total_flops() / len(batch),
    )


@cache
def peak_flops(device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> float:
    """FLOPs per second of a square matrix product, on this process's threads or its card."""
    size = MATMUL_SIZES[device.type]
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    a @ b
    synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    synchronize(device)
    return 10 * 2 * size**3 / (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ThroughputMeter:
    """Prints the model's cost before the first step, then measures FLOPs per second and MFU."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.cost: ModelCost | None = None
        self.examples = 0
        self.start_time = 0.0
        self.device = CPU

    def before_step(self, state: TrainState, batch: Batch) -> None:
        """Record a batch that was read; the first one is used to measure the cost."""
        self.timeline.record("reading")
        if self.cost is None:
            self.cost = measure_cost(state, batch)
            if dist.get_rank() == 0:
                tqdm.write(f"GEM {state.manifest.training.scale}: {self.cost}", sys.stderr)
            self.device = batch.item_index.device
            peak_flops(self.device)  # measured before the first step
            self.start_time = time.perf_counter()
            self.timeline.record("counting")

    def after_step(self, batch: Batch) -> dict[str, str]:
        """FLOP/s since the first step, and MFU: their share of the peak, waiting included."""
        assert self.cost is not None
        self.timeline.record_step()
        self.examples += len(batch)
        seconds = time.perf_counter() - self.start_time
        flops = self.examples * self.cost.flops_per_example / seconds
        return {"GFLOP/s": f"{flops / 1e9:.1f}", "MFU": f"{flops / peak_flops(self.device):.0%}"}
