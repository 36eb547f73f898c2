"""Builds the report: numbers and figures of a run, rendered into one HTML page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from etl.errors import UserError
from etl.spec.units import DaySplit
from etl.tables import atomic_io, step_state
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, resolve_uri
from features.coverage import missing_attribute_counts
from ranking.report import data, figures
from ranking.report.audiences import audience_sections
from ranking.report.data import MODEL_NAMES
from ranking.report.features import feature_section
from ranking.report.next_steps import calibration_checks, next_steps, ranker_states
from ranking.report.roi import roi_section
from ranking.report.study import load_studies
from training.evaluation.drift import teacher_prequential
from training.evaluation.metrics import SliceMetrics
from training.evaluation.predictions import Predictions
from training.precision.precision_map import precision_map_path

Metric = Literal["ne", "auc", "calibration"]
ModelScores = Mapping[str, Sequence[SliceMetrics]]
METRIC_NAMES: dict[Metric, str] = {"ne": "NE", "auc": "AUC", "calibration": "Calibration"}
# The best value of a metric is the one with the lowest key.
BEST_KEYS: dict[Metric, Callable[[float], float]] = {
    "ne": lambda value: value,
    "auc": lambda value: -value,
    "calibration": lambda value: abs(value - 1),
}


@dataclass(frozen=True)
class MetricCell:
    """A formatted value; the best one among the models of a row is marked."""

    text: str
    is_best: bool = False


@dataclass(frozen=True)
class MetricRow:
    """The values of all models on one surface: a cell for each metric and model."""

    surface: str
    num_rows: int
    positives: int
    cells: dict[Metric, list[MetricCell]]


@dataclass(frozen=True)
class MetricTable:
    """The values of all models for one objective, a row for each surface."""

    objective: str
    rows: list[MetricRow]


def build_report(lake: Lake, raw_data_uri: str, split: DaySplit) -> StoragePath:
    """Write `report.html` into the lake and return its path.

    Raises:
        UserError: No model was evaluated, or predictions are of other days than the split's.
    """
    predictions = data.load_predictions(lake, raw_data_uri, split)
    if not predictions:
        raise UserError(f"no model was evaluated in {lake.root}; run `gemline run` first")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True
    )
    template = environment.get_template("page.html.j2")
    page = template.render(
        spec=lake.spec,
        split=split,
        **_model_quality(lake, predictions),
        model_cards=data.model_cards(lake),
        prequential=figures.plot_prequential(teacher_prequential(lake, split.data_until)),
        audiences=audience_sections(lake, split.data_until),
        forecasts=_forecasts(lake),
        roi=roi_section(lake, split.data_until),
        precision=_precision(lake, split),
        features=feature_section(lake, split.data_until),
        **_ingest(lake),
        studies=[
            (study, figures.plot_study(study))
            for study in load_studies(resolve_uri(lake.root, "studies"))
        ],
    )
    path = resolve_uri(lake.root, "report.html")
    atomic_io.write_text(path, page)
    return path


def _forecasts(lake: Lake) -> Any:
    """The section on forecasts, whose libraries only specs with a forecast need."""
    if lake.spec.forecast is None:
        return None
    from ranking.report.forecasts import forecast_section

    return forecast_section(lake)


def _precision(lake: Lake, split: DaySplit) -> Any:
    """The section on FP8, whose libraries only a GEM with a map of recipes needs."""
    if not precision_map_path(lake.root).is_file():
        return None
    from ranking.report.precision import precision_section

    return precision_section(lake, split.data_until)


def _model_quality(lake: Lake, predictions: dict[str, Predictions]) -> dict[str, Any]:
    """Variables of the lead, and of the sections on quality, distillation and calibration."""
    scores = data.score_models(lake, predictions)
    objectives = data.evaluated_objectives(lake, scores)
    comparisons = []
    if "distilled" in predictions and "student" in predictions:
        comparisons = data.compare_models(lake, predictions["distilled"], predictions["student"])
    served = next((m for m in ("distilled", "student") if m in predictions), None)
    checks = calibration_checks(lake, predictions[served]) if served else []
    ne_figure = reliability_figure = ""
    if objectives:
        ne_figure = figures.plot_normalized_entropy(scores, MODEL_NAMES, objectives)
        reliability_figure = figures.plot_reliability_diagram(predictions, MODEL_NAMES, objectives)
    return {
        "next_steps": next_steps(ranker_states(lake), checks),
        "summary": summarize_scores(scores),
        "model_names": [MODEL_NAMES[model] for model in predictions],
        "metric_names": METRIC_NAMES,
        "metric_tables": metric_tables(scores, objectives),
        "comparisons": comparisons,
        "normalized_entropy": ne_figure,
        "reliability_diagram": reliability_figure,
    }


def _ingest(lake: Lake) -> dict[str, Any]:
    """Variables of the sections on ingest metrics, quarantine and step durations."""
    durations = step_state.step_durations(lake.root)
    return {
        "ingest_metrics": data.ingest_metrics(lake),
        "quarantine_counts": data.quarantine_counts(lake),
        "excluded_event_counts": data.excluded_event_counts(lake),
        "missing_attribute_counts": missing_attribute_counts(lake, lake.day_range("examples")),
        "step_durations": figures.plot_step_seconds(durations) if durations else "",
    }


def metric_tables(scores: ModelScores, objectives: Sequence[str]) -> list[MetricTable]:
    """A table for each objective, with a row for each surface on which a model was evaluated."""
    by_slice: dict[tuple[str, str], dict[str, SliceMetrics]] = {}
    for model, slices in scores.items():
        for metrics in slices:
            by_slice.setdefault((metrics.objective, metrics.surface), {})[model] = metrics
    return [
        MetricTable(
            objective,
            [
                _metric_row(surface, by_model, list(scores))
                for (name, surface), by_model in by_slice.items()
                if name == objective
            ],
        )
        for objective in objectives
    ]


def _metric_row(
    surface: str, by_model: Mapping[str, SliceMetrics], models: Sequence[str]
) -> MetricRow:
    any_model = next(iter(by_model.values()))
    return MetricRow(
        surface=surface,
        num_rows=any_model.rows,
        positives=any_model.positives,
        cells={metric: _metric_cells(by_model, models, metric) for metric in METRIC_NAMES},
    )


def _metric_cells(
    by_model: Mapping[str, SliceMetrics], models: Sequence[str], metric: Metric
) -> list[MetricCell]:
    """A cell for each model; empty if it was not evaluated or has one class only."""
    values = {model: getattr(metrics, metric) for model, metrics in by_model.items()}
    values = {model: value for model, value in values.items() if not math.isnan(value)}
    key = BEST_KEYS[metric]
    candidates = [model for model in values if model != "bound"]
    best = min(candidates, key=lambda model: key(values[model]), default=None)
    return [
        MetricCell(f"{values[model]:.4f}"[:6] if model in values else "", model == best)
        for model in models
    ]


def summarize_scores(scores: ModelScores) -> list[str]:
    """The NE of all models in one sentence for each objective, on all surfaces."""
    on_all_surfaces = {
        model: {
            metrics.objective: metrics
            for metrics in slices
            if metrics.surface == "all" and not math.isnan(metrics.ne)
        }
        for model, slices in scores.items()
    }
    sentences = []
    for objective, gem in on_all_surfaces.get("gem", {}).items():
        parts = [f"{objective}: GEM has NE {gem.ne:.3f} on {gem.rows:,} rows"]
        for model in ("lightgbm", "student", "distilled", "bound"):
            other = on_all_surfaces.get(model, {}).get(objective)
            if other:
                parts.append(f"{MODEL_NAMES[model]} {other.ne:.3f}")
        sentences.append(", ".join(parts) + ".")
    return sentences
