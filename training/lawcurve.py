"""How much better does a model get by being larger? NE against the FLOPs of an example.

One pass over the same days for each model and size; the test days are never chosen by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from scipy.stats import linregress, t

from training.config import TrainConfig
from training.loop.metrics import score
from training.predictions import Predictions
from training.study import Study
from training.trials import Trials

SIZES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
MODELS: Mapping[str, dict[str, object]] = {
    "GEM": {},
    "plain Wukong": {"max_length": 0, "model": {"attentive": False}},
    "HSTU": {"model": {"interaction": "plain", "sequence": {"layer": "hstu", "rotary": True}}},
}
SURE = 0.975


@dataclass(frozen=True)
class Law:
    """NE = a + slope log10(FLOPs): the slope, half of its 95 % interval, and R²."""

    slope: float
    half: float
    r_squared: float

    @classmethod
    def of(cls, flops: Sequence[float], ne: Sequence[float]) -> "Law":
        """Least squares over at least three points."""
        found = linregress(np.log10(flops), ne)
        half = float(t.ppf(SURE, len(ne) - 2) * found.stderr)
        return cls(float(found.slope), half, float(found.rvalue**2))


def lawcurve(trials: Trials, base: TrainConfig, objective: str, seeds: int, command: str) -> Study:
    """Each model in each size: a table, and the curves of (FLOPs, NE) for its picture."""
    curves = {name: curve(trials, base, name, objective, seeds) for name in MODELS}
    return Study(
        title=f"NE of {objective} on the test days by size of the model, one pass",
        command=command,
        columns=("model", "MFLOP", *(f"x{size:g}" for size in SIZES), "1e-4 NE a decade", "R²"),
        rows=tuple(_row(name, points) for name, points in curves.items()),
        curves=curves,
    )


def curve(
    trials: Trials, base: TrainConfig, name: str, objective: str, seeds: int
) -> tuple[tuple[float, float], ...]:
    """(FLOPs of an example, mean NE over seeds) of a model in each size."""
    points = []
    for size in SIZES:
        told = base.model_dump() | MODELS[name] | {"size": size}
        found = [
            trials.gem(TrainConfig.model_validate(told | {"seed": base.seed + seed}))
            for seed in range(seeds)
        ]
        points.append((found[0].flops, mean(ne(f.predictions, objective) for f in found)))
    return tuple(points)


def _row(name: str, points: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    flops, found = zip(*points, strict=True)
    law = Law.of(flops, found)
    span = f"{min(flops) / 1e6:.1f} to {max(flops) / 1e6:.0f}"
    slope = f"{1e4 * law.slope:+.0f} ± {1e4 * law.half:.0f}"
    return name, span, *(f"{x:.4f}" for x in found), slope, f"{law.r_squared:.2f}"


def ne(found: Predictions, objective: str) -> float:
    """NE over all surfaces."""
    scores = score(
        found.probability, found.labels, found.known, found.surface, (), found.objectives
    )
    return next(s.ne for s in scores if s.objective == objective)
