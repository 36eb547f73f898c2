"""`gemline bench scaling`: NE against FLOPs per example as models grow.

Without `--work` the committed figures are printed. With it, a study of some hours runs on the
frozen logs of `gemline bench history`, with over 300,000 training rows; finished trainings are kept
in that folder, one file each. Depth, rows, rank, widths and history grow together (SIZES). One pass
over the days. The dense rate is the base rate times sqrt(width of SIZES[0] / width), and the base
rate of each architecture is chosen at the two smallest sizes, on a day before the test day.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import RESULTS, BenchmarkResult, commits_of
from benchmarks.studies.committed import StudyFolder, share_of, show_committed
from etl.errors import TemporaryError
from etl.spec.base import StrictModel
from etl.spec.units import DaySplit
from ranking.report.study import StudyResult
from training.config import TrainConfig

if TYPE_CHECKING:
    from benchmarks.studies.seeded_estimates import SeededEstimate
    from benchmarks.studies.trials import Trial, TrialRunner
    from etl.array_types import Float64
    from training.evaluation.predictions import Predictions

OBJECTIVE = "click"
GEM = "GEM"
ARCHITECTURES: Mapping[str, dict[str, object]] = {
    GEM: {},
    "HSTU": {
        "interaction": "plain",
        "parallel_interaction": None,
        "sequence": {"layer": "hstu", "rotary": True},
    },
    "DCNv2": {
        "interaction": "dcnv2",
        "parallel_interaction": None,
        "sequence": {"flow": "sole"},
    },
}


@dataclass(frozen=True)
class Size:
    """The sizes of a model, and the events of its histories."""

    max_length: int
    sizes: Mapping[str, int]


SIZES = (
    Size(64, {"embedding_dim": 12, "mlp_width": 48, "layers": 1, "fm_rows": 4, "linear_rows": 4,
              "rank": 4, "event_width": 16, "event_layers": 1, "encoded_events": 32,
              "matched_events": 16, "window": 32}),
    Size(128, {"embedding_dim": 16, "mlp_width": 96, "layers": 2, "fm_rows": 6, "linear_rows": 6,
               "rank": 6, "event_width": 32, "event_layers": 1, "encoded_events": 64,
               "matched_events": 24, "window": 32}),
    Size(256, {"embedding_dim": 24, "mlp_width": 144, "layers": 2, "fm_rows": 8, "linear_rows": 8,
               "rank": 8, "event_width": 48, "event_layers": 2, "encoded_events": 96,
               "matched_events": 32, "window": 64}),
    Size(512, {"embedding_dim": 40, "mlp_width": 192, "layers": 3, "fm_rows": 12,
               "linear_rows": 12, "rank": 12, "event_width": 64, "event_layers": 2,
               "encoded_events": 128, "matched_events": 48, "window": 64}),
    Size(1024, {"embedding_dim": 48, "mlp_width": 256, "layers": 4, "fm_rows": 16,
                "linear_rows": 16, "rank": 16, "event_width": 80, "event_layers": 3,
                "encoded_events": 160, "matched_events": 64, "window": 64}),
)  # fmt: skip
BASE_RATES = (5e-4, 1e-3, 2e-3)
SWEPT_SIZES, SWEEP_SEED = 2, 100
GOALS = {"slope_gem": "<= -40", "slope_gem_high": "< 0", "slope_gem_less_best_peer": "< 0"}
RESULT = RESULTS / "scaling.json"


def days_of(train_last: int, test: int, data_until: int) -> DaySplit:
    """Train on all days of January 2026 up to one, and test on another."""
    first, last, tested, until = (date(2026, 1, day) for day in (1, train_last, test, data_until))
    return DaySplit(
        train_first=first, train_last=last, calibration=None, test_first=tested, test_last=tested,
        data_until=until,
    )  # fmt: skip


SELECTION_SPLIT, SPLIT = days_of(5, 6, 6), days_of(12, 13, 14)


class ScalingArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    seeds: int = Field(default=2, ge=2)
    share: Annotated[
        str, tyro.conf.arg(help="run only part k of n of the trainings, and no comparison: k/n")
    ] = "1/1"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_scaling(args: ScalingArgs) -> None:
    """NE against FLOPs per example: GEM, HSTU and DCNv2 in five sizes (long; resumable)."""
    if args.work is None:
        show_committed("Scaling", GOALS, RESULT, args.as_json)
        return
    from benchmarks.studies.ablation_trials import bench_trials

    selection, trials = (bench_trials(args.work, s) for s in (SELECTION_SPLIT, SPLIT))
    for point in share_of(sweep_points(), args.share):
        selection.gem(config_of(*point, SWEEP_SEED))
    require_finished_sweep(selection)
    points = [(n, s, seed) for s in range(len(SIZES)) for seed in range(args.seeds)
              for n in ARCHITECTURES]  # fmt: skip
    rates: dict[str, float] = {}
    for name, size, seed in share_of(points, args.share):
        rates[name] = rates.get(name) or best_base_rate(selection, name)
        trials.gem(config_of(name, size, rates[name], seed))
    if args.share == "1/1":
        result, curves = scaling_result(selection, trials, args.seeds)
        result.show(args.as_json)
        study_of(result, curves, args.seeds).save(RESULT)


def config_of(name: str, size: int, base_rate: float, seed: int) -> TrainConfig:
    """An architecture in one of SIZES; the dense rate falls with the root of the width."""
    width_ratio = SIZES[0].sizes["mlp_width"] / SIZES[size].sizes["mlp_width"]
    return TrainConfig.model_validate(
        {
            "model": ARCHITECTURES[name],
            "sizes": dict(SIZES[size].sizes),
            "max_length": SIZES[size].max_length,
            "dense_lr": base_rate * width_ratio**0.5,
            "passes": 1,
            "seed": seed,
        }
    )


def sweep_points() -> list[tuple[str, int, float]]:
    """The trainings of the sweep: architecture, size and base rate."""
    return [(n, s, rate) for n in ARCHITECTURES for s in range(SWEPT_SIZES) for rate in BASE_RATES]


def require_finished_sweep(selection: "TrialRunner") -> None:
    """Raises TemporaryError if trainings of the sweep, which choose base rates, are missing."""
    configs = [config_of(*point, SWEEP_SEED) for point in sweep_points()]
    missing = sum(not selection.is_finished(config) for config in configs)
    if missing:
        raise TemporaryError(
            f"{missing} trainings of the sweep of base rates belong to other shares: run this "
            "share again when they have ended"
        )


def best_base_rate(selection: "TrialRunner", name: str) -> float:
    """The base rate with the least NE on the selection day, mean over the smallest sizes."""
    ne = {
        rate: mean(
            selection.gem(config_of(name, size, rate, SWEEP_SEED)).ne(OBJECTIVE)
            for size in range(SWEPT_SIZES)
        )
        for rate in BASE_RATES
    }
    return min(ne, key=lambda rate: ne[rate])


@dataclass(frozen=True)
class Curve:
    """The trainings of an architecture, by size and seed."""

    trials: "Sequence[Sequence[Trial]]"

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(FLOPs per example, mean NE over seeds) by size."""
        return tuple(
            (
                by_seed[0].flops_per_example,
                mean(trial.ne(OBJECTIVE) for trial in by_seed),
            )
            for by_seed in self.trials
        )

    @property
    def predictions(self) -> "list[Predictions]":
        """Predictions of all trainings, sorted by impression; seeds of a size together."""
        return [t.predictions.sorted_by_impression() for by_seed in self.trials for t in by_seed]

    @property
    def slope_weights(self) -> "Float64":
        """Weights (models) on the NE of `predictions` whose sum is the slope a decade."""
        import numpy as np

        by_size = slope_weights([by_seed[0].flops_per_example for by_seed in self.trials])
        seeds = len(self.trials[0])
        return np.repeat(by_size / seeds, seeds)


