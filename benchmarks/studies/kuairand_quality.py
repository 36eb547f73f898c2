"""GEM, a teacher of several models and tuned LightGBM on KuaiRand, pooled over the last days.

Each day is predicted by models of all days before it. LightGBM is tuned on TUNING_DAY and reads the
same inputs as GEM, without histories and ids. The weight of the trees in the teacher is fitted on
predictions of earlier days, which were made before those days were learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Literal

import numpy as np
from scipy.special import expit

from benchmarks.harness import KUAIRAND_SPEC, BenchmarkResult, format_mean_std
from benchmarks.studies.prequential import (
    DayPredictions,
    PrequentialTrials,
    grid,
    pooled,
)
from dags.pipeline import data_steps
from dags.runner import run_pipeline
from dags.steps import PipelinePaths
from etl.spec import load_spec
from etl.tables.lake import Lake
from training.config import TrainConfig
from training.evaluation.auc_intervals import paired_auc_difference
from training.evaluation.metrics import mean_group_auc, score_predictions
from training.evaluation.predictions import ConfidenceInterval, Predictions
from training.teacher.blend import (
    blend,
    fit_blend_weight,
    logits_of,
)

FIRST_DAY, FIRST_PREDICTED_DAY = date(2022, 4, 25), date(2022, 4, 26)
TUNING_DAY, FIRST_TEST_DAY, LAST_DAY = date(2022, 4, 27), date(2022, 4, 28), date(2022, 4, 30)
TEACHER_SEEDS = 3
DISTILLATION_WEIGHT = 1.0  # chosen on TUNING_DAY, as is the equal weight of GEM and the trees
TEACHER_OBJECTIVES = ("click", "long_view")
COLUMNS = ("model", "objective", "AUC", "GAUC", "NE", "calibration", "AUC less LightGBM's [95 %]")
METRICS = ("auc", "gauc", "ne", "calibration")


def build_trials(data: Path, work: Path) -> PrequentialTrials:
    """The tables of the slice, built once in `work`, and the trainings on them."""
    spec, work = load_spec(KUAIRAND_SPEC), work.resolve()
    paths = PipelinePaths(KUAIRAND_SPEC, str(data.resolve()), str(work / "lake"))
    run_pipeline(spec, paths, data_steps(spec, paths, ("--days", f"{FIRST_DAY}:{LAST_DAY}")))
    lake = Lake(paths.lake, spec)
    return PrequentialTrials(lake, FIRST_DAY, FIRST_PREDICTED_DAY, LAST_DAY, work / "trials")


def train(trials: PrequentialTrials, model: Literal["lightgbm"] | int) -> DayPredictions:
    """The predictions of tuned LightGBM or of the GEM of a seed, trained unless they are kept."""
    if model == "lightgbm":
        return trials.lightgbm(trials.tuned_lightgbm(TUNING_DAY))
    return trials.gem(TrainConfig(seed=model, first_training="joint"))


def train_distilled(trials: PrequentialTrials, seed: int) -> DayPredictions:
    """The predictions of a GEM that also learns what GEM and LightGBM predicted of earlier days.

    They are the mean, in logit, of the predictions of the GEM of the same seed and of LightGBM,
    each made before the day was learned.
    """
    teacher = mean_in_logit(train(trials, seed), train(trials, "lightgbm"))
    config = TrainConfig(seed=seed, first_training="joint", distillation_weight=DISTILLATION_WEIGHT)
    return trials.gem(config, teacher)


def mean_in_logit(gem: DayPredictions, trees: DayPredictions) -> DayPredictions:
    """The mean of the logits of two models, as predictions by day."""
    predicted = {}
    for day, rows in gem.items():
        assert (trees[day].impression_ids == rows.impression_ids).all()
        logits = [logits_of(model[day].probabilities) for model in (gem, trees)]
        predicted[day] = replace(rows, probabilities=expit(np.mean(logits, 0)))
    return predicted


def trainings(trials: PrequentialTrials, seeds: int) -> list[Callable[[], DayPredictions]]:
    """All trainings of the study, for processes that share them."""
    return [
        partial(train, trials, "lightgbm"),
        *(partial(train, trials, seed) for seed in range(seeds)),
        *(partial(train_distilled, trials, seed) for seed in range(seeds)),
    ]


def measure_kuairand(trials: PrequentialTrials, seeds: int) -> BenchmarkResult:
    """AUC, GAUC, NE and calibration of each model, and the gains of GEM and of the teacher."""
    gem = [train(trials, seed) for seed in range(seeds)]
    trees = train(trials, "lightgbm")
    distilled = [train_distilled(trials, seed) for seed in range(seeds)]
    averaged = [teacher_predictions(members) for members in teacher_members(gem)]
    blended = [teacher_predictions(members, trees) for members in teacher_members(gem)]
    models = {
        "LightGBM, tuned": [trees],
        "GEM": gem,
        "GEM, distilled": distilled,
        f"teacher, {TEACHER_SEEDS} seeds": averaged,
        f"teacher, {TEACHER_SEEDS} seeds and LightGBM": blended,
    }
    result = BenchmarkResult(
        f"KuaiRand, {FIRST_TEST_DAY} to {LAST_DAY}, pooled, {seeds} seeds", COLUMNS
    )
    test = {
        name: [pooled(days, FIRST_TEST_DAY) for days in by_seed] for name, by_seed in models.items()
    }
    for objective in trials.lake.spec.objectives:
        for key, (name, predictions) in zip(
            ("lightgbm", "gem", "distilled", "averaged", "teacher"), test.items(), strict=True
        ):
            gain = None
            if key != "lightgbm":
                gain = paired_auc_difference(predictions, test["LightGBM, tuned"], objective)
            add_row(result, key, name, objective, predictions, gain)
    result.figures |= {
        "lightgbm_configurations": len(grid()),
        "measured_at": sorted(trials.trained_at),
    }
    return result


def add_row(
    result: BenchmarkResult,
    key: str,
    name: str,
    objective: str,
    predictions: Sequence[Predictions],
    gain: ConfidenceInterval | None,
) -> None:
    """Add a row of the table and its figures, means over the models."""
    values = [pooled_metrics(p, objective) for p in predictions]
    for column, metric in enumerate(METRICS):
        average = mean(v[column] for v in values)
        result.record(f"kuairand_{key}_{objective}_{metric}", average, "labels of one class")
    auc, gauc, ne, calibration = zip(*values, strict=True)
    cells = [
        format_mean_std(auc),
        *(f"{mean(v):.4f}" for v in (gauc, ne)),
        f"{mean(calibration):.3f}",
    ]
    result.rows.append((name, objective, *cells, str(gain or "")))
    if gain:
        prefix = "kuairand" if key == "gem" else f"kuairand_{key}"
        result.record(f"{prefix}_{objective}_gain", gain.value, "labels of one class")
        result.record(f"{prefix}_{objective}_gain_low", gain.low, "labels of one class")


def pooled_metrics(predictions: Predictions, objective: str) -> tuple[float, float, float, float]:
    """AUC, mean AUC within users, NE and calibration over all surfaces and days."""
    column = predictions.objectives.index(objective)
    rows = predictions.filter(predictions.label_mask[:, column])
    total = next(m for m in score_predictions(rows) if m.objective == objective)
    gauc = mean_group_auc(rows.user_hashes, rows.labels[:, column], rows.probabilities[:, column])
    return total.auc, gauc, total.ne, total.calibration


def teacher_members(gem: Sequence[DayPredictions]) -> list[list[DayPredictions]]:
    """Each run of TEACHER_SEEDS consecutive seeds, in a circle: as many teachers as seeds."""
    n = len(gem)
    return [[gem[(i + k) % n] for k in range(min(TEACHER_SEEDS, n))] for i in range(n)]


def teacher_predictions(
    members: Sequence[DayPredictions], trees: DayPredictions | None = None
) -> DayPredictions:
    """A teacher's predictions by day; the weight of the trees is fitted on the days before."""
    predicted: DayPredictions = {}
    earlier: list[tuple[Predictions, np.ndarray, np.ndarray]] = []
    for day in sorted(members[0]):
        rows = members[0][day]
        gem = np.mean([logits_of(member[day].probabilities) for member in members], 0)
        logits = gem
        if trees is not None:
            assert (trees[day].impression_ids == rows.impression_ids).all()
            tree_logits = logits_of(trees[day].probabilities)
            weights = prequential_weights(earlier, len(rows.objectives))
            logits = np.asarray(blend(gem, tree_logits, np.asarray(weights)))
            earlier.append((rows, gem, tree_logits))
        predicted[day] = replace(rows, probabilities=expit(logits))
    return predicted


def prequential_weights(
    earlier: Sequence[tuple[Predictions, np.ndarray, np.ndarray]], objectives: int
) -> list[float]:
    """The weight of the trees for each objective, on rows and logits (n, O) of earlier days."""
    weights = []
    for column in range(objectives):
        columns = [
            (gem[mask, column], trees[mask, column], rows.labels[mask, column])
            for rows, gem, trees in earlier
            for mask in [rows.label_mask[:, column]]
        ]
        parts = [np.concatenate(part) for part in zip(*columns, strict=True)]
        weights.append(fit_blend_weight(*parts) if parts else 0.0)
    return weights
