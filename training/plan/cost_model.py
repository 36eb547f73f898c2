"""Cost model of a training step by sharding scheme of the tables (1D, 2D, sharded 2D: 2508.03854).

T GPUs; a group of L GPUs holds the tables once, in M = T / L replicas; S bytes of tables.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from etl.cli.runner import read_yaml_mapping
from etl.errors import UserError
from etl.spec.base import StrictModel


class Hardware(StrictModel):
    """A GPU and its network, with achieved rather than nominal rates.

    `intra_node_gb_s` and `inter_node_gb_s` are GB/s of one GPU within its node and beyond it;
    `latency_us` is added per peer of a transfer. `comm_overlap` is the share of communication
    that overlaps with compute.
    """

    memory_gb: PositiveFloat
    tflops: PositiveFloat
    gpus_per_node: PositiveInt = 8
    intra_node_gb_s: PositiveFloat
    inter_node_gb_s: PositiveFloat
    latency_us: float = Field(default=0.0, ge=0)
    comm_overlap: float = Field(default=0.0, ge=0, le=1)


class Workload(StrictModel):
    """A model and its batches.

    `table_gb` are table weights with optimizer state, `dense_params_m` million dense parameters,
    `dense_layers_m` those of each layer, if layers are to be sharded one by one. An
    example takes `mflop_per_example` forward and backward, and reads `ids_kb` of ids and `rows_kb`
    of table rows. `largest_shard` is the share of look-ups in the largest unsplittable
    shard. In 2D a group of `group_size` GPUs holds the tables once, and replicas are averaged
    every `sync_every` steps.
    """

    table_gb: PositiveFloat
    dense_params_m: PositiveFloat
    batch_per_gpu: PositiveInt
    mflop_per_example: PositiveFloat
    ids_kb: PositiveFloat
    rows_kb: PositiveFloat
    largest_shard: float = Field(default=0.0, ge=0, le=1)
    dense_layers_m: tuple[PositiveFloat, ...] = ()
    group_size: PositiveInt = 256
    sync_every: PositiveInt = 1


class Scenario(StrictModel):
    """Hardware and workload, as in a file of conf/plans."""

    name: str
    hardware: Hardware
    workload: Workload


def load_scenario(path: Path) -> Scenario:
    """Load a scenario. Raises UserError with all errors of the file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; shipped scenarios are in conf/plans")
    try:
        return Scenario.model_validate(read_yaml_mapping(path))
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError("\n".join(lines)) from None


Scheme = Literal["1D", "2D", "2D sharded"]
SCHEMES: tuple[Scheme, ...] = ("1D", "2D", "2D sharded")
DENSE_BYTES = 16  # per dense parameter: weight, gradient and two moments of AdamW


@dataclass(frozen=True)
class TableLayout:
    """How T GPUs share the tables; `is_fully_sharded` is 2D with replicas that share the rows."""

    gpus: int
    group_size: int
    is_fully_sharded: bool

    @classmethod
    def from_scheme(cls, scheme: Scheme, gpus: int, group_size: int) -> "TableLayout":
        """The layout of a scheme; in 1D, and on fewer GPUs than a group, all GPUs are one group."""
        group = gpus if scheme == "1D" else min(gpus, group_size)
        return cls(gpus, group, scheme == "2D sharded")

    @property
    def replicas(self) -> int:
        """M, the number of copies of the tables."""
        return self.gpus // self.group_size


@dataclass(frozen=True)
class StepEstimate:
    """Memory in bytes and times in seconds of the slowest GPU.

    `all_to_all` exchanges ids, rows and gradients within a group; `replica_sync` synchronizes
    replicas of the tables; `dense_all_reduce` sums the gradients of the dense part.
    """

    memory: float
    compute: float
    all_to_all: float
    replica_sync: float
    dense_all_reduce: float
    overlap: float

    @property
    def step(self) -> float:
        """Seconds of a step: compute and communication, less what overlaps."""
        communication = self.all_to_all + self.replica_sync + self.dense_all_reduce
        shorter, longer = sorted((self.compute, communication))
        return longer + (1 - self.overlap) * shorter