def slope_weights(flops: Sequence[float]) -> "Float64":
    """Weights on values at some FLOPs whose sum is their least-squares slope a decade."""
    import numpy as np

    decades = np.log10(flops)
    centered = decades - decades.mean()
    return np.asarray(centered / (centered**2).sum())


def slope_of(curves: Sequence[tuple[float, Curve]]) -> "SeededEstimate":
    """The sum of the slopes of some curves, each times a factor, with the noise of both sources.

    The variance over seeds is pooled over the sizes of a curve.
    """
    import numpy as np

    from benchmarks.studies.seeded_estimates import NeByUser

    models = NeByUser.of([p for _, curve in curves for p in curve.predictions], OBJECTIVE)
    weights = np.concatenate([factor * curve.slope_weights for factor, curve in curves])
    seed_variances, first = [], 0
    for _, curve in curves:
        sizes, seeds = len(curve.trials), len(curve.trials[0])
        own = slice(first, first := first + sizes * seeds)
        variance = models.ne[own].reshape(sizes, seeds).var(1, ddof=1).mean()
        degrees = sizes * (seeds - 1)
        seed_variances.append((float(variance * (weights[own] ** 2).sum()), degrees))
    return models.contrast(weights, *seed_variances)


def scaling_result(
    selection: "TrialRunner", trials: "TrialRunner", seeds: int
) -> tuple[BenchmarkResult, dict[str, tuple[tuple[float, float], ...]]]:
    """The table and figures of the study, and the points of its plot."""
    rates = {name: best_base_rate(selection, name) for name in ARCHITECTURES}
    curves = {
        name: Curve(
            [
                [trials.gem(config_of(name, size, rates[name], seed)) for seed in range(seeds)]
                for size in range(len(SIZES))
            ]
        )
        for name in ARCHITECTURES
    }
    result = BenchmarkResult(
        f"NE of {OBJECTIVE} on the test day by size of the model, one pass, {seeds} seeds",
        ("model", "MFLOP", "base rate", *(f"size {i + 1}" for i in range(len(SIZES))),
         "1e-4 NE a decade [95 %]"),
    )  # fmt: skip
    slopes = {name: slope_of([(1, curve)]) for name, curve in curves.items()}
    for name, curve in curves.items():
        flops, ne = zip(*curve.points, strict=True)
        mflop = f"{flops[0] / 1e6:.1f} to {flops[-1] / 1e6:.0f}"
        cells = (f"{rates[name]:g}", *(f"{x:.4f}" for x in ne), str(slopes[name]))
        result.rows.append((name, mflop, *cells))
    best_peer = min((n for n in curves if n != GEM), key=lambda name: slopes[name].value)
    difference = slope_of([(1, curves[GEM]), (-1, curves[best_peer])])
    for key, estimate in (("gem", slopes[GEM]), ("gem_less_best_peer", difference)):
        for suffix in ("", "_low", "_high"):
            value = getattr(estimate, suffix[1:] or "value")
            result.record(f"slope_{key}{suffix}", 1e4 * value, "")
    runs = [t for curve in curves.values() for by_seed in curve.trials for t in by_seed]
    sweep = [selection.gem(config_of(*point, SWEEP_SEED)) for point in sweep_points()]
    result.figures |= {
        "best_peer": best_peer,
        "base_rates": rates,
        "gem_flops_ratio": round(curves[GEM].points[-1][0] / curves[GEM].points[0][0], 1),
        "training_examples": runs[0].record.examples,
        "core_hours": round(sum(t.record.core_seconds for t in (*runs, *sweep)) / 3600, 2),
        "trained_at": sorted({f"{t.record.date} {t.record.commit}" for t in runs}),
    }
    return result, {name: curve.points for name, curve in curves.items()}


def study_of(
    result: BenchmarkResult, curves: dict[str, tuple[tuple[float, float], ...]], seeds: int
) -> StudyResult:
    """The result as a study, with the points of its plot."""
    trained_at = result.figures["trained_at"]
    assert isinstance(trained_at, list)
    return StudyResult(
        title=result.title,
        command=f"gemline bench scaling --work work/bench --seeds {seeds}",
        columns=tuple(result.columns),
        rows=tuple(result.rows),
        commit=commits_of(trained_at),
        figures=result.figures,
        curves=curves,
    )
