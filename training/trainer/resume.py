"""The starting point of a training run, and the batches that it reads.

It starts from scratch, from the day before, or from an interrupted run.

A day is split into one shard per process at its start. A resumed run, with any number of
processes, reads the rest of each shard, so that each row is read exactly once.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import cast

import torch
import torch.distributed as dist

from etl.errors import UserError
from etl.spec.units import DayRange, date_range
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from training.config import TrainConfig
from training.data.batch import Batch, InputStatistics, Shuffle, batch_digest
from training.data.input_statistics import base_rates, input_statistics
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.data.shards import Epoch, RoundRobin, read_epoch, steps_to_pass_end
from training.model.gem import Gem
from training.model.history.encoder import history_selector
from training.precision.precision_map import read_precision_map
from training.teacher.compressor import compressor_version
from training.teacher.predictions import TeacherPredictions
from training.trainer import checkpoint
from training.trainer.state import Manifest, TrainState
from training.trainer.step import negative_sampling

TEACHER_TABLE = "teacher_predictions"
CONTINUED_FIELDS = (  # of the manifest, on the days that follow
    "trained_from", "joint_until", "steps", "rows", "base_rates", "records_base_rates", "layout",
    "unfitted_numbers",
)  # fmt: skip
log = logging.getLogger(__name__)


def starting_point(
    lake: Lake,
    reader: ExampleReader,
    days: DayRange,
    config: TrainConfig,
    member: int = 0,
) -> tuple[Manifest, StoragePath | None]:
    """The manifest before the next batch to train on, and the checkpoint to load, if any.

    Raises UserError if days before the first were not trained on, or were trained with settings
    that may not change, or if a new GEM would replace one that learned earlier days, too.
    """
    checkpoints = checkpoint.list_checkpoints(lake.root, lake.spec.hash, member)
    manifest, path = new_manifest(lake, reader, days, config, member), None
    earlier = [(f, m) for f, m in checkpoints if m.complete and m.trained_until < days[0]]
    if earlier:
        path, previous = earlier[-1]
        _check_can_continue(previous, manifest, days[0])
        manifest = _continued_manifest(manifest, previous, days[0])
    new_run = manifest
    for folder, interrupted in checkpoint.linked_checkpoints(checkpoints):
        if not days[0] <= interrupted.trained_until <= days[1]:
            continue
        if not interrupted.is_same_run(new_run):
            break  # this day is trained again, and so are those after it
        path, manifest = folder, interrupted
    if path is None:
        checkpoint.check_can_start(lake.root, checkpoints, days, member)
    if manifest.complete:
        next_day = manifest.trained_until + timedelta(days=1)
        manifest = manifest.next_day(next_day, dist.get_world_size())
    return manifest, path


def _continued_manifest(new: Manifest, previous: Manifest, day: date) -> Manifest:
    """The manifest of a run that continues a model from `day` on."""
    kept = {name: getattr(previous, name) for name in CONTINUED_FIELDS}
    kept["compressor_version"] = compressor_version(previous)
    if new.precision_map is not None:
        kept["precision_map"] = new.precision_map.with_fallbacks_of(previous.precision_map)
    kept |= {"trained_until": day, "parent_state_dir": previous.state_dir}
    return new.model_copy(update=kept)


def new_manifest(
    lake: Lake,
    reader: ExampleReader,
    days: DayRange,
    config: TrainConfig,
    member: int = 0,
) -> Manifest:
    """The manifest of a GEM before its first batch; it is to learn the labels of some days.

    Raises UserError if a joint training does not end with one of the days.
    """
    first, last = days
    is_joint, joint_until = config.first_training == "joint", config.joint_until or last
    if is_joint and not first <= joint_until <= last:
        raise UserError(f"--joint-until {joint_until}: must be one of the days {first} to {last}")
    read = {"sequence": reader.sequence, "max_length": reader.history_length}
    return Manifest(
        spec_hash=lake.spec.hash,
        features=reader.features,
        attributes=lake.spec.attributes,
        event_types=reader.event_types,
        training=config.model_copy(update=read | {"joint_until": None}),
        spec_max_length=lake.spec.sequences[reader.sequence].max_length,
        precision_map=read_precision_map(lake.root) if config.compute.precision == "fp8" else None,
        num_shards=dist.get_world_size(),
        table_versions=dict(reader.table_versions) | _teacher_version(lake, config),
        records_base_rates=True,
        trained_from=first,
        joint_until=joint_until if is_joint else None,
        trained_until=joint_until if is_joint else first,
        complete=False,
        member=member,
        batches=0,
        steps=0,
    )


def _teacher_version(lake: Lake, config: TrainConfig) -> dict[str, int]:
    """The version of the teacher's predictions, if GEM learns from them and there are some."""
    if not (config.distillation_weight and lake.exists(TEACHER_TABLE)):
        return {}
    return {TEACHER_TABLE: lake.version(TEACHER_TABLE)}


