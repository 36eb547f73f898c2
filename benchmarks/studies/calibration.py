"""`gemline bench calibration`: how well served rankers are calibrated, in total and by segment.

Without `--work` the committed figures are printed. With it, rankers of simulated logs and of the
slice of KuaiRand are refit each day as in `refit_predictions.py`, and the calibrators of
`calibrators.py` are compared on what was served. On simulated logs the probabilities at the served
position are compared with the true ones there. Finished trainings are kept in that folder.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BENCH_SIMULATOR, RESULTS, BenchmarkResult
from benchmarks.pipelines import BENCH_DAYS, simulated_tables
from benchmarks.studies.committed import StudyFolder, share_of, show_committed
from benchmarks.studies.quality import KUAIRAND_DATA, KuaiRandFolder
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.studies.calibrators import Calibrator
    from benchmarks.studies.refit_predictions import RefitPredictions, ServingLog
    from ranking.scoring.predictions import SegmentedPredictions
    from ranking.scoring.segment_calibration import SegmentCalibration
    from training.evaluation.predictions import Predictions

SIMULATED_DAYS = (date(2026, 1, 1), date(2026, 1, 5), date(2026, 1, 14))
KUAIRAND_SURFACES = ("tab1", "tab4")  # with MIN_POSITIVES clicks on the days that are served
KUAIRAND_DAYS = (date(2022, 4, 25), date(2022, 4, 26), date(2022, 4, 30))
MIN_POSITIVES = 1000  # of a surface and objective for which the ratio has a goal
GOALS = {
    "worst_segment_sigma": "<= 3",
    "worst_segment_sigma_simulated": "<= 3",
    "worst_segment_sigma_kuairand": "<= 3",
    "calibration_worst_kuairand_prequential": "<= 0.02",
    "calibration_worst_floors_simulated": "<= 2",
    "calibration_worst_floors_kuairand": "<= 2",
    "position_bias_error": "<= 0.02",
}
NO_SEGMENT = "no segment is judged"
NO_SURFACE = f"no surface has {MIN_POSITIVES} positive labels"
RESULT = RESULTS / "calibration.json"
COLUMNS = (
    "logs",
    "calibration",
    "objective",
    "NE less that of Platt scaling, 1e-4 [95 %]",
    "worst surface, |predictions / outcomes - 1|",
    "in noise floors",
    "worst segment, sigma",
)


class CalibrationArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    kuairand: KuaiRandFolder = None
    seeds: int = Field(default=2, ge=1)
    share: Annotated[
        str, tyro.conf.arg(help="run only part k of n of the trainings, and no comparison: k/n")
    ] = "1/1"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: CalibrationArgs) -> None:
    """Calibration of served rankers, in total, by segment and at equal positions."""
    if args.work is None:
        show_committed("Calibration", GOALS, RESULT, args.as_json)
        return
    rankers = rankers_of(args.work, args.kuairand or KUAIRAND_DATA)
    tasks = [
        (name, surface, seed)
        for seed in range(args.seeds)
        for name, trained in rankers.items()
        for surface in trained.surfaces
    ]
    for name, surface, seed in share_of(tasks, args.share):
        rankers[name].log(surface, seed)
    if args.share != "1/1":
        return
    result = BenchmarkResult(
        f"Rankers as served, refit each day from labels only, {args.seeds} seeds", COLUMNS
    )
    sigmas = [compare_calibrators(result, *logs, args.seeds) for logs in rankers.items()]
    result.record("worst_segment_sigma", largest(sigmas), NO_SEGMENT)
    compare_positions(result, rankers["simulated"], args.work / "raw", args.seeds)
    result.show(args.as_json)
    result.save_study(RESULT, f"gemline bench calibration --work work/bench --seeds {args.seeds}")


def rankers_of(work: Path, kuairand: Path) -> "dict[str, RefitPredictions]":
    """The rankers of both logs, whose tables are built if they are missing.

    On KuaiRand those of surfaces that have MIN_POSITIVES on the days that are served.
    """
    from benchmarks.studies.kuairand_quality import build_trials
    from benchmarks.studies.refit_predictions import RefitPredictions
    from etl.tables.lake import Lake

    if not kuairand.is_dir():
        raise UserError(f"{kuairand} is absent; --kuairand names KuaiRand's folder")
    paths = simulated_tables(work, BENCH_SIMULATOR, BENCH_DAYS)
    simulated = Lake(paths.lake, load_spec(paths.spec))
    folder = work.resolve() / "refits"
    real = build_trials(kuairand, work / "kuairand").lake
    return {
        "simulated": RefitPredictions(
            simulated, simulated.spec.ad_surfaces, *SIMULATED_DAYS, folder
        ),
        "kuairand": RefitPredictions(real, KUAIRAND_SURFACES, *KUAIRAND_DAYS, folder),
    }


@dataclass(frozen=True)
class Served:
    """Predictions of one seed on all surfaces after a calibrator, and their segments by surface."""

    predictions: "Predictions"
    segments: "list[SegmentCalibration]"

    @property
    def worst_sigma(self) -> float:
        """The worst segment of all surfaces, corrected for their number; NaN if none is judged."""
        from ranking.scoring.segment_calibration import worst_segment

        worst = worst_segment(self.segments)
        return worst[1] if worst else math.nan


def serve(trained: "RefitPredictions", calibrator: "Calibrator", seed: int) -> Served:
    """What the rankers of a seed would have served with a calibrator, in the order of surfaces."""
    from training.evaluation.predictions import concat_predictions

    parts, segments = [], []
    for surface in trained.surfaces:
        served = apply(calibrator, trained.log(surface, seed))
        parts.append(served.predictions)
        segments += served.segment_calibrations()
    return Served(concat_predictions(parts), segments)


def apply(calibrator: "Calibrator", log: "ServingLog") -> "SegmentedPredictions":
    """The served rows of a log, calibrated."""
    from ranking.scoring.calibration import logit, sigmoid

    rows = log.served.predictions
    probabilities = sigmoid(logit(rows.predictions.probabilities) + calibrator(log))
    return replace(rows, predictions=replace(rows.predictions, probabilities=probabilities))


def compare_calibrators(
    result: BenchmarkResult, logs: str, trained: "RefitPredictions", seeds: int
) -> float:
    """Rows and figures of each calibrator on the logs; returns the product's worst sigma."""
    from benchmarks.studies.calibrators import CALIBRATORS, PLATT, PRODUCT
    from training.evaluation.predictions import paired_ne_difference

    served = {
        name: [serve(trained, calibrator, seed) for seed in range(seeds)]
        for name, calibrator in CALIBRATORS.items()
    }
    platt = [one.predictions for one in served[PLATT]]
    for name, by_seed in served.items():
        sigma = mean(one.worst_sigma for one in by_seed)
        worst: list[tuple[float, float]] = []
        for objective in trained.lake.spec.objectives:
            predictions = [one.predictions for one in by_seed]
            difference = paired_ne_difference(predictions, platt, objective)
            ratio, floors = worst_surface(by_seed, objective)
            worst.append((ratio, floors))
            gain = "" if name == PLATT else str(difference)
            cells = ("", "") if math.isnan(ratio) else (f"{ratio:.4f}", f"{floors:.1f}")
            result.rows.append((logs, name, objective, gain, *cells, f"{sigma:.1f}"))
        if name == PRODUCT:
            product_sigma = sigma
            worst_ratio, worst_floors = (largest(values) for values in zip(*worst, strict=True))
            suffix = "_prequential" if logs == "kuairand" else ""
            result.record(f"calibration_worst_{logs}{suffix}", worst_ratio, NO_SURFACE)
            result.record(f"worst_segment_sigma_{logs}", sigma, NO_SEGMENT)
            result.record(f"calibration_worst_floors_{logs}", worst_floors, NO_SURFACE)
            result.figures[f"segments_{logs}"] = len(by_seed[0].segments)
    return product_sigma


