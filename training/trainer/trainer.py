"""Training GEM day by day: resume from the day before, train on new final labels, checkpoint.

`train_days` is the entry point; a `Trainer` trains on one day after the other. `load_train_state`
and `predict_test` read a trained model.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from etl.spec.units import DayRange, DaySplit, date_range
from etl.tables import atomic_io
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from training.config import SINGLE_PROCESS, ParallelismConfig, TrainConfig
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.data.shards import RoundRobin
from training.distributed.device import process_device
from training.distributed.lookup import StartedLookup
from training.distributed.process_group import synchronized_batches
from training.distributed.sharding import reset_all_rows
from training.evaluation.metrics import PrequentialMetrics
from training.evaluation.predictions import Predictions, predict
from training.model.gem import GemOutput
from training.precision.dispatch import speed_warning
from training.trainer import checkpoint
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.batch_pipeline import BatchPipeline, PreparedBatch
from training.trainer.nan_guard import non_finite_loss_error
from training.trainer.number_edges import fit_numbers_of_day
from training.trainer.resume import (
    DayBatches,
    check_same_inputs,
    first_day_statistics,
    start_new_objectives,
    starting_point,
)
from training.trainer.state import TrainState, build_train_state, latest_reader
from training.trainer.step import Loss, LossCheck, NonFiniteLossError, train_step
from training.trainer.table_day import start_table_day
from training.trainer.throughput import ThroughputMeter, Timeline

LOOKUP = 1  # salt of seeds
CHECK_EVERY = 64  # steps between checks of losses on a GPU, for each of which the host waits
log = logging.getLogger(__name__)


def train_days(
    lake: Lake,
    days: DayRange,
    config: TrainConfig,
    timeline: Timeline | None = None,
    parallelism: ParallelismConfig = SINGLE_PROCESS,
    member: int = 0,
) -> list[dict[str, float]]:
    """Train on a range of days, one after the other; returns each day's prequential metrics.

    Continues from the checkpoint of the day before the first one, if it exists, or from an
    interrupted call. `timeline` may contain earlier activities of the process. `member` numbers the
    GEMs of a teacher of several seeds. Raises UserError if examples of a day are missing.
    """
    timeline = timeline or Timeline()
    reader = latest_reader(lake, config)
    reader.require_days(*days)
    manifest, path = starting_point(lake, reader, days, config, member)
    device = process_device()
    if manifest.precision_map and device.type == "cuda" and dist.get_rank() == 0:
        warning = speed_warning(manifest.precision_map, torch.cuda.get_device_name(device))
        if warning:
            log.warning("%s", warning)
    timeline.record("tables")
    statistics = None if path else first_day_statistics(lake, reader, manifest)
    if statistics:
        manifest = manifest.with_base_rates(statistics.base_rates)
    elif path is None:  # e.g. a surface that started later
        manifest = manifest.without_edges()
    state = build_train_state(manifest, parallelism, statistics, device)
    timeline.record("model")
    if path:
        checkpoint.load_checkpoint(path, state)
        log.info("resuming from %s", path)
        timeline.record("checkpoint")
    trainer = Trainer(lake, reader, state, ThroughputMeter(timeline))
    metrics = [trainer.train_day(day) for day in date_range(manifest.trained_until, days[1])]
    if dist.get_rank() == 0:
        tqdm.write(str(timeline), sys.stderr)
    return metrics


@dataclass
class Trainer:
    """One training run: its data, state, metrics and checkpoints."""

    lake: Lake
    reader: ExampleReader
    state: TrainState
    meter: ThroughputMeter
    checkpointer: AsyncCheckpointer = field(default_factory=AsyncCheckpointer)
    pass_ends: tuple[int, ...] = ()
    device: torch.device = field(init=False)
    loss_check: LossCheck = field(init=False)

    def __post_init__(self) -> None:
        self.device = next(self.state.model.core.parameters()).device
        self.loss_check = LossCheck(every=1 if self.device.type == "cpu" else CHECK_EVERY)

    @property
    def config(self) -> TrainConfig:
        """The settings of the run."""
        return self.state.manifest.training

    def train_day(self, day: date) -> dict[str, float]:
        """All passes over the labels that became final on a day.

        Returns prequential metrics: of the first pass, whose predictions were made before the
        update on their batch.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        self.start_day(day)
        fit_numbers_of_day(self.lake, self.reader, self.state)
        start_new_objectives(self.lake, self.reader, self.state)
        day_batches = DayBatches(self.lake, self.reader, day, self.state.manifest)
        batches = day_batches.for_rank(rank, world)
        padding = day_batches.padding_batches(rank)
        if self.config.decay_share or self.config.reset_embeddings_each_pass:
            self.pass_ends = day_batches.pass_ends(rank, world)
        loss = Loss.from_config(
            self.config,
            self.reader.features,
            self.state.manifest.base_rates,
            day_batches.teacher(),
        ).to(self.device)
        metrics = PrequentialMetrics(self.reader.features, loss)
        if rank == 0 and self.state.manifest.batches:
            log.warning(
                "%s goes on after step %d: its prequential metrics are of the steps from there on",
                day, self.state.manifest.batches,
            )  # fmt: skip
        last_batch = None
        progress = tqdm(
            self.prepare(synchronized_batches(batches, padding)),
            desc=f"train gem {day}",
            unit="batch",
            disable=rank > 0 or None,
        )
        for step in progress:
            self.train_batch(step, loss, metrics)
            last_batch = step.on_device
            progress.set_postfix(self.meter.after_step(step.host), refresh=False)
            if self.state.manifest.batches % self.config.checkpoint_every == 0:
                self._save_partial(day, day_batches, batches)
        if last_batch is not None:
            with self._non_finite_loss_as_user_error(last_batch):
                self.loss_check.read()
        self._finish_day(day)
        return metrics.compute()

    def prepare(self, batches: Iterator[tuple[Batch, float]]) -> Iterator[PreparedBatch]:
        """The further batches of a day that was started, with their mean rows, ready for steps."""
        pipeline = BatchPipeline(self.device, self._start_lookup)
        return pipeline(batches, self.state.manifest.batches, self.config.checkpoint_every)

    def train_batch(self, step: PreparedBatch, loss: Loss, metrics: PrequentialMetrics) -> None:
        """One step of a day that was started."""
        self.meter.before_step(self.state, step.on_device)
        if self.config.reset_embeddings_each_pass:
            self._reset_embeddings_once_a_pass()
        output = self._step(step, loss)
        if not step.host.is_repeated:
            metrics.update(output, step.on_device)
        rows = round(step.mean_rows * dist.get_world_size())
        self.state.manifest = self.state.manifest.after_step(step.host, rows)

    def start_day(self, day: date) -> None:
        """Start a day; before its first batch, update the rows of the tables."""
        state = self.state
        if state.manifest.complete or state.manifest.trained_until != day:
            state.manifest = state.manifest.next_day(day, dist.get_world_size())
        state.model.core.train()
        state.last_access.today = day.toordinal()
        if state.manifest.batches == 0:
            self._seed(state.manifest.steps)
            start_table_day(state, self.reader.items, day)

    def _seed(self, step: int, *salt: int) -> None:
        """Seed what is random in a step or before it; without a salt equally on all processes."""
        torch.manual_seed(self._seed_of(step, *salt))

    def _seed_of(self, step: int, *salt: int) -> int:
        return hash((self.config.seed, step, *salt)) % 2**31

    def _reset_embeddings_once_a_pass(self) -> None:
        """Reset all embeddings before the first step of a pass after the first.

        Equally in all replicas; a collective call. A resumed run, which computes the ends of passes
        again and may find others, does not reset them a second time.
        """
        manifest = self.state.manifest
        ended = sum(end <= manifest.batches for end in self.pass_ends[:-1])
        if ended <= manifest.embedding_resets:
            return
        self.state.replicas.synchronize()
        seed = self._seed_of(manifest.steps)
        reset_all_rows(self.state.tables, seed, self.state.initial_accumulator)
        self.state.manifest = manifest.model_copy(update={"embedding_resets": ended})

    def _start_lookup(self, batch: Batch, position: int) -> StartedLookup:
        """Start the look-up of a batch of the day at a position; a collective call."""
        manifest = self.state.manifest
        step = manifest.steps - manifest.batches + position
        self._seed(step, dist.get_rank(), LOOKUP)  # items are dropped at random
        return self.state.start_lookup(batch)

    def _step(self, step: PreparedBatch, loss: Loss) -> GemOutput:
        """Update on a batch; returns the output before the update."""
        state = self.state
        self._set_learning_rates()
        # Dropout depends only on the step and the process, so a resumed run draws the same.
        self._seed(state.manifest.steps, dist.get_rank())
        is_saved = (state.manifest.batches + 1) % self.config.checkpoint_every == 0
        with self._non_finite_loss_as_user_error(step.on_device):
            with state.watch():
                output = train_step(
                    state.model,
                    step.on_device,
                    step.mean_rows,
                    state.optimizer,
                    loss,
                    self.loss_check,
                    step.lookup,
                )
            if is_saved:
                self.loss_check.read()
        state.ema.update_parameters(state.model.core)
        state.replicas.after_step(state.manifest.steps + 1)
        return output

    @contextmanager
    def _non_finite_loss_as_user_error(self, batch: Batch) -> Iterator[None]:
        """Report a loss that is not finite, of a step on a batch or of one shortly before."""
        try:
            yield
        except NonFiniteLossError as error:
            folder = self._checkpoint_path(self.state.manifest.trained_until).parent
            raise non_finite_loss_error(folder, self.state, batch, error.ranks) from None

    def _set_learning_rates(self) -> None:
        """Set the rates of the dense weights and of the tables, which update in the backward."""
        state, config = self.state, self.config
        day_steps = self.pass_ends[-1] if self.pass_ends else 0
        factor = rate_factor(config, state.manifest.steps, state.manifest.batches, day_steps)
        for optimizer, rate in (
            (state.optimizer, config.dense_lr),
            (state.tables.fused_optimizer, state.embedding_lr),
        ):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        state.tables.fused_optimizer.step()  # passes the rate on to the kernels

    def _save_partial(self, day: date, day_batches: DayBatches, batches: RoundRobin[Batch]) -> None:
        """Start writing a checkpoint in the middle of a day."""
        consumed = day_batches.consumed_by_all_ranks(batches)
        self.state.manifest = self.state.manifest.model_copy(update={"consumed_batches": consumed})
        partial = self._checkpoint_path(day, complete=False)
        self.checkpointer.save(partial, self.state)
        self.meter.timeline.record("checkpoint")

    def _finish_day(self, day: date) -> None:
        """Write the checkpoint of a day, and remove the one from the middle of the day."""
        self.state.manifest = self.state.manifest.model_copy(
            update={"complete": True, "consumed_batches": ()}
        )
        self.checkpointer.save(self._checkpoint_path(day), self.state)
        self.checkpointer.wait()
        self.meter.timeline.record("checkpoint")
        if dist.get_rank() == 0:
            atomic_io.remove_folder(self._checkpoint_path(day, complete=False))

    def _checkpoint_path(self, day: date, complete: bool = True) -> StoragePath:
        member = self.state.manifest.member
        return checkpoint.checkpoint_path(self.lake.root, day, complete, member)


