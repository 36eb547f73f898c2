"""The numbers of the report, read from the tables and files of a run."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.array_types import Float32, Float64, Int64
from etl.errors import UserError
from etl.spec.units import DaySplit
from etl.tables import arrow, schemas
from etl.tables.atomic_io import download
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, list_matching, resolve_uri
from ranking.registry.manifest import read_manifest
from ranking.registry.model_card import model_card
from ranking.registry.ranker import live_pointer
from training.evaluation.metrics import SliceMetrics, score_predictions
from training.evaluation.predictions import Predictions, concat_predictions, evaluation_path

log = logging.getLogger(__name__)
MODEL_NAMES = {
    "bound": "truth (bound)",
    "gem": "GEM",
    "lightgbm": "LightGBM",
    "student": "student, labels only",
    "distilled": "student, distilled",
}


@dataclass(frozen=True)
class ModelComparison:
    """The mean difference in logloss of two models, with half of its 95 % interval.

    The rows of a user are correlated. A negative difference is an improvement.
    """

    surface: str
    objective: str
    num_rows: int
    logloss_difference: float
    ci_half_width: float


def ingest_metrics(lake: Lake) -> list[dict[str, Any]]:
    """The ingest metrics of each day."""
    table = arrow.snapshot(lake, schemas.ingest_metrics(lake.spec)).read()
    rows: list[dict[str, Any]] = table.sort_by("day").to_pylist()
    return rows


def quarantine_counts(lake: Lake) -> list[tuple[str, int]]:
    """Quarantined records by reason, the most frequent first."""
    rows = arrow.snapshot(lake, schemas.quarantine(lake.spec)).read(["reasons"])
    counts = pc.value_counts(rows["reasons"].combine_chunks().flatten()).to_pylist()
    by_reason = [(count["values"], count["counts"]) for count in counts]
    return sorted(by_reason, key=lambda pair: -pair[1])


def excluded_event_counts(lake: Lake) -> list[tuple[str, int, int]]:
    """Excluded events by reason, the most frequent first, and the number of their users."""
    rows = arrow.snapshot(lake, schemas.excluded_events(lake.spec)).read(["reason", "user_id"])
    counts = rows.group_by("reason").aggregate(
        [("user_id", "count"), ("user_id", "count_distinct")]
    )
    by_count = counts.sort_by([("user_id_count", "descending")]).to_pylist()
    return [
        (row["reason"], row["user_id_count"], row["user_id_count_distinct"]) for row in by_count
    ]


def evaluated_objectives(lake: Lake, scores: dict[str, list[SliceMetrics]]) -> list[str]:
    """Objectives with a metric of some model, in the order of the spec."""
    evaluated = {
        metrics.objective
        for slices in scores.values()
        for metrics in slices
        if not np.isnan(metrics.ne)
    }
    return [name for name in lake.spec.objectives if name in evaluated]


def load_predictions(lake: Lake, raw_data_uri: str, split: DaySplit) -> dict[str, Predictions]:
    """The test predictions of each evaluated model, and the simulator's true probabilities.

    Raises:
        UserError: Some are of other days than the split's, or of other objectives than the spec's.
    """
    predictions: dict[str, Predictions] = {}
    for name in ("gem", "lightgbm"):
        path = evaluation_path(lake.root, name)
        if path.is_file():
            predictions[name] = _read_predictions(lake, path, split)
    for variant in ("student", "distilled"):
        paths = [evaluation_path(lake.root, f"{variant}-{s}") for s in lake.spec.ad_surfaces]
        parts = [_read_predictions(lake, path, split) for path in paths if path.is_file()]
        if parts:
            predictions[variant] = concat_predictions(parts)
    gem = predictions.get("gem")
    truth = true_probabilities(gem, raw_data_uri) if gem else None
    return {"bound": truth, **predictions} if truth else predictions


def _read_predictions(lake: Lake, path: StoragePath, split: DaySplit) -> Predictions:
    """The predictions of a file; raises UserError if they do not fit the split and the spec."""
    predictions, objectives = Predictions.read(path, split), tuple(lake.spec.objectives)
    if predictions.objectives != objectives:
        raise UserError(
            f"{path} holds predictions of {', '.join(predictions.objectives)}, and spec "
            f"{lake.spec.name} has the objectives {', '.join(objectives)}: evaluate that model "
            "again, or remove the file"
        )
    return predictions


def true_probabilities(gem: Predictions, raw_data_uri: str) -> Predictions | None:
    """The simulator's true probabilities for the rows of `gem`; None for real logs."""
    paths = list_matching(resolve_uri(raw_data_uri, "truth"), "day=*.parquet")
    if not paths:
        return None
    table = pa.concat_tables(pq.read_table(download(path)) for path in paths)
    ids = pa.array(gem.impression_ids, pa.string())
    indices = pc.index_in(ids, table["impression_id"].combine_chunks())
    is_found = indices.is_valid().to_numpy(zero_copy_only=False)
    truth = table.take(indices.filter(pa.array(is_found)))
    probabilities = np.stack([truth[f"p_{name}"].to_numpy() for name in gem.objectives], 1)
    return replace(gem.filter(is_found), probabilities=probabilities)


