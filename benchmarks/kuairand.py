"""`gemline bench kuairand`: GEM beside LightGBM on real impressions, overall and by tab.

Both learn from the training days alone and are fixed then; histories and counters go on point in
time. Both read the same counters and attributes.
"""

import math
import tempfile
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.result import Result, told
from dags.commands import Scale
from dags.line import Place, data_steps
from dags.local import run_line
from etl.cli import days_argument
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import Strict

if TYPE_CHECKING:
    from training.loop.metrics import Score

KEYS = ("gem_{}_auc", "gem_{}_logloss", "lightgbm_{}_auc", "lightgbm_{}_logloss")
SPEC = Path(__file__).parents[1] / "conf" / "specs" / "kuairand.yaml"


class KuairandArgs(Strict):
    """Arguments of the benchmark."""

    data: Annotated[Path, tyro.conf.arg(help="folder that holds KuaiRand's data/log_standard_*")]
    train: Annotated[str, tyro.conf.arg(help="first:last day to learn from")]
    test: Annotated[str, tyro.conf.arg(help="first:last day to test on")]
    seeds: int = Field(default=5, ge=1)
    scale: Scale = "small"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: KuairandArgs) -> None:
    """AUC and logloss per objective on KuaiRand, for GEM and for LightGBM, overall and by tab."""
    with tempfile.TemporaryDirectory() as lake:
        measure(args, lake).show(args.as_json)


def measure(args: KuairandArgs, root: str) -> Result:
    """Tables of the days, then both models."""
    train, test = days_argument(args.train, "--train"), days_argument(args.test, "--test")
    if train[1] >= test[0]:
        raise UserError(f"--test {args.test} must come after --train {args.train}")
    spec = load_spec(SPEC)
    result = Result(
        f"KuaiRand, learned {args.train}, tested {args.test}",
        (
            "surface",
            "objective",
            "rows",
            "LightGBM AUC",
            "GEM AUC",
            "LightGBM logloss",
            "GEM logloss",
        ),
    )
    if not args.data.is_dir():
        for objective in spec.objectives:
            for key in KEYS:
                result.take(key.format(objective), None, f"{args.data} is absent")
        return result
    place = Place(SPEC, str(args.data), root)
    run_line(spec, place, data_steps(place, ("--days", f"{train[0]}:{test[1]}")))
    lightgbm, gems = scores(args, root)
    for surface, objective in [(s.surface, s.objective) for s in lightgbm]:
        add(result, surface, objective, lightgbm, gems)
    return result


def scores(args: KuairandArgs, root: str) -> tuple[list["Score"], list[list["Score"]]]:
    """Scores of LightGBM, and of GEM by seed."""
    from etl.tables.lake import Lake
    from training.baseline import BaselineConfig, train_baseline
    from training.config import TrainConfig
    from training.evaluate import predict_test
    from training.gem import train
    from training.loop import checkpoint
    from training.loop.metrics import score
    from training.parallel.processes import process_group
    from training.predictions import Predictions
    from training.split import Split

    spec = load_spec(SPEC)
    lake = Lake(root, spec)
    (first, last), (test_first, test_last) = days_argument(args.train), days_argument(args.test)
    split = Split(
        train_first=first,
        train_last=last,
        calibration=None,
        test_first=test_first,
        test_last=test_last,
        landed=test_last,
    )

    def scored(p: Predictions) -> list["Score"]:
        surfaces, objectives = list(spec.surfaces), list(spec.objectives)
        return score(p.probability, p.labels, p.known, p.surface, surfaces, objectives)

    lightgbm = scored(train_baseline(lake, split, BaselineConfig()))
    gems = []
    with process_group():
        for seed in range(args.seeds):
            config = TrainConfig.model_validate({"scale": args.scale, "seed": seed})
            checkpoint.forget(root)
            train(lake, (first, last), config)
            gems.append(scored(predict_test(lake, split)))
    return lightgbm, gems


def add(
    result: Result, surface: str, objective: str, lightgbm: list["Score"], gems: list[list["Score"]]
) -> None:
    """One row of the table and its figures: LightGBM's, and GEM's mean over the seeds."""

    def of(rows: list["Score"]) -> "Score":
        return next(s for s in rows if (s.surface, s.objective) == (surface, objective))

    base, ours = of(lightgbm), [of(rows) for rows in gems]
    auc, logloss = [s.auc for s in ours], [s.logloss for s in ours]
    both = not math.isnan(base.auc)
    result.rows.append(
        (
            surface,
            objective,
            f"{base.rows:,}",
            f"{base.auc:.4f}",
            told(auc),
            f"{base.logloss:.4f}",
            f"{mean(logloss):.4f}",
        )
    )
    name = objective if surface == "all" else f"{objective}_{surface}"
    values = (mean(auc), mean(logloss), base.auc, base.logloss)
    for key, value in zip(KEYS, values, strict=True):
        result.take(key.format(name), value, f"{base.rows} rows, all with the same outcome")
    if both:
        result.figures[f"gem_{name}_auc_seeds"] = [round(a, 6) for a in auc]
