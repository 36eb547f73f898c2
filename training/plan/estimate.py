"""What a step costs, by how the tables are spread (2D: 2508.03854; papers' V1, V2 and V3).

T GPUs; L of them hold the tables once, in M = T / L replicas; S bytes of tables.
"""

from dataclasses import dataclass
from typing import Literal

from training.plan.scenario import Hardware, Scenario, Workload

Scheme = Literal["1D", "2D", "2D sharded"]
SCHEMES: tuple[Scheme, ...] = ("1D", "2D", "2D sharded")
DENSE_BYTES = 16  # a parameter: its weight, its gradient, AdamW's two moments


@dataclass(frozen=True)
class Layout:
    """How T GPUs share the tables."""

    gpus: int
    group: int
    sharded: bool

    @classmethod
    def of(cls, scheme: Scheme, gpus: int, group: int) -> "Layout":
        """All GPUs are one group in 1D, and where they are fewer than a group."""
        own = gpus if scheme == "1D" else min(gpus, group)
        return cls(gpus, own, scheme == "2D sharded")

    @property
    def replicas(self) -> int:
        """M: how often the tables are there."""
        return self.gpus // self.group


@dataclass(frozen=True)
class Estimate:
    """Of the slowest GPU: memory in bytes, and seconds of a step and of what it is made of.

    `exchange` are the all-to-alls of ids, rows and gradients in a group; `replicate` keeps the
    replicas of the tables alike; `reduce` sums the gradients of the dense part.
    """

    memory: float
    compute: float
    exchange: float
    replicate: float
    reduce: float
    overlap: float

    @property
    def step(self) -> float:
        """Seconds of a step: what overlaps counts once."""
        told = self.exchange + self.replicate + self.reduce
        return max(self.compute, told) + (1 - self.overlap) * min(self.compute, told)


def estimate(scenario: Scenario, scheme: Scheme, gpus: int) -> Estimate:
    """What a step costs on so many GPUs."""
    hardware, work = scenario.hardware, scenario.workload
    layout = Layout.of(scheme, gpus, work.group)
    rows = work.batch * work.rows_kb * 1e3 * imbalance(work, layout)
    return Estimate(
        memory=held(work, layout) + 2 * rows + DENSE_BYTES * work.dense_m * 1e6,
        compute=work.batch * work.mflop / (hardware.tflops * 1e6),
        exchange=exchange(hardware, work, layout),
        replicate=replicate(hardware, work, layout),
        reduce=ring(hardware, 4e6 * work.dense_m, gpus),
        overlap=hardware.overlap,
    )


def imbalance(work: Workload, layout: Layout) -> float:
    """Load of the fullest GPU over the mean, at best: a shard is not split."""
    return max(1.0, layout.group * work.largest_shard)


def held(work: Workload, layout: Layout) -> float:
    """Bytes of tables on a GPU: S / L; S / T where replicas share them."""
    return work.table_gb * 1e9 / (layout.gpus if layout.sharded else layout.group)


def exchange(hardware: Hardware, work: Workload, layout: Layout) -> float:
    """Seconds of three all-to-alls in a group: ids there, rows back, gradients there.

    Replicas of a shard are neighbours, so of M replicas a node holds node / M of a group.
    """
    own = max(1, min(hardware.node, layout.group) // min(layout.replicas, hardware.node))
    near, far = (own - 1) / layout.group, (layout.group - own) / layout.group
    sent = work.batch * (work.ids_kb + 2 * work.rows_kb) * 1e3 * imbalance(work, layout)
    moved = sent * (near / hardware.inside + far / hardware.outside) / 1e9
    return moved + 3 * (layout.group - 1) * hardware.message_us / 1e6


def replicate(hardware: Hardware, work: Workload, layout: Layout) -> float:
    """Seconds that keep replicas alike: an average of all rows now and then, or, where replicas
    share the rows, those that a step reads gathered before it and reduced after it.
    """
    if layout.sharded:
        return ring(hardware, work.batch * work.rows_kb * 1e3, layout.replicas)
    return ring(hardware, held(work, layout), layout.replicas) / work.sync_every


def ring(hardware: Hardware, size: float, gpus: int) -> float:
    """Seconds of an all-reduce of so many bytes among neighbours: 2 (n - 1) / n of them move."""
    rate = hardware.inside if gpus <= hardware.node else hardware.outside
    return 2 * (gpus - 1) / gpus * size / (rate * 1e9)
