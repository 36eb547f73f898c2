"""The recipe of training: rates of a day, several passes over it, and exact resume within them."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from etl.errors import UserError
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from features.schema import USER_TABLE
from tests.conftest import FIRST
from tests.world import copy_of
from training.config import ParallelismConfig, TrainConfig
from training.data.batch import Batch
from training.data.shards import steps_to_pass_end
from training.distributed.process_group import process_group
from training.distributed.sharding import (
    local_optimizer_states,
    local_shards,
    reset_all_rows,
)
from training.evaluation.metrics import PrequentialMetrics
from training.model.config import GemOptions
from training.trainer import checkpoint
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.resume import DayBatches, first_day_statistics, starting_point
from training.trainer.state import Manifest, TrainState, build_train_state, latest_reader
from training.trainer.step import Loss
from training.trainer.throughput import ThroughputMeter, Timeline
from training.trainer.trainer import Trainer, rate_factor, train_days

CONFIG = TrainConfig(
    scale="tiny", width_multiplier=0.5, max_length=8, batch_rows=256, item_table_rows=512,
    model=GemOptions(user_hash_buckets=256),
)  # fmt: skip


def config_of(**options: object) -> TrainConfig:
    return TrainConfig.model_validate(CONFIG.model_dump() | options)


@given(
    warmup=st.integers(1, 50),
    share=st.floats(0.05, 1),
    day_steps=st.integers(2, 400),
    step=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_rates_warm_up_once_and_decay_at_the_end_of_each_day(
    warmup: int, share: float, day_steps: int, step: int
) -> None:
    """(step + 1) / warm-up, then 1; in the last steps of a day 1 - sqrt(progress) of that."""
    config = config_of(warmup_steps=warmup, decay_share=share)
    warm = min(1.0, (step + 1) / warmup)
    factors = [rate_factor(config, step, n, day_steps) for n in range(day_steps + 1)]
    decay_steps = share * day_steps
    for day_step, factor in enumerate(factors):
        into_decay = day_step - (day_steps - decay_steps)
        if into_decay <= 0:
            assert factor == warm
        else:
            assert factor == pytest.approx(warm * (1 - math.sqrt(into_decay / decay_steps)))
    assert factors == sorted(factors, reverse=True) and factors[-1] == pytest.approx(0, abs=1e-6)


@given(st.integers(0, 100), st.integers(0, 100))
def test_without_decay_the_rate_is_stable(step: int, day_step: int) -> None:
    config = config_of(warmup_steps=20, decay_share=0)
    assert rate_factor(config, step, day_step, 100) == min(1, (step + 1) / 20)


def new_manifest(lake: Lake, config: TrainConfig) -> Manifest:
    reader = latest_reader(lake, config)
    return starting_point(lake, reader, (FIRST, FIRST), config)[0]


def weights_of(state: TrainState) -> dict[str, torch.Tensor]:
    """All dense weights and tables."""
    tables = {
        key: shard.rows.clone()
        for key, weight in state.tables.state_dict().items()
        for shard in local_shards(weight)
    }
    dense = {name: w.detach().clone() for name, w in state.model.core.named_parameters()}
    return tables | dense


def take_step(trainer: Trainer, batch: Batch, loss: Loss) -> None:
    """One step on a batch of a day that was started."""
    metrics = PrequentialMetrics(trainer.reader.features, loss)
    for step in trainer.prepare(iter([(batch, float(len(batch)))])):
        trainer.train_batch(step, loss, metrics)


def changes_of_one_step(
    lake: Lake, batch: Batch, config: TrainConfig, day_steps: int, day_step: int
) -> dict[str, torch.Tensor]:
    """What a step of a new model changes, after `day_step` of the `day_steps` of a day."""
    reader = latest_reader(lake, config)
    manifest = new_manifest(lake, config)
    state = build_train_state(manifest)
    trainer = Trainer(lake, reader, state, ThroughputMeter(Timeline()))
    trainer.start_day(FIRST)
    trainer.pass_ends = (day_steps,)
    state.manifest = state.manifest.model_copy(update={"batches": day_step})
    loss = Loss.from_config(config, reader.features)
    before = weights_of(state)
    take_step(trainer, batch, loss)
    return {name: after - before[name] for name, after in weights_of(state).items()}


def test_both_rates_follow_the_factor(lake: Lake) -> None:
    """The first step of AdamW and of AdaGrad is proportional to its rate."""
    config = config_of(warmup_steps=1, weight_decay=0.0)
    reader = latest_reader(lake, config)
    with process_group():
        batch = next(DayBatches(lake, reader, FIRST, new_manifest(lake, config)).shard_batches(0))
        full = changes_of_one_step(lake, batch, config, 100, 0)
        for day_step, factor in ((75, 1 - math.sqrt(0.5)), (100, 0.0)):
            less = changes_of_one_step(lake, batch, config, 100, day_step)
            for name, change in full.items():
                torch.testing.assert_close(less[name], factor * change, rtol=1e-2, atol=2e-6)
        assert sum(bool(change.any()) for change in full.values()) > 50
        assert full["collection.embeddings.item.weight"].abs().max() > 1e-4


@pytest.mark.parametrize("max_norm", [0.001, 1e6])
def test_gradients_of_a_step_are_clipped_to_a_norm(lake: Lake, max_norm: float) -> None:
    """Their norm over all dense weights is at most `max_grad_norm`; smaller ones are kept."""
    norms = []
    for config in (config_of(), config_of(max_grad_norm=max_norm)):
        with process_group():
            reader, manifest = latest_reader(lake, config), new_manifest(lake, config)
            trainer = Trainer(
                lake, reader, build_train_state(manifest), ThroughputMeter(Timeline())
            )
            trainer.start_day(FIRST)
            loss = Loss.from_config(config, reader.features)
            batch = next(DayBatches(lake, reader, FIRST, manifest).shard_batches(0))
            take_step(trainer, batch, loss)
            weights = trainer.state.model.core.parameters()
            gradients = [w.grad for w in weights if w.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
    assert norms[0] > 0.001 and norms[1] == pytest.approx(min(norms[0], max_norm), rel=1e-3)


def test_the_tables_of_replicas_have_a_larger_rate(lake: Lake) -> None:
    """sqrt(c) times the configured one, for a moment scale c (2508.03854), in each step."""
    config = config_of(warmup_steps=2)
    with process_group():
        reader, manifest = latest_reader(lake, config), new_manifest(lake, config)
        state = build_train_state(manifest, ParallelismConfig(moment_scale=4))
        trainer = Trainer(lake, reader, state, ThroughputMeter(Timeline()))
        trainer.start_day(FIRST)
        loss = Loss.from_config(config, reader.features)
        batch = next(DayBatches(lake, reader, FIRST, manifest).shard_batches(0))
        take_step(trainer, batch, loss)
        (rate,) = {group["lr"] for group in state.tables.fused_optimizer.param_groups}
    assert rate == pytest.approx(2 * config.embedding_lr / 2)


def test_each_pass_reads_each_row_once_in_an_order_of_its_own(lake: Lake) -> None:
    passes = 3
    config = config_of(passes=passes)
    with process_group():
        reader, manifest = latest_reader(lake, config), new_manifest(lake, config)
        day = DayBatches(lake, reader, FIRST, manifest)
        batches = list(day.shard_batches(0))
        assert day.pass_ends(0, 1) == tuple(len(batches) * n // passes for n in (1, 2, 3))
        done, consumed_batches = 2 * len(batches), (3, 1)
        progress = {"batches": done, "num_shards": 2, "consumed_batches": consumed_batches}
        resumed = replace(day, manifest=manifest.model_copy(update=progress))
        remaining = sum(
            len(list(resumed.shard_batches(shard, consumed)))
            for shard, consumed in enumerate(consumed_batches)
        )
        assert resumed.pass_ends(0, 1)[-1] == done + remaining
    per_pass = len(batches) // passes
    assert [batch.is_repeated for batch in batches] == [False] * per_pass + [True] * 2 * per_pass
    by_pass = [
        [i for batch in batches[n * per_pass : (n + 1) * per_pass] for i in batch.impression_ids]
        for n in range(passes)
    ]
    assert all(count == 1 for count in Counter(by_pass[0]).values()) and len(by_pass[0]) > 500
    assert sorted(by_pass[0]) == sorted(by_pass[1]) == sorted(by_pass[2])
    assert len({tuple(order) for order in by_pass}) == passes


def test_metrics_and_look_ups_count_the_first_pass_only(lake: Lake, tmp_path: Path) -> None:
    """Without decay, the first pass is the same training whether a second one follows."""
    metrics, counts = [], []
    for passes in (1, 2):
        own = copy_of(lake, tmp_path / str(passes))
        with process_group():
            metrics += train_days(own, (FIRST, FIRST), config_of(passes=passes, decay_share=0.0))
        tensors = trained_tensors(own)
        counts.append({n: tensors[f"item_rows.{n}"] for n in ("lookups", "waiting_counts")})
    assert metrics[0] == metrics[1] and len(metrics[0]) > 3
    assert all(torch.equal(counts[0][name], counts[1][name]) for name in counts[0])
    assert counts[0]["lookups"].sum() > 1000


class StoppedError(Exception):
    """A training was stopped."""


@dataclass
class StoppingCheckpointer(AsyncCheckpointer):
    """Stops the training right after the checkpoint of a step of the day."""

    stop_at: int = field(kw_only=True)

    def save(self, path: StoragePath, train_state: TrainState) -> None:
        super().save(path, train_state)
        if train_state.manifest.batches == self.stop_at:
            self.wait()
            raise StoppedError


def train_until(lake: Lake, config: TrainConfig, step: int) -> int:
    """Train on the first day, stopped at a step; returns the number of steps of the day."""
    with process_group():
        reader = latest_reader(lake, config)
        manifest, path = starting_point(lake, reader, (FIRST, FIRST), config)
        statistics = None if path else first_day_statistics(lake, reader, manifest)
        if statistics:
            manifest = manifest.with_base_rates(statistics.base_rates)
        state = build_train_state(manifest, statistics=statistics)
        if path:
            checkpoint.load_checkpoint(path, state)
        meter = ThroughputMeter(Timeline())
        trainer = Trainer(lake, reader, state, meter, StoppingCheckpointer(stop_at=step))
        with pytest.raises(StoppedError):
            trainer.train_day(FIRST)
    return trainer.pass_ends[-1]


def trained_tensors(lake: Lake) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint of the first day."""
    path = checkpoint.checkpoint_path(lake.root, FIRST)
    manifest = checkpoint.read_manifest(path, None)
    assert manifest and manifest.complete
    (file,) = checkpoint.verified_state_dir(path, lake.spec.hash).glob("*.safetensors")
    return dict(load_file(file))


