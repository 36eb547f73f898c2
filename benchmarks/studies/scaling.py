"""`gemline bench scaling`: NE against FLOPs per example as models grow.

One pass over the same days for each architecture and size. Test days are never used for selection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro

from ranking.report.study import StudyResult
from training.commands import SplitArgs
from training.config import TrainConfig

if TYPE_CHECKING:
    from benchmarks.studies.trials import TrialRunner
    from training.evaluation.predictions import Predictions

WIDTH_MULTIPLIERS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
ARCHITECTURES: Mapping[str, dict[str, object]] = {
    "GEM": {},
    "plain Wukong": {"max_length": 0, "model": {"input_dependent_projection": False}},
    "HSTU": {"model": {"interaction": "plain", "sequence": {"layer": "hstu", "rotary": True}}},
}
T_QUANTILE = 0.975


class ScalingArgs(SplitArgs, TrainConfig):
    """Days, the configuration of all models, and the measured objective."""

    objective: Annotated[str, tyro.conf.arg(help="objective whose NE is measured")]
    seeds: Annotated[int, tyro.conf.arg(help="trainings of each model and size")] = 1


def bench_scaling(args: ScalingArgs) -> None:
    """NE against FLOPs per example: GEM, plain Wukong and HSTU in six sizes (long; resumable)."""
    from benchmarks.studies.trials import TrialRunner
    from training.trainer.step import per_objective

    lake = args.open_lake()
    per_objective({args.objective: 1.0}, list(lake.spec.objectives), "--objective")
    base = TrainConfig.model_validate(args.model_dump(include=set(TrainConfig.model_fields)))
    folder = Path(args.lake, "studies")
    command = (
        f"gemline bench scaling --train {args.train} --test {args.test} "
        f"--objective {args.objective}"
    )
    trials = TrialRunner(lake, args.split, folder / "trials")
    study = scaling_study(trials, base, args.objective, args.seeds, command)
    study.save(folder / "scaling.json")
    study.print_table()
    print(f"{folder / 'scaling.json'} is written; `gemline report` draws it")


@dataclass(frozen=True)
class ScalingLaw:
    """NE = a + slope log10(FLOPs): the slope, half of its 95 % interval, and R²."""

    slope: float
    ci_half_width: float
    r_squared: float

    @classmethod
    def fit(cls, flops: Sequence[float], ne: Sequence[float]) -> "ScalingLaw":
        """Least squares over at least three points."""
        import numpy as np
        from scipy.stats import linregress, t

        line = linregress(np.log10(flops), ne)
        half_width = float(t.ppf(T_QUANTILE, len(ne) - 2) * line.stderr)
        return cls(float(line.slope), half_width, float(line.rvalue**2))


def scaling_study(
    trials: "TrialRunner", base: TrainConfig, objective: str, seeds: int, command: str
) -> StudyResult:
    """Each architecture in each size: a table, and the curves of (FLOPs, NE) for its plot."""
    curves = {name: scaling_curve(trials, base, name, objective, seeds) for name in ARCHITECTURES}
    sizes = (f"x{multiplier:g}" for multiplier in WIDTH_MULTIPLIERS)
    return StudyResult(
        title=f"NE of {objective} on the test days by size of the model, one pass",
        command=command,
        columns=("model", "MFLOP", *sizes, "1e-4 NE a decade", "R²"),
        rows=tuple(_row(name, points) for name, points in curves.items()),
        curves=curves,
    )


def scaling_curve(
    trials: "TrialRunner", base: TrainConfig, name: str, objective: str, seeds: int
) -> tuple[tuple[float, float], ...]:
    """(FLOPs per example, mean NE over seeds) of an architecture in each size."""
    points = []
    for multiplier in WIDTH_MULTIPLIERS:
        options = base.model_dump() | ARCHITECTURES[name] | {"width_multiplier": multiplier}
        by_seed = [
            trials.gem(TrainConfig.model_validate(options | {"seed": base.seed + seed}))
            for seed in range(seeds)
        ]
        ne = mean(ne_over_surfaces(trial.predictions, objective) for trial in by_seed)
        points.append((by_seed[0].flops_per_example, ne))
    return tuple(points)


def _row(name: str, points: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    flops, ne = zip(*points, strict=True)
    law = ScalingLaw.fit(flops, ne)
    mflop_range = f"{min(flops) / 1e6:.1f} to {max(flops) / 1e6:.0f}"
    slope = f"{1e4 * law.slope:+.0f} ± {1e4 * law.ci_half_width:.0f}"
    return name, mflop_range, *(f"{x:.4f}" for x in ne), slope, f"{law.r_squared:.2f}"


def ne_over_surfaces(predictions: "Predictions", objective: str) -> float:
    """NE of an objective over all surfaces."""
    from training.evaluation.metrics import slice_metrics

    slices = slice_metrics(
        predictions.probabilities,
        predictions.labels,
        predictions.label_mask,
        predictions.surface,
        (),
        predictions.objectives,
    )
    return next(s.ne for s in slices if s.objective == objective)
