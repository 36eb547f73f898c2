"""`gemline bench quality`: how far GEM closes the gaps that are left, on simulated and real logs.

Long: the simulator's part is that of `gemline bench history` and goes on from its finished runs.
"""

import tempfile
from pathlib import Path
from statistics import mean
from typing import Annotated

import tyro
from pydantic import Field

from benchmarks import history, kuairand
from benchmarks.result import Result

COLUMNS = ("figure", "value", "goal", "of")
TRAIN, TEST = "2022-04-25:2022-04-29", "2022-04-30:2022-04-30"


class QualityArgs(history.HistoryArgs):
    """Arguments of the benchmark."""

    kuairand: Annotated[
        Path | None, tyro.conf.arg(help="folder that holds KuaiRand's data/log_standard_*")
    ] = None
    kuairand_seeds: int = Field(default=5, ge=1)


def bench(args: QualityArgs) -> None:
    """`sim_gap_ratio` and `kuairand_click_gain`, beside what they are made of."""
    result = Result("GEM's quality", COLUMNS)
    simulated(args, result)
    real(args, result)
    result.show(args.as_json)


def simulated(args: QualityArgs, result: Result) -> None:
    """How much of LightGBM's distance to the truth GEM leaves, click on all surfaces."""
    longest = max(history.LENGTHS)
    names = ["bound", "lightgbm", *(f"gem-{longest}-{seed}" for seed in range(args.seeds))]
    runs = history.runs(args, names)
    bound, trees = runs["bound"]["click"], runs["lightgbm"]["click"]
    gem = mean(runs[name]["click"] for name in names[2:])
    ratio = (gem - bound) / (trees - bound)
    result.take("sim_gap_ratio", ratio, "")
    said = f"click NE: GEM {gem:.4f}, LightGBM {trees:.4f}, truth {bound:.4f}; {args.seeds} seeds"
    result.rows.append(("sim_gap_ratio", f"{ratio:.2f}", "<= 0.5", said))


def real(args: QualityArgs, result: Result) -> None:
    """Click AUC on KuaiRand less that of LightGBM."""
    key, why = "kuairand_click_gain", "--kuairand names no folder"
    if args.kuairand is None:
        result.take(key, None, why)
        result.rows.append((key, "", ">= 0.008", why))
        return
    asked = kuairand.KuairandArgs(
        data=args.kuairand, train=TRAIN, test=TEST, seeds=args.kuairand_seeds
    )
    with tempfile.TemporaryDirectory() as lake:
        found = kuairand.measure(asked, lake).figures
    gem, trees = found["gem_click_auc"], found["lightgbm_click_auc"]
    if not isinstance(gem, float) or not isinstance(trees, float):
        result.take(key, None, f"{args.kuairand} is absent")
        return
    result.take(key, gem - trees, "")
    said = f"click AUC: GEM {gem:.4f}, LightGBM {trees:.4f}; {args.kuairand_seeds} seeds"
    result.rows.append((key, f"{gem - trees:+.4f}", ">= 0.008", said))