def test_a_run_stopped_in_each_pass_and_in_the_decay_is_the_same_run(
    gem_lake: Lake, lake: Lake, tmp_path: Path
) -> None:
    """The checkpoint of the day is that of the uninterrupted run, to the last bit."""
    path = checkpoint.checkpoint_path(gem_lake.root, FIRST)
    manifest = checkpoint.read_manifest(path, None)
    assert manifest
    config, own = manifest.training, copy_of(lake, tmp_path / "lake")
    steps = train_until(own, config, 5)
    assert train_until(own, config, 15) == steps and config.passes == 2 and config.decay_share > 0
    assert 5 < steps // 2 < steps * (1 - config.decay_share) + 1 < 15 < steps
    with process_group():
        train_days(own, (FIRST, FIRST), config)
    expected, actual = trained_tensors(gem_lake), trained_tensors(own)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(values, actual[name]) for name, values in expected.items())


def test_muon_and_new_embeddings_resume_exactly(lake: Lake, tmp_path: Path) -> None:
    config = config_of(
        dense_optimizer="muon", reset_embeddings_each_pass=True, batch_rows=128, checkpoint_every=3
    )
    alone, stopped = (copy_of(lake, tmp_path / name) for name in ("alone", "stopped"))
    assert train_until(stopped, config, 6) < 12
    for own in (stopped, alone):
        with process_group():
            train_days(own, (FIRST, FIRST), config)
    expected, actual = trained_tensors(alone), trained_tensors(stopped)
    assert any("momentum_buffer" in name for name in expected)
    assert all(torch.equal(values, actual[name]) for name, values in expected.items())


