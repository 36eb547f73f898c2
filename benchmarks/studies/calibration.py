"""`gemline bench calibration`: ratio of predictions to outcomes of rankers on real logs.

Runs the pipeline on some days of KuaiRand up to its rankers, in `--work`, and skips finished
steps. Rankers are calibrated on the day before the reported one.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from benchmarks.harness import KUAIRAND_SPEC, BenchmarkResult
from dags.pipeline import (
    TRAIN_RANKER,
    PipelinePaths,
    all_days_flags,
    data_steps,
    gem_steps,
    latest_mature_split,
    model_flags,
    surface_step,
)
from dags.runner import run_pipeline
from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.base import StrictModel
from etl.spec.units import DaySplit, parse_date_range

if TYPE_CHECKING:
    from training.evaluation.predictions import Predictions

DAYS = "2022-04-25:2022-04-30"
MIN_POSITIVES = 1000  # with fewer the interval is too wide for the goal
COLUMNS = ("surface", "objective", "positives", "predictions / outcomes [95 %]", "goal")


class CalibrationArgs(StrictModel):
    """Arguments of the benchmark."""

    data: Annotated[Path, tyro.conf.arg(help="folder that holds KuaiRand's data/log_standard_*")]
    work: Annotated[Path, tyro.conf.arg(help="folder for tables and models, kept")]
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: CalibrationArgs) -> None:
    """Ratio of predictions to outcomes of each surface and objective on the last day."""
    from ranking.registry.ranker import latest_trained_pointer
    from training.evaluation.predictions import Predictions, evaluation_path

    if not args.data.is_dir():
        raise UserError(f"--data {args.data} is not a folder; it must hold KuaiRand's raw files")
    spec = load_spec(KUAIRAND_SPEC)
    paths = PipelinePaths(KUAIRAND_SPEC, str(args.data.resolve()), str(args.work.resolve()))
    split = latest_mature_split(spec, *parse_date_range(DAYS))
    train_rankers(spec, paths, split)
    result = BenchmarkResult(f"Rankers of KuaiRand on {split.test_last}", COLUMNS)
    errors: list[float] = []
    for surface in spec.ad_surfaces:
        if latest_trained_pointer(paths.lake, surface).live_folder:
            path = evaluation_path(paths.lake, f"distilled-{surface}")
            errors += add_surface_rows(result, surface, Predictions.read(path, split))
    reason = f"no surface has {MIN_POSITIVES:,} positives of an objective"
    result.record("calibration_worst_kuairand", max(errors, default=None), reason)
    result.show(args.as_json)


def train_rankers(spec: DataSpec, paths: PipelinePaths, split: DaySplit) -> None:
    """Run the pipeline: tables, GEM and its outputs, and a ranker per surface."""
    flags = model_flags(split)
    steps = [*data_steps(paths, all_days_flags(split)), *gem_steps(paths, flags)]
    steps += [surface_step(TRAIN_RANKER, paths, flags, surface) for surface in spec.ad_surfaces]
    run_pipeline(spec, paths, steps)


def add_surface_rows(
    result: BenchmarkResult, surface: str, predictions: "Predictions"
) -> list[float]:
    """Add a surface's rows; returns |ratio - 1| of the objectives with enough positives."""
    from training.evaluation.predictions import calibration_interval

    errors = []
    for i, objective in enumerate(predictions.objectives):
        positives = int(predictions.labels[predictions.label_mask[:, i], i].sum())
        if not positives:
            continue
        ratio = calibration_interval(predictions, objective)
        has_goal = positives >= MIN_POSITIVES
        if has_goal:
            errors.append(abs(ratio.value - 1))
        interval = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        goal = "0.97 to 1.03" if has_goal else ""
        result.rows.append((surface, objective, f"{positives:,}", interval, goal))
    return errors
