"""What a model costs: its parameters, its memory, the FLOPs of an example, and how busy it keeps
the machine.

FLOPs are those of matrix products on real tokens, two a multiply-add, a backward pass as two
forward ones; look-ups are bytes, not FLOPs. Counted on one batch: a request's part once.
"""

import sys
import time
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from training.data.batch import Batch
from training.loop.checkpoint import Trained
from training.loop.timeline import Timeline
from training.model.lookup import table_rows

SIDE = 512
DENSE_COPIES = 4  # weights, their average, AdamW's two moments
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Cost:
    """Of a model on batches like one: `flops` of an example, forward and backward."""

    dense: int
    tables: int
    rows: int
    flops: float

    @property
    def bytes(self) -> int:
        """Of all weights and of the optimizers' states; AdaGrad keeps one number a row."""
        return FLOAT * (DENSE_COPIES * self.dense + self.tables + self.rows)

    def __str__(self) -> str:
        """In words."""
        return (
            f"{self.dense / 1e6:.2f} M dense parameters, {self.tables / 1e6:.1f} M in tables, "
            f"{self.bytes / 1e6:,.0f} MB with optimizers, {self.flops / 1e6:.1f} MFLOP an example"
        )


def cost(trained: Trained, batch: Batch) -> Cost:
    """The cost of a model on a batch; the model is left as it was."""
    model, config = trained.model, trained.manifest.training
    training = model.core.training
    model.core.eval()
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch)
    model.core.train(training)
    rows = sum(table_rows(model.core.features, config.item_rows, config.sizes.user_rows).values())
    return Cost(
        dense=sum(p.numel() for p in model.core.parameters()),
        tables=rows * config.sizes.row_width,
        rows=rows,
        flops=3 * counter.get_total_flops() / len(batch),
    )


@cache
def peak() -> float:
    """FLOPs a second of a square fp32 product on this process's threads."""
    a, b = torch.randn(2, SIDE, SIDE)
    a @ b
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    return 10 * 2 * SIDE**3 / (time.perf_counter() - start)


class Meter:
    """What a model costs, told before its first step, its share of the peak since (MFU), and what
    the seconds went to.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.cost: Cost | None = None
        self.rows = 0
        self.started = 0.0

    def begin(self, trained: Trained, batch: Batch) -> None:
        """A batch was read; count on the first one."""
        self.timeline.spent("reading")
        if self.cost is None:
            self.cost = cost(trained, batch)
            if dist.get_rank() == 0:
                tqdm.write(f"GEM {trained.manifest.training.scale}: {self.cost}", sys.stderr)
            peak()
            self.started = time.perf_counter()
            self.timeline.spent("counting")

    def after(self, batch: Batch) -> dict[str, str]:
        """What to show behind a step: model FLOPs over the machine's, waiting included."""
        assert self.cost is not None
        self.timeline.stepped()
        self.rows += len(batch)
        done = self.rows * self.cost.flops / (time.perf_counter() - self.started)
        return {"GFLOP/s": f"{done / 1e9:.1f}", "MFU": f"{done / peak():.0%}"}