def pass_ends_of_two_shards(done: int) -> tuple[int, ...]:
    """Ends of three passes, for a process that resumes with two shards of two batches each."""
    shards = [(2, (done + 1) // 2), (2, done // 2)]
    return tuple(done + steps_to_pass_end(shards, number, 3) for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("resumed_at", "resets"), [([], [4, 8]), ([5], [4, 9]), ([4, 5, 6, 7, 9, 10], [4, 9])]
)
def test_embeddings_restart_once_before_each_further_pass(
    lake: Lake, resumed_at: list[int], resets: list[int]
) -> None:
    """A resumed run computes the ends of passes again, and may find that one ends a step later."""
    config = config_of(passes=3, reset_embeddings_each_pass=True, embedding_lr=1e-9)
    changed = []
    with process_group():
        reader, manifest = latest_reader(lake, config), new_manifest(lake, config)
        state = build_train_state(manifest)
        trainer = Trainer(lake, reader, state, ThroughputMeter(Timeline()))
        trainer.start_day(FIRST)
        loss = Loss.from_config(config, reader.features)
        batch = next(DayBatches(lake, reader, FIRST, manifest).shard_batches(0))
        for done in range(12):
            if done in (0, *resumed_at):
                trainer.pass_ends = pass_ends_of_two_shards(done)
            before = weights_of(state)["collection.embeddings.item.weight"]
            take_step(trainer, batch, loss)
            after = weights_of(state)["collection.embeddings.item.weight"]
            if (after - before).abs().mean() > 0.01:
                changed.append(done)
    assert changed == resets


def test_embeddings_restart_without_a_change_of_dense_weights(lake: Lake) -> None:
    with process_group():
        state = build_train_state(new_manifest(lake, CONFIG))
        for accumulator in local_optimizer_states(state.tables):
            accumulator.fill_(7)
        before = weights_of(state)
        user_key = f"collection.embeddings.{USER_TABLE}.weight"
        with torch.no_grad():
            for weight in state.tables.state_dict().values():
                for shard in local_shards(weight):
                    shard.rows.add_(1)
        reset_all_rows(state.tables, seed=1, accumulator=0.5)
        after = weights_of(state)
        assert all((values == 0.5).all() for values in local_optimizer_states(state.tables))
    for name, values in after.items():
        if name == user_key:
            assert not values.any()
        elif name.startswith("collection."):
            assert values.abs().max() <= 0.05 and not torch.equal(values, before[name])
        else:
            assert torch.equal(values, before[name])


def test_muon_refuses_sharded_matrices(lake: Lake) -> None:
    config = config_of(dense_optimizer="muon")
    with process_group(), pytest.raises(UserError, match="needs each matrix in one piece"):
        build_train_state(new_manifest(lake, config), ParallelismConfig(dense_parallelism="fsdp"))
