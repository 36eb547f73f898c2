"""The state of a training run, and the manifest of its checkpoints.

The state is GEM with its tables and optimizers, placed on the processes. The manifest is enough to
rebuild the model and to detect incompatible use.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from etl.errors import UserError
from etl.spec.attributes import Attributes
from etl.spec.base import StrictModel
from etl.tables.lake import Lake
from features.schema import USER_TABLE, FeatureSchema
from training.config import SINGLE_PROCESS, ParallelismConfig, TrainConfig
from training.data.batch import Batch, InputStatistics, batch_digest
from training.data.reader import ExampleReader
from training.distributed.dense import parallelize
from training.distributed.device import CPU
from training.distributed.lookup import StartedLookup, start_lookup
from training.distributed.process_group import build_mesh
from training.distributed.replicas import ReplicaSync
from training.distributed.sharding import (
    TorchrecTables,
    fill_accumulators,
    rowwise_adagrad_params,
    shard_tables,
)
from training.model.alignment import Layout
from training.model.embeddings import table_sizes
from training.model.gem import Gem
from training.precision.precision_map import PrecisionMap
from training.precision.probe import Probe
from training.precision.valve import SafetyValve
from training.trainer.average import EmaModel
from training.trainer.compute import apply_compute_config
from training.trainer.embedding_ttl import LastAccess
from training.trainer.item_rows import ManagedItemRows
from training.trainer.optimizer import dense_optimizer
from training.trainer.step import GemModel

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]+\.safetensors$")]
DIGESTED_BATCHES = 100  # number of batches per day whose digests are stored


class Manifest(StrictModel):
    """The configuration, training progress and files of a checkpoint.

    Attributes:
        features: What the model reads; surfaces and event types in the order of their codes.
        attributes: How each attribute is read.
        event_types: Types of the events in a history; empty for all.
        base_rates: Rate of each objective when it was first trained, which weights its loss.
        records_base_rates: Whether each trained objective has one; False in earlier versions.
        layout: Rows that modules were trained on, if the features were changed since.
        unfitted_numbers: Numbers without edges yet: those that an upgrade added, or all if the
            first training had no rows; the next day with rows has their edges.
        upgraded_from: Hashes of the specs under which the model learned the day, if it was carried
            over to another one since; its trees were not.
        spec_max_length: Events per history by the spec, not by an option; None in earlier versions.
        compressor_version: The compressor of the hidden layer; empty until a day continues it.
        precision_map: How linear layers are computed with `--compute.precision fp8`.
        num_shards: Shards that the day is split into: the number of processes that started it.
        table_versions: Delta versions of the tables read for the day.
        joint_until: Last day of the first training, if its days were trained together.
        trained_until: The day in training, or the last one if `complete`.
        member: The number of this GEM among those of the teacher, from 0.
        batches, steps, rows: Steps on this day; steps on all days, and their examples.
        consumed_batches: Batches of each shard of the day that were trained on.
        embedding_resets: Number of passes over the day before which all embeddings were reset.
        first_batch_digests: SHA-256 of the first batches of shard 0, unless fewer processes resume.
        state_dir, file_hashes: Folder of the tensors, next to the manifest; SHA-256 of its files.
        parent_state_dir: That of the checkpoint that the day continues; empty in earlier versions.
    """

    spec_hash: str
    features: FeatureSchema
    attributes: Attributes
    event_types: tuple[str, ...]
    base_rates: dict[str, float] = {}
    records_base_rates: bool = False
    layout: Layout = {}
    unfitted_numbers: tuple[str, ...] = ()
    upgraded_from: tuple[str, ...] = ()
    training: TrainConfig
    spec_max_length: int | None = None
    compressor_version: str = ""
    precision_map: PrecisionMap | None = None
    num_shards: int
    table_versions: dict[str, int]
    trained_from: date
    joint_until: date | None = None
    trained_until: date
    complete: bool
    member: int = 0
    batches: int
    steps: int
    rows: int = 0
    consumed_batches: tuple[int, ...] = ()
    embedding_resets: int = 0
    first_batch_digests: tuple[str, ...] = ()
    state_dir: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""
    file_hashes: dict[FileName, Sha256] = {}
    parent_state_dir: str = ""

    @property
    def settings_hash(self) -> str:
        """A short hash of the settings of the training."""
        return hashlib.sha256(self.training.model_dump_json().encode()).hexdigest()[:6]

    @property
    def fm_version(self) -> str:
        """The version of this foundation model in the teacher prediction tables."""
        return f"{self.trained_from:%Y%m%d}-{self.trained_until:%Y%m%d}-{self.settings_hash}"

    @property
    def first_training_day(self) -> date:
        """The last day of the first training; at its end all labels that are final are new."""
        return self.joint_until or self.trained_from

    @property
    def has_length_of_spec(self) -> bool:
        """Whether histories are as long as the spec says, which may then change from day to day."""
        return self.training.max_length == self.spec_max_length

    def with_base_rates(self, rates: Tensor) -> "Manifest":
        """The manifest with the rates (O) of objectives that have none yet; NaN adds none."""
        named = zip(self.features.objectives, rates.tolist(), strict=True)
        new = {name: rate for name, rate in named if not math.isnan(rate)}
        return self.model_copy(update={"base_rates": new | self.base_rates})

    def without_edges(self) -> "Manifest":
        """The manifest of a model whose numbers have no edges yet."""
        return self.model_copy(update={"unfitted_numbers": self.features.all_numeric_columns})

    def after_step(self, batch: Batch, rows: int) -> "Manifest":
        """The manifest after one more step on `rows` rows of all processes together."""
        digests = self.first_batch_digests
        reads_one_shard = dist.get_world_size() >= self.num_shards
        if reads_one_shard and len(digests) == self.batches < DIGESTED_BATCHES:
            digests = (*digests, batch_digest(batch))
        counts = {"batches": self.batches + 1, "steps": self.steps + 1, "rows": self.rows + rows}
        return self.model_copy(update={**counts, "first_batch_digests": digests})

    def next_day(self, day: date, num_shards: int) -> "Manifest":
        """The manifest of the same model before the first batch of a day."""
        position = {"trained_until": day, "complete": False, "num_shards": num_shards}
        zeros = dict.fromkeys(("batches", "embedding_resets"), 0)
        empty = dict.fromkeys(("consumed_batches", "first_batch_digests", "upgraded_from"), ())
        parent = {"parent_state_dir": self.state_dir}
        return self.model_copy(update={**position, **zeros, **empty, **parent})

    def is_same_run(self, other: "Manifest") -> bool:
        """Whether both belong to the same training run, possibly at different steps."""
        return self.model_dump(exclude=PROGRESS_FIELDS) == other.model_dump(exclude=PROGRESS_FIELDS)


PROGRESS_FIELDS = {  # of a manifest: they may differ within a training run
    "trained_until", "complete", "batches", "steps", "rows", "consumed_batches", "num_shards",
    "base_rates", "records_base_rates", "unfitted_numbers", "first_batch_digests",
    "embedding_resets", "precision_map", "upgraded_from", "spec_max_length", "compressor_version",
    "state_dir", "file_hashes", "parent_state_dir",
}  # fmt: skip
TABLE_WISE = (ShardingType.TABLE_WISE,)
TABLE_AND_ROW_WISE = (*TABLE_WISE, ShardingType.ROW_WISE)


@dataclass
class TrainState:
    """A model with its optimizers, and the manifest with its training progress.

    `ema` holds the averaged dense weights, which are used for inference; `replicas` averages the
    copies of the tables; the optimizer of the tables is fused into `tables`: its learning rate is
    `embedding_lr`, larger than the configured one if there are copies, and its state starts at
    `initial_accumulator`.
    """

    model: GemModel
    ema: AveragedModel
    tables: DistributedModelParallel
    replicas: ReplicaSync
    last_access: LastAccess
    item_rows: ManagedItemRows
    embedding_lr: float
    initial_accumulator: float
    optimizer: torch.optim.Optimizer
    manifest: Manifest
    probe: Probe | None = None
    valve: SafetyValve | None = None

    def start_lookup(self, batch: Batch) -> StartedLookup:
        """Send the ids that a batch looks up to the shards; a collective call."""
        ids = self.model.table_ids(batch, self.model.core.select_history(batch))
        self.last_access.record(ids)
        return start_lookup(self.tables, ids)

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on, as tensors."""
        probe = {"probe": self.probe.state_dict()} if self.probe else {}
        return probe | {
            "dense": get_model_state_dict(self.model.core),
            "ema": self.ema.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model.core, self.optimizer)["state"],
            "tables": self.tables.state_dict(),
            "tables_optimizer": self.tables.fused_optimizer.state_dict()["state"],
            "last_access": self.last_access.last_days,
            "item_rows": self.item_rows.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; learning rates and other settings of the optimizers are kept."""
        core, fused = self.model.core, self.tables.fused_optimizer
        set_model_state_dict(core, state["dense"])
        self.ema.load_state_dict(state["ema"])
        settings = get_optimizer_state_dict(core, self.optimizer)
        set_optimizer_state_dict(core, self.optimizer, {**settings, "state": state["optimizer"]})
        self.tables.load_state_dict(state["tables"])
        fused.load_state_dict({**fused.state_dict(), "state": state["tables_optimizer"]})
        self.last_access.last_days = state["last_access"]
        self.item_rows.load_state_dict(state["item_rows"])
        if self.probe:
            self.probe.load_state_dict(state["probe"])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The context of a step, in which probe and safety valve read what layers do."""
        with ExitStack() as watched:
            if self.probe:
                watched.enter_context(self.probe.watch(self.manifest.steps))
            if self.valve:
                watched.enter_context(self.valve.watch(self.manifest.steps))
            yield
        if self.valve and self.valve.precision_map != self.manifest.precision_map:
            fallen_back = {"precision_map": self.valve.precision_map}
            self.manifest = self.manifest.model_copy(update=fallen_back)

    def all_reduce_counts(self) -> None:
        """Add up what each process counted of the rows that it looked up; a collective call."""
        self.last_access.all_reduce()
        self.item_rows.all_reduce(self.last_access.today)