def _check_can_continue(previous: Manifest, requested: Manifest, first: date) -> None:
    """Raises UserError unless day `first` may continue the model of the days before."""
    day = previous.trained_until
    if day + timedelta(days=1) != first:
        raise UserError(
            f"GEM was trained until {day}: train on the days up to {first} first, or "
            f"{checkpoint.START_OVER}"
        )
    old, new = previous.training.resume_invariants(), requested.training.resume_invariants()
    if previous.has_length_of_spec and requested.has_length_of_spec:
        old["max_length"] = new["max_length"]
    changed = [f"{name} {old[name]}" for name in old if old[name] != new[name]]
    if previous.features != requested.features:
        changed.append(f"similarity_attributes {', '.join(previous.features.similarity_columns)}")
    if previous.event_types != requested.event_types:
        changed.append(f"events {', '.join(previous.event_types)}")
    if changed:
        raise UserError(
            f"GEM until {day} was trained with {'; '.join(changed)}: train with the same settings, "
            f"run `gemline train upgrade` if the spec was changed, or {checkpoint.START_OVER}"
        )


def check_same_inputs(manifest: Manifest, reader: ExampleReader) -> None:
    """Raises UserError if the model inputs of the spec differ from those of a GEM."""
    trained = manifest.features, manifest.event_types
    if trained != (reader.features, reader.event_types):
        raise UserError(
            f"GEM until {manifest.trained_until} was trained with other `similarity_attributes` or "
            f"`sequences` than spec {reader.lake.spec.name} has now: revert the change, or run "
            "`gemline train upgrade`"
        )


def label_window_of_day(lake: Lake, day: date, manifest: Manifest) -> LabelWindow:
    """The labels that GEM trains on after a day: those that became final on it.

    In the first training they are all labels that are final.
    """
    return LabelWindow(
        start=0 if day == manifest.first_training_day else lake.spec.day_start(day),
        end=lake.spec.day_end(day),
        include_auxiliary=manifest.training.gem_config.auxiliary_weight > 0,
        negative_sampling=negative_sampling(manifest.training, tuple(lake.spec.objectives)),
    )


def first_day_statistics(
    lake: Lake, reader: ExampleReader, manifest: Manifest
) -> InputStatistics | None:
    """Statistics of the inputs of the first training; None if its days have no rows.

    They are of its last day or, in a joint training, of the latest day with rows.
    """
    return latest_statistics(lake, reader, manifest, manifest.first_training_day)


def learned_objectives(manifest: Manifest) -> Collection[str]:
    """The objectives that a GEM was trained on: those with a base rate.

    A GEM of an earlier version has no base rates at all, but was trained on all objectives.
    """
    is_earlier = not manifest.records_base_rates and not manifest.base_rates
    return manifest.features.objectives if manifest.steps and is_earlier else manifest.base_rates


def start_new_objectives(lake: Lake, reader: ExampleReader, state: TrainState) -> None:
    """Before the first batch of a day, start objectives that were never trained from their rates.

    Slow objectives have no final labels on the first day, and an upgrade may add objectives.
    """
    manifest = state.manifest
    learned = learned_objectives(manifest)
    missing = [name not in learned for name in manifest.features.objectives]
    if manifest.batches or not any(missing):
        return
    days, label_window = _labelled_days(lake, reader, manifest, manifest.trained_until)
    rates = base_rates(reader, days, label_window)
    state.manifest = manifest.with_base_rates(rates)
    known = state.manifest.base_rates
    rates = torch.tensor([known.get(n, torch.nan) for n in manifest.features.objectives])
    outputs = state.model.core.esmm.initial_logits(rates)
    outputs = torch.where(torch.tensor(missing), outputs, torch.nan)
    for model in (state.model.core, cast("Gem", state.ema.module)):
        model.heads.start_from(outputs)


def latest_statistics(
    lake: Lake, reader: ExampleReader, manifest: Manifest, day: date
) -> InputStatistics | None:
    """Statistics of the latest day with rows, of the days whose labels GEM learns after `day`."""
    days, label_window = _labelled_days(lake, reader, manifest, day)
    found = (input_statistics(reader, each, label_window) for each in reversed(days))
    return next((statistics for statistics in found if statistics), None)


def _labelled_days(
    lake: Lake, reader: ExampleReader, manifest: Manifest, day: date
) -> tuple[list[date], LabelWindow]:
    """The days whose labels GEM learns after `day`, and the window of all these labels."""
    label_window = replace(label_window_of_day(lake, day, manifest), negative_sampling=None)
    return DayBatches(lake, reader, day, manifest).days, label_window


