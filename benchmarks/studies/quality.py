"""`gemline bench quality`: the quality of GEM relative to its bounds, on simulated and real logs.

Long: the simulator's part is that of `gemline bench history` and uses its finished runs.
"""

import tempfile
from pathlib import Path
from statistics import mean
from typing import Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BenchmarkResult
from benchmarks.public import kuairand
from benchmarks.studies.history_length import LENGTHS, HistoryArgs, ne_by_run

COLUMNS = ("figure", "value", "goal", "of")
KUAIRAND_TRAIN, KUAIRAND_TEST = "2022-04-25:2022-04-29", "2022-04-30:2022-04-30"


class QualityArgs(HistoryArgs):
    """Arguments of the benchmark."""

    kuairand: Annotated[
        Path | None, tyro.conf.arg(help="folder that holds KuaiRand's data/log_standard_*")
    ] = None
    kuairand_seeds: int = Field(default=5, ge=1)


def bench_quality(args: QualityArgs) -> None:
    """`sim_gap_ratio` and `kuairand_click_gain`, with their components."""
    result = BenchmarkResult("GEM's quality", COLUMNS)
    record_simulator_gap(args, result)
    record_kuairand_gain(args, result)
    result.show(args.as_json)


def record_simulator_gap(args: QualityArgs, result: BenchmarkResult) -> None:
    """The distance of GEM's click NE to the true probabilities over LightGBM's, all surfaces."""
    gem_runs = [f"gem-{max(LENGTHS)}-{seed}" for seed in range(args.seeds)]
    ne = ne_by_run(args.work, ["bound", "lightgbm", *gem_runs])
    bound, lightgbm = ne["bound"]["click"], ne["lightgbm"]["click"]
    gem = mean(ne[run]["click"] for run in gem_runs)
    ratio = (gem - bound) / (lightgbm - bound)
    result.record("sim_gap_ratio", ratio, "")
    parts = (
        f"click NE: GEM {gem:.4f}, LightGBM {lightgbm:.4f}, truth {bound:.4f}; {args.seeds} seeds"
    )
    result.rows.append(("sim_gap_ratio", f"{ratio:.2f}", "<= 0.5", parts))


def record_kuairand_gain(args: QualityArgs, result: BenchmarkResult) -> None:
    """Click AUC of GEM on KuaiRand minus that of LightGBM."""
    key, goal = "kuairand_click_gain", ">= 0.008"
    if args.kuairand is None:
        reason = "--kuairand is not set"
        result.record(key, None, reason)
        result.rows.append((key, "", goal, reason))
        return
    kuairand_args = kuairand.KuairandArgs(
        data=args.kuairand, train=KUAIRAND_TRAIN, test=KUAIRAND_TEST, seeds=args.kuairand_seeds
    )
    with tempfile.TemporaryDirectory() as lake:
        figures = kuairand.measure(kuairand_args, lake).figures
    gem, lightgbm = figures["gem_click_auc"], figures["lightgbm_click_auc"]
    if not isinstance(gem, float) or not isinstance(lightgbm, float):
        result.record(key, None, f"{args.kuairand} is absent")
        return
    result.record(key, gem - lightgbm, "")
    parts = f"click AUC: GEM {gem:.4f}, LightGBM {lightgbm:.4f}; {args.kuairand_seeds} seeds"
    result.rows.append((key, f"{gem - lightgbm:+.4f}", goal, parts))