def worst_surface(by_seed: "Sequence[Served]", objective: str) -> tuple[float, float]:
    """The largest |predictions / outcomes - 1| over surfaces, and the largest in noise floors.

    They may be of two surfaces; predictions are means over seeds. The floor is the standard
    deviation of the ratio under calibrated predictions. Surfaces with fewer than MIN_POSITIVES are
    left out; NaN if all are.
    """
    import numpy as np

    ratios, in_floors = [], []
    first = by_seed[0].predictions
    column = first.objectives.index(objective)
    for code in np.unique(first.surface):
        rows = (first.surface == code) & first.label_mask[:, column]
        positives = float(first.labels[rows, column].sum())
        if positives < MIN_POSITIVES:
            continue
        p = np.mean([one.predictions.probabilities[rows, column] for one in by_seed], 0)
        error = abs(float(p.sum()) / positives - 1)
        floor = float(np.sqrt((p * (1 - p)).sum())) / positives
        ratios.append(error)
        in_floors.append(error / floor)
    return largest(ratios), largest(in_floors)


def largest(values: Iterable[float]) -> float:
    """The largest value that is not NaN; NaN if there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def compare_positions(
    result: BenchmarkResult, trained: "RefitPredictions", raw: Path, seeds: int
) -> None:
    """Rows of each surface and objective: served probabilities over the true ones at the position.

    The truth counts the share of outcomes that are logged in time to count as labels. Beside them,
    what is served if the logged positions are ignored.
    """
    from benchmarks.studies.calibrators import CALIBRATORS, PRODUCT
    from benchmarks.studies.position_truth import (
        share_of_logged_outcomes,
        true_at_served_position,
    )

    spec, product = trained.lake.spec, CALIBRATORS[PRODUCT]
    errors, ignored = [], []
    share = share_of_logged_outcomes(trained.lake, raw)
    for surface in trained.surfaces:
        logs = [trained.log(surface, seed) for seed in range(seeds)]
        truth = true_at_served_position(logs[0].served, spec, surface, raw).mean(0) * share
        at_served_position = [replace(log, served=log.served.at_served_position()) for log in logs]
        served, logged = (
            sum(apply(product, log).predictions.probabilities.mean(0) for log in kind) / seeds
            for kind in (at_served_position, logs)
        )
        labels = logs[0].served.predictions.predictions
        for i, objective in enumerate(labels.objectives):
            positives = labels.labels[labels.label_mask[:, i], i].sum()
            error, without = served[i] / truth[i] - 1, logged[i] / truth[i] - 1
            floor = 1 / positives**0.5
            result.rows.append(
                (f"simulated, {surface}", "served / true at position 0", objective, "",
                 f"{error:+.4f} (ignored: {without:+.4f})", f"{abs(error) / floor:.1f}", "")
            )  # fmt: skip
            if positives >= MIN_POSITIVES:
                errors.append(abs(error))
                ignored.append(abs(without))
    result.record("position_bias_error", largest(errors), NO_SURFACE)
    result.record("position_bias_error_ignored", largest(ignored), NO_SURFACE)