@dataclass(frozen=True)
class DayBatches:
    """The batches of all labels that became final on a day, from the position of a manifest."""

    lake: Lake
    reader: ExampleReader
    day: date
    manifest: Manifest

    @property
    def days(self) -> list[date]:
        """The days of the rows, whose slow labels became final on the last one."""
        first = self.manifest.trained_from
        if self.day > self.manifest.first_training_day:
            first = max(first, self.day - timedelta(days=self.lake.spec.label_delay_days))
        return list(date_range(first, self.day))

    def teacher(self) -> TeacherPredictions | None:
        """What earlier teachers predicted of the rows, if GEM learns from it."""
        version = self.manifest.table_versions.get(TEACHER_TABLE)
        if version is None:
            return None
        teacher = TeacherPredictions.of_gem(self.lake, self.days, version)
        if not len(teacher.impression_ids):
            log.warning(
                "%s: no teacher has predicted its rows, so that GEM learns from labels alone; run "
                "`gemline teacher-predictions` for a day before GEM is trained on it", self.day,
            )  # fmt: skip
        return teacher

    def epoch(self, shard: int, number: int = 0, consumed: int = 0) -> Epoch:
        """A pass over a shard, without its first `consumed` batches."""
        manifest, config = self.manifest, self.manifest.training
        return Epoch(
            days=self.days,
            label_window=label_window_of_day(self.lake, self.day, manifest),
            batch_rows=config.batch_rows,
            shuffle=Shuffle(config.seed, number),
            shard=(shard, manifest.num_shards),
            skip_batches=consumed,
            selector=history_selector(manifest.features, config.gem_config),
        )

    def shard_batches(self, shard: int, consumed: int = 0) -> Iterator[Batch]:
        """The batches of all passes over a shard, without the first `consumed` ones."""
        config, number = self.manifest.training, 0
        if consumed and config.passes > 1:
            number, consumed = divmod(consumed, self.epoch(shard).num_batches(self.reader))
        for current in range(number, config.passes):
            epoch = self.epoch(shard, current, consumed if current == number else 0)
            for batch in read_epoch(self.reader, epoch, config.workers):
                yield replace(batch, is_repeated=True) if current else batch

    def pass_ends(self, rank: int, world: int) -> tuple[int, ...]:
        """The step of the day at which each pass ends, the last one with it; a collective call.

        A pass ends when the last shard is through it. Steps that are done count.
        """
        consumed = dict(enumerate(self.manifest.consumed_batches))
        passes, done = self.manifest.training.passes, self.manifest.batches
        shards = [
            (self.epoch(shard).num_batches(self.reader), consumed.get(shard, 0))
            for shard in range(rank, self.manifest.num_shards, world)
        ]
        ends = [0] * passes
        if any(batches for batches, _ in shards):
            ends = [done + steps_to_pass_end(shards, n, passes) for n in range(1, passes + 1)]
        latest = torch.tensor(ends)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        return tuple(latest.tolist())

    def for_rank(self, rank: int, world: int) -> RoundRobin[Batch]:
        """The batches of one process, from its shards in turn."""
        consumed = dict(enumerate(self.manifest.consumed_batches))
        shards = range(rank, self.manifest.num_shards, world)
        streams = {shard: self.shard_batches(shard, consumed.get(shard, 0)) for shard in shards}
        return RoundRobin(streams, consumed)

    def padding_batches(self, rank: int) -> Iterator[Batch]:
        """Batches to repeat without labels, for a process without remaining batches."""
        return self.shard_batches(rank % self.manifest.num_shards)

    def consumed_by_all_ranks(self, batches: RoundRobin[Batch]) -> tuple[int, ...]:
        """The number of consumed batches of each shard over all processes; a collective call."""
        consumed = torch.tensor([batches.consumed[n] for n in range(self.manifest.num_shards)])
        dist.all_reduce(consumed, dist.ReduceOp.MAX)
        return tuple(consumed.tolist())


def verify_batches(lake: Lake, day: date) -> int:
    """Rebuild the first batches of a trained day's first shard; returns their number.

    Raises UserError if a batch differs from the one that was trained on, or if a table version no
    longer exists.
    """
    manifest = checkpoint.require_manifest(lake, day)
    training = manifest.training
    assert training.sequence is not None
    reader = ExampleReader(
        lake, manifest.table_versions, training.sequence, training.max_length, training.surfaces
    )
    check_same_inputs(manifest, reader)
    batches = DayBatches(lake, reader, day, manifest).shard_batches(0)
    verified = 0
    for digest, batch in zip(manifest.first_batch_digests, batches, strict=False):
        verified += 1
        if batch_digest(batch) != digest:
            raise UserError(
                f"batch {verified} of {day} is not the one that was trained on: its tables, or the "
                "code that reads them, have changed"
            )
    return verified
