"""The whole training of a GEM of fixed sizes: reading, forward, backward and optimizers.

The sizes are those of the scale `small` of commit 0e990e9, so that speeds of later versions can be
compared. The data are logs of a quarter of the demo's users, in one bucket instead of four, so that
files have as many rows as those of the demo. A day's training includes opening the tables.
"""

import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import yaml
from typing_extensions import override

from benchmarks.harness import SIMULATOR_SPEC, BenchmarkResult
from benchmarks.pipelines import simulate_logs
from benchmarks.system.model_blocks import GEMM_SIZE, Speed, count_flops, cpu_seconds
from dags.pipeline import data_steps
from dags.runner import run_pipeline
from dags.steps import PipelinePaths
from etl.cli.runner import read_yaml_mapping
from etl.spec import load_spec
from etl.tables.lake import Lake
from training.config import TrainConfig
from training.distributed.process_group import process_group, synchronized_batches
from training.evaluation.metrics import PrequentialMetrics
from training.model.config import GemConfig, SequenceOptions
from training.trainer.resume import DayBatches, first_day_statistics, starting_point
from training.trainer.state import build_train_state, latest_reader
from training.trainer.step import Loss
from training.trainer.throughput import ThroughputMeter, Timeline
from training.trainer.trainer import Trainer

USERS, BUCKETS = 300, 1
FIRST_DAY, TRAINED_DAY, LAST_DAY = date(2026, 1, 1), date(2026, 1, 9), date(2026, 1, 11)
ROUNDS, PRODUCTS_PER_ROUND = 7, 100
GOAL_SHARE = 0.30
SIZES = GemConfig(
    interaction="wukong", parallel_interaction=None, input_dependent_projection=True,
    cross_layer_rows=0, user_hash_buckets=2**17, low_cardinality_threshold=0, esmm_parents={},
    value_loss_weight=0.0, auxiliary_weight=0.0,
    numeric_scale_lr_factor=0.0, trunk_scale_lr_factor=0.0, embedding_dim=32, numeric_segments=16,
    low_cardinality_rows=2, trunk_layers=1, tower_width=16,
    layers=2, fm_rows=12, linear_rows=12, rank=12, mlp_width=128,
    event_width=64, event_layers=1,
    encoded_events=128, matched_events=32, heads=2, window=64, pooled_rows=2, recent_rows=2,
    context_rows=4, request_rows=8, output_embedding_dim=32, dropout=0.1, item_dropout=0.2,
    sequence=SequenceOptions(
        flow="sep", layer="transformer", personalization="gdpa", pooling="pma", cls_tokens=0,
        rotary=False, computation_skip=False, pyramid_stride=1, next_action_weight=0.0,
    ),
)  # fmt: skip


class FixedSizes(TrainConfig):
    """The settings of commit 0e990e9, whatever the scales are now."""

    batch_rows: int = 128
    passes: int = 1
    decay_share: float = 0.0
    entropy_power: float = 0.0

    @property
    @override
    def gem_config(self) -> GemConfig:
        """SIZES."""
        return SIZES


def measure_gem_training(result: BenchmarkResult) -> None:
    """`gem_rows_per_s` and `gem_limit_share`."""
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        lake = build_lake(Path(folder))
        with process_group():
            training = DayTraining.start(lake)
            steps = {
                "day": training.train_day,
                "gemm": lambda: [a @ b for _ in range(PRODUCTS_PER_ROUND)],
            }
            seconds = cpu_seconds(steps, ROUNDS)
            flops = count_flops(training.train_day)
    gemm_rate = PRODUCTS_PER_ROUND * 2 * GEMM_SIZE**3 / seconds["gemm"]
    rows = training.rows_per_day
    speed = Speed(rows / seconds["day"], rows * gemm_rate / flops, gemm_rate)
    share = speed.units_per_second / speed.roofline
    result.record("gem_rows_per_s", speed.units_per_second, "")
    result.record("gem_limit_share", share, "")
    title = f"GEM, all of a day's training, {flops / rows / 1e6:.1f} MFLOP a row"
    result.rows.append((*speed.table_row(title, "rows", 0)[:4], f"share >= {GOAL_SHARE}"))


def build_lake(folder: Path) -> Lake:
    """A lake of simulated logs, with all examples."""
    spec = read_yaml_mapping(SIMULATOR_SPEC) | {"buckets": BUCKETS}
    paths = PipelinePaths(folder / "spec.yaml", str(folder / "raw"), str(folder / "lake"))
    paths.spec.write_text(yaml.safe_dump(spec, sort_keys=False))
    simulate_logs(Path(paths.raw), {"users": USERS})
    days = ("--days", f"{FIRST_DAY}:{LAST_DAY}")
    data_spec = load_spec(paths.spec)
    run_pipeline(data_spec, paths, data_steps(data_spec, paths, days))
    return Lake(paths.lake, data_spec)


@dataclass
class DayTraining:
    """Trains on one day again and again, as a run does that began on FIRST_DAY."""

    trainer: Trainer
    loss: Loss
    rows_per_day: int = 0

    @classmethod
    def start(cls, lake: Lake) -> "DayTraining":
        """The training of a new model."""
        config = FixedSizes()
        reader = latest_reader(lake, config)
        manifest, _ = starting_point(lake, reader, (TRAINED_DAY, TRAINED_DAY), config)
        manifest = manifest.model_copy(update={"trained_from": FIRST_DAY})
        state = build_train_state(manifest, statistics=first_day_statistics(lake, reader, manifest))
        trainer = Trainer(lake, reader, state, ThroughputMeter(Timeline()))
        trainer.start_day(TRAINED_DAY)
        return cls(trainer, Loss.from_config(config, reader.features))

    def train_day(self) -> None:
        """One pass over the day; its examples and histories are read from the tables."""
        trainer, state = self.trainer, self.trainer.state
        state.manifest = state.manifest.next_day(TRAINED_DAY, 1)
        reader = latest_reader(trainer.lake, trainer.config)
        metrics = PrequentialMetrics(reader.features, self.loss)
        day = DayBatches(trainer.lake, reader, TRAINED_DAY, state.manifest)
        rows = 0
        for step in trainer.prepare(synchronized_batches(day.for_rank(0, 1), iter(()))):
            trainer.train_batch(step, self.loss, metrics)
            trainer.meter.after_step(step.host)
            rows += len(step.host)
        self.rows_per_day = rows
