"""`gemline bench kuairand`: GEM and LightGBM on real impressions, overall and by tab.

Both read the same counters and attributes, are trained on the training days only and then frozen;
histories and counters stay point-in-time correct.
"""

import math
import tempfile
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import KUAIRAND_SPEC, BenchmarkResult, format_mean_std
from dags.commands import Scale
from dags.pipeline import data_steps
from dags.runner import run_pipeline
from dags.steps import PipelinePaths
from etl.cli.runner import parse_days_argument
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from training.evaluation.metrics import SliceMetrics

FIGURE_KEYS = ("gem_{}_auc", "gem_{}_logloss", "lightgbm_{}_auc", "lightgbm_{}_logloss")
COLUMNS = (
    "surface", "objective", "rows", "LightGBM AUC", "GEM AUC", "LightGBM logloss", "GEM logloss",
)  # fmt: skip


class KuairandArgs(StrictModel):
    """Arguments of the benchmark."""

    data: Annotated[Path, tyro.conf.arg(help="folder that holds KuaiRand's data/log_standard_*")]
    train: Annotated[str, tyro.conf.arg(help="first:last day to train on")]
    test: Annotated[str, tyro.conf.arg(help="first:last day to test on")]
    seeds: int = Field(default=5, ge=1)
    scale: Scale = "small"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: KuairandArgs) -> None:
    """AUC and logloss per objective on KuaiRand, for GEM and for LightGBM, overall and by tab."""
    with tempfile.TemporaryDirectory() as lake:
        measure(args, lake).show(args.as_json)


def measure(args: KuairandArgs, lake_root: str) -> BenchmarkResult:
    """Build the tables of the days, train both models and score them on the test days."""
    train, test = (
        parse_days_argument(args.train, "--train"),
        parse_days_argument(args.test, "--test"),
    )
    if train[1] >= test[0]:
        raise UserError(f"--test {args.test} must come after --train {args.train}")
    spec = load_spec(KUAIRAND_SPEC)
    result = BenchmarkResult(f"KuaiRand, learned {args.train}, tested {args.test}", COLUMNS)
    if not args.data.is_dir():
        for objective in spec.objectives:
            for key in FIGURE_KEYS:
                result.record(key.format(objective), None, f"{args.data} is absent")
        return result
    paths = PipelinePaths(KUAIRAND_SPEC, str(args.data), lake_root)
    run_pipeline(spec, paths, data_steps(spec, paths, ("--days", f"{train[0]}:{test[1]}")))
    lightgbm, gem_by_seed = scores(args, lake_root)
    for surface, objective in [(s.surface, s.objective) for s in lightgbm]:
        add_row(result, surface, objective, lightgbm, gem_by_seed)
    return result


def scores(
    args: KuairandArgs, lake_root: str
) -> tuple[list["SliceMetrics"], list[list["SliceMetrics"]]]:
    """Metrics by surface and objective of LightGBM, and of GEM by seed."""
    from etl.spec.units import DaySplit
    from etl.tables.lake import Lake
    from training.baseline import BaselineConfig, train_baseline
    from training.config import TrainConfig
    from training.distributed.process_group import process_group
    from training.evaluation.metrics import score_predictions
    from training.trainer import checkpoint
    from training.trainer.trainer import predict_test, train_days

    spec = load_spec(KUAIRAND_SPEC)
    lake = Lake(lake_root, spec)
    train_first, train_last = parse_days_argument(args.train)
    test_first, test_last = parse_days_argument(args.test)
    split = DaySplit(
        train_first=train_first,
        train_last=train_last,
        calibration=None,
        test_first=test_first,
        test_last=test_last,
        data_until=test_last,
    )

    surfaces = list(spec.surfaces)
    lightgbm = score_predictions(train_baseline(lake, split, BaselineConfig()), surfaces)
    gem_by_seed = []
    with process_group():
        for seed in range(args.seeds):
            config = TrainConfig.model_validate({"scale": args.scale, "seed": seed})
            checkpoint.remove_checkpoints(lake_root)
            train_days(lake, (train_first, train_last), config)
            gem_by_seed.append(score_predictions(predict_test(lake, split), surfaces))
    return lightgbm, gem_by_seed


def add_row(
    result: BenchmarkResult,
    surface: str,
    objective: str,
    lightgbm: list["SliceMetrics"],
    gem_by_seed: list[list["SliceMetrics"]],
) -> None:
    """Add a row of the table and its figures: LightGBM's, and GEM's means over the seeds."""

    def select(slices: list["SliceMetrics"]) -> "SliceMetrics":
        return next(s for s in slices if (s.surface, s.objective) == (surface, objective))

    base, gem = select(lightgbm), [select(slices) for slices in gem_by_seed]
    gem_auc, gem_logloss = [s.auc for s in gem], [s.logloss for s in gem]
    result.rows.append(
        (
            surface,
            objective,
            f"{base.rows:,}",
            f"{base.auc:.4f}",
            format_mean_std(gem_auc),
            f"{base.logloss:.4f}",
            f"{mean(gem_logloss):.4f}",
        )
    )
    name = objective if surface == "all" else f"{objective}_{surface}"
    values = (mean(gem_auc), mean(gem_logloss), base.auc, base.logloss)
    for key, value in zip(FIGURE_KEYS, values, strict=True):
        result.record(key.format(name), value, f"{base.rows} rows, all with the same outcome")
    if not math.isnan(base.auc):
        result.figures[f"gem_{name}_auc_seeds"] = [round(auc, 6) for auc in gem_auc]