def estimate_step(scenario: Scenario, scheme: Scheme, gpus: int) -> StepEstimate:
    """Estimate a step on T GPUs."""
    hardware, work = scenario.hardware, scenario.workload
    layout = TableLayout.from_scheme(scheme, gpus, work.group_size)
    row_bytes = work.batch_per_gpu * work.rows_kb * 1e3 * imbalance(work, layout)
    dense_bytes = DENSE_BYTES * work.dense_params_m * 1e6
    return StepEstimate(
        memory=table_bytes_per_gpu(work, layout) + 2 * row_bytes + dense_bytes,
        compute=work.batch_per_gpu * work.mflop_per_example / (hardware.tflops * 1e6),
        all_to_all=all_to_all_seconds(hardware, work, layout),
        replica_sync=replica_sync_seconds(hardware, work, layout),
        dense_all_reduce=ring_all_reduce_seconds(hardware, 4e6 * work.dense_params_m, gpus),
        overlap=hardware.comm_overlap,
    )


def imbalance(workload: Workload, layout: TableLayout) -> float:
    """Lower bound of the load of the fullest GPU over the mean: a shard is not split."""
    return max(1.0, layout.group_size * workload.largest_shard)


def table_bytes_per_gpu(workload: Workload, layout: TableLayout) -> float:
    """Bytes of tables on a GPU: S / L, or S / T if replicas share the rows."""
    return workload.table_gb * 1e9 / (layout.gpus if layout.is_fully_sharded else layout.group_size)


def all_to_all_seconds(hardware: Hardware, workload: Workload, layout: TableLayout) -> float:
    """Seconds of the three all-to-alls in a group: of ids, of rows and of their gradients.

    Replicas of a shard are on neighboring GPUs, so a node holds gpus_per_node / M GPUs of a group.
    """
    group, node = layout.group_size, hardware.gpus_per_node
    group_gpus_on_node = max(1, min(node, group) // min(layout.replicas, node))
    intra_node_share = (group_gpus_on_node - 1) / group
    inter_node_share = (group - group_gpus_on_node) / group
    example_bytes = (workload.ids_kb + 2 * workload.rows_kb) * 1e3
    sent_bytes = workload.batch_per_gpu * example_bytes * imbalance(workload, layout)
    seconds_per_gb = (
        intra_node_share / hardware.intra_node_gb_s + inter_node_share / hardware.inter_node_gb_s
    )
    latency = 3 * (group - 1) * hardware.latency_us / 1e6
    return sent_bytes / 1e9 * seconds_per_gb + latency


def replica_sync_seconds(hardware: Hardware, workload: Workload, layout: TableLayout) -> float:
    """Seconds to synchronize replicas.

    In 2D all rows are averaged every `sync_every` steps. If replicas share the rows, those of a
    step are gathered before it and their gradients reduced after it, which moves as many
    bytes as an all-reduce.
    """
    if layout.is_fully_sharded:
        step_bytes = workload.batch_per_gpu * workload.rows_kb * 1e3
        return ring_all_reduce_seconds(hardware, step_bytes, layout.replicas)
    table_bytes = table_bytes_per_gpu(workload, layout)
    return ring_all_reduce_seconds(hardware, table_bytes, layout.replicas) / workload.sync_every


def ring_all_reduce_seconds(hardware: Hardware, num_bytes: float, gpus: int) -> float:
    """Seconds of a ring all-reduce of neighboring GPUs: each sends 2 (n - 1) / n of the bytes."""
    rate = hardware.intra_node_gb_s if gpus <= hardware.gpus_per_node else hardware.inter_node_gb_s
    return 2 * (gpus - 1) / gpus * num_bytes / (rate * 1e9)