def model_cards(lake: Lake) -> dict[str, str]:
    """The model card of the live ranker of each surface that has one, unless it is damaged."""
    cards: dict[str, str] = {}
    for surface in lake.spec.ad_surfaces:
        try:
            folder = live_pointer(lake.root, surface).live_folder
            cards |= {surface: model_card(read_manifest(folder))} if folder else {}
        except UserError as error:
            log.warning("no model card of %s: %s", surface, error)
    return cards


def score_models(lake: Lake, predictions: dict[str, Predictions]) -> dict[str, list[SliceMetrics]]:
    """Metrics of each model by surface and objective."""
    surfaces = list(lake.spec.surfaces)
    return {name: score_predictions(p, surfaces) for name, p in predictions.items()}


def compare_models(
    lake: Lake, predictions: Predictions, baseline: Predictions
) -> list[ModelComparison]:
    """Compare the logloss of a model with that of a baseline on the impressions that both have.

    A run that was stopped may have evaluated only one of them on a surface. Intervals allow for the
    correlation of a user's rows. Slices with labels of one class only are left out, as they have no
    sampling error.
    """
    _, indices, baseline_indices = np.intersect1d(
        predictions.impression_ids, baseline.impression_ids, return_indices=True
    )
    predictions, baseline = predictions.take(indices), baseline.take(baseline_indices)
    comparisons = []
    for surface, code in (("all", None), *lake.spec.surface_codes.items()):
        on_surface = predictions.surface == code if code is not None else True
        for column, objective in enumerate(predictions.objectives):
            rows = predictions.label_mask[:, column] & on_surface
            labels = predictions.labels[rows, column]
            if len(np.unique(labels)) < 2:
                continue
            difference = logloss(predictions.probabilities[rows, column], labels)
            difference = difference - logloss(baseline.probabilities[rows, column], labels)
            half_width = 1.96 * clustered_standard_error(difference, predictions.user_hashes[rows])
            comparisons.append(
                ModelComparison(
                    surface=surface,
                    objective=objective,
                    num_rows=len(difference),
                    logloss_difference=float(difference.mean()),
                    ci_half_width=float(half_width),
                )
            )
    return comparisons


def clustered_standard_error(values: Float64, users: Int64) -> float:
    """The standard error of the mean of rows, clustered by user."""
    _, user = np.unique(users, return_inverse=True)
    residuals = np.bincount(user, values - values.mean())
    return float(np.sqrt(residuals @ residuals)) / len(values)


def logloss(p: Float64, y: Float32) -> Float64:
    """The cross-entropy of each row."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return np.asarray(-np.where(y > 0, np.log(p), np.log1p(-p)))