def rate_factor(config: TrainConfig, step: int, day_step: int, day_steps: int) -> float:
    """The factor on both learning rates: linear warm-up, then stable, with a decay in each day.

    The rate decays as 1 - sqrt(x) over the last `decay_share` of a day's steps, and the next day
    continues from the decayed weights at the full rate (WSD-S, 2410.05192).

    Args:
        config: The settings of the run.
        step: The number of steps of all days so far.
        day_step: The number of steps of this day so far.
        day_steps: The number of steps of this day.
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    decay_steps = config.decay_share * day_steps
    if not decay_steps:
        return warmup
    progress = max(0.0, day_step - (day_steps - decay_steps)) / decay_steps
    return warmup * (1 - math.sqrt(min(progress, 1.0)))


def load_train_state(lake: Lake, day: date, member: int = 0) -> tuple[TrainState, ExampleReader]:
    """The GEM that was trained until a day, in eval mode, and a reader of its inputs.

    Items first seen after that day are unknown to it, because they have no row. Raises UserError if
    the GEM does not exist, or if the spec now defines other inputs.
    """
    manifest = checkpoint.require_manifest(lake, day, member)
    reader = latest_reader(lake, manifest.training)
    check_same_inputs(manifest, reader)
    state = build_train_state(manifest)
    checkpoint.load_weights(checkpoint.checkpoint_path(lake.root, day, member=member), state)
    state.model.core.eval()
    return state, reader


def predict_test(lake: Lake, split: DaySplit) -> Predictions:
    """Probabilities of all rows of the test days with a final label."""
    logits, batches = load_for_test(lake, split, Shuffle(None))
    return predict(logits, batches, list(lake.spec.objectives))


def load_for_test(
    lake: Lake, split: DaySplit, shuffle: Shuffle, batch_rows: int = 2048
) -> tuple[Callable[[Batch], Tensor], Iterator[Batch]]:
    """The logits (B, O) of the GEM of the training days, and all test rows with a final label."""
    state, reader = load_train_state(lake, split.train_last)
    days = list(date_range(split.test_first, split.test_last))
    window = LabelWindow.for_test(split, lake.spec)
    batches = reader.batches(days, window, batch_rows, shuffle)
    return lambda batch: state.model(batch).logits, batches