def latest_reader(lake: Lake, config: TrainConfig) -> ExampleReader:
    """A reader of the latest table versions, for the inputs of a configuration."""
    return ExampleReader.latest(lake, config.sequence, config.max_length, config.surfaces)


def build_train_state(
    manifest: Manifest,
    parallelism: ParallelismConfig = SINGLE_PROCESS,
    statistics: InputStatistics | None = None,
    device: torch.device = CPU,
) -> TrainState:
    """A newly initialized model of a manifest's configuration, on the processes of the group.

    No item has a row of the item table yet. `statistics` of the inputs are not needed if a
    checkpoint is loaded afterwards. All state is on `device`.
    """
    features, config = manifest.features, manifest.training
    sizes = config.gem_config
    _check_options(config, parallelism)
    mesh = build_mesh(parallelism.table_replicas, device)
    torch.manual_seed(config.seed)
    core = Gem(features, sizes, manifest.layout or None)
    if statistics:
        core.initialize_from(statistics)
    core.to(device)

    rows = table_sizes(features, config.item_table_rows, sizes.user_hash_buckets)
    moment_scale = parallelism.moment_scale or parallelism.table_replicas
    adagrad = rowwise_adagrad_params(config.embedding_lr, moment_scale)
    tables = shard_tables(
        TorchrecTables(rows, sizes.embedding_dim, (USER_TABLE,)),
        mesh,
        adagrad,
        TABLE_AND_ROW_WISE if parallelism.row_wise else TABLE_WISE,
        config.seed,
    )
    initial_accumulator = moment_scale * config.initial_accumulator
    fill_accumulators(tables, initial_accumulator)
    with device:
        last_access = LastAccess.never_accessed(tables, rows)
        item_rows = _free_item_rows(config)

    ema = EmaModel(core)
    apply_compute_config(core, config.compute, manifest.precision_map)
    every = config.compute.probe_every
    probe = Probe(core, every).to(device) if every else None
    dense = parallelize(core, ema, mesh, parallelism.dense_parallelism == "fsdp")
    return TrainState(
        model=GemModel(
            core, dense, last_access, item_rows, sizes.user_hash_buckets, item_rows.for_training
        ),
        ema=ema,
        tables=tables,
        replicas=ReplicaSync(tables, mesh, parallelism.sync_every_steps),
        last_access=last_access,
        item_rows=item_rows,
        embedding_lr=adagrad["learning_rate"],
        initial_accumulator=initial_accumulator,
        optimizer=dense_optimizer(core, config),
        manifest=manifest,
        probe=probe,
        valve=SafetyValve(core, manifest.precision_map) if manifest.precision_map else None,
    )


def _check_options(config: TrainConfig, parallelism: ParallelismConfig) -> None:
    """Raises UserError for options that cannot be combined."""
    if config.dense_optimizer == "muon" and parallelism.dense_parallelism == "fsdp":
        raise UserError(
            "--dense-optimizer muon needs each matrix in one piece: set "
            "--parallelism.dense-parallelism ddp"
        )
    compute = config.compute
    if compute.probe_every and (compute.compiled or dist.get_world_size() > 1):
        raise UserError(
            "--compute.probe-every watches layers that are not compiled, in one process: leave out "
            "--compute.compiled, and set --processes 1"
        )


def _free_item_rows(config: TrainConfig) -> ManagedItemRows:
    """The rows of the item table, all of them free."""
    return ManagedItemRows.all_free(
        config.item_table_rows,
        admission_count=config.item_admission_count,
        dropout=config.gem_config.item_dropout,
        dropout_lookups=config.item_dropout_lookups,
    )
