"""The figures of the report, as SVG."""

import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure

from ranking.report.study import StudyResult
from training.evaluation.drift import TeacherPrequential
from training.evaluation.metrics import SliceMetrics
from training.evaluation.predictions import Predictions

matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False,
                            "axes.spines.right": False})  # fmt: skip
MODEL_COLORS = {
    "bound": "#999999",
    "gem": "#1f5fa8",
    "lightgbm": "#c2571a",
    "student": "#8fb8a8",
    "distilled": "#1b7f5c",
}
NUM_CALIBRATION_BINS = 10
MIN_POSITIVES = 20  # positives per day; with fewer, metrics are noise
PANEL_WIDTH = 3.4  # inches


def to_svg(figure: Figure) -> str:
    """Render a figure as an SVG element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    document = buffer.getvalue()
    return document[document.index("<svg") :]


def plot_normalized_entropy(
    scores: dict[str, list[SliceMetrics]], model_names: dict[str, str], objectives: Sequence[str]
) -> str:
    """NE of each model on all surfaces together, with a panel for each objective."""
    figure = Figure(figsize=(PANEL_WIDTH * len(objectives), 2.2))
    for axis, objective in zip(
        np.ravel(figure.subplots(1, len(objectives))), objectives, strict=True
    ):
        ne = {
            model: metrics.ne
            for model, slices in scores.items()
            for metrics in slices
            if (metrics.surface, metrics.objective) == ("all", objective)
            and not np.isnan(metrics.ne)
        }
        models = list(ne)[::-1]
        values = [ne[model] for model in models]
        axis.barh(range(len(models)), values, color=[MODEL_COLORS[model] for model in models])
        axis.set_yticks(range(len(models)), [model_names[model] for model in models])
        axis.set_title(objective)
        axis.set_xlabel("NE, lower is better")
        if values:
            axis.set_xlim(min(values) * 0.97, max(values) * 1.02)
        for y, value in enumerate(values):
            axis.text(value, y, f" {value:.3f}", va="center")
    figure.tight_layout()
    return to_svg(figure)


def plot_reliability_diagram(
    predictions: dict[str, Predictions], model_names: dict[str, str], objectives: Sequence[str]
) -> str:
    """Observed against predicted rates of tenths of the rows, with a panel for each objective."""
    figure = Figure(figsize=(PANEL_WIDTH * len(objectives), 3.2))
    axes = np.ravel(figure.subplots(1, len(objectives)))
    for axis, objective in zip(axes, objectives, strict=True):
        highest = 0.0
        for model, model_predictions in predictions.items():
            predicted, observed = _reliability(model_predictions, objective)
            if not predicted:
                continue
            color, label = MODEL_COLORS[model], model_names[model]
            axis.plot(predicted, observed, "o-", ms=3, lw=1, color=color, label=label)
            highest = max([highest, *predicted, *observed])
        axis.plot([0, highest], [0, highest], ":", color="#bbbbbb")
        axis.set_title(objective)
        axis.set_xlabel("predicted")
        axis.set_ylabel("observed")
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return to_svg(figure)


def _reliability(predictions: Predictions, objective: str) -> tuple[list[float], list[float]]:
    """Predicted and observed rates of bins of equal size; empty with too few positives."""
    column = predictions.objectives.index(objective)
    is_labeled = predictions.label_mask[:, column]
    probabilities = predictions.probabilities[is_labeled, column]
    labels = predictions.labels[is_labeled, column]
    if labels.sum() < NUM_CALIBRATION_BINS:
        return [], []
    bins = np.array_split(np.argsort(probabilities, kind="stable"), NUM_CALIBRATION_BINS)
    predicted = [float(probabilities[rows].mean()) for rows in bins]
    observed = [float(labels[rows].mean()) for rows in bins]
    return predicted, observed


def plot_prequential(daily_metrics: Sequence[TeacherPrequential]) -> str:
    """Prequential NE and calibration by day: a line for each surface, a column for each objective.

    Days with too few positives are left out; empty if none is left.
    """
    rows = [row for row in daily_metrics if min(row.predicted, row.positives) >= MIN_POSITIVES]
    if not rows:
        return ""
    objectives = list(dict.fromkeys(row.objective for row in rows))
    surfaces = list(dict.fromkeys(row.surface for row in rows))
    figure = Figure(figsize=(PANEL_WIDTH * len(objectives), 4.4))
    panels = figure.subplots(2, len(objectives), sharex=True, sharey="row", squeeze=False)
    for axes, metric in zip(panels, ("ne", "calibration"), strict=True):
        for axis, objective in zip(axes, objectives, strict=True):
            for surface in surfaces:
                line = [row for row in rows if (row.surface, row.objective) == (surface, objective)]
                days, values = [row.day for row in line], [getattr(row, metric) for row in line]
                axis.plot(days, values, "o-", ms=3, lw=1, label=surface)
            axis.axhline(1, ls=":", color="#bbbbbb")
    for axis, objective in zip(panels[0], objectives, strict=True):
        axis.set_title(objective)
    for axis in panels[1]:
        axis.xaxis.set_major_locator(AutoDateLocator(minticks=2))  # type: ignore[no-untyped-call]
        axis.xaxis.set_major_formatter(DateFormatter("%d %b"))  # type: ignore[no-untyped-call]
        axis.tick_params("x", rotation=60)
    panels[0, 0].set_ylabel("NE before training")
    panels[1, 0].set_ylabel("predicted / observed")
    panels[1, 0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return to_svg(figure)


def plot_step_seconds(step_seconds: Sequence[tuple[str, float]]) -> str:
    """The duration of each step."""
    figure = Figure(figsize=(7, 0.24 * len(step_seconds) + 0.6))
    axis = figure.subplots()
    names = [name for name, _ in step_seconds][::-1]
    values = [value for _, value in step_seconds][::-1]
    axis.barh(range(len(names)), values, color="#5b7083")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("seconds")
    for y, value in enumerate(values):
        axis.text(value, y, f" {value:.1f}", va="center")
    return to_svg(figure)


def plot_study(study: StudyResult) -> str:
    """The figures of a study; empty if it has neither curves nor intervals."""
    parts = []
    if study.curves:
        parts.append(plot_scaling_curves(study.curves))
    if study.intervals:
        parts.append(plot_intervals(study.intervals))
    return "".join(parts)


def plot_scaling_curves(points_by_model: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """NE against FLOPs (log scale), with a least-squares line for each model."""
    figure = Figure(figsize=(6, 3.2))
    axis = figure.subplots()
    for name, points in points_by_model.items():
        flops, ne = np.array(points).T
        (drawn,) = axis.plot(flops, ne, "o", ms=4, label=name)
        fitted = np.polynomial.Polynomial.fit(np.log10(flops), ne, 1)
        axis.plot(flops, fitted(np.log10(flops)), "-", lw=1, color=drawn.get_color())
    axis.set_xscale("log")
    axis.set_xlabel("FLOPs per example, forward and backward")
    axis.set_ylabel("NE, lower is better")
    axis.legend(frameon=False, fontsize=8)
    return to_svg(figure)


def plot_intervals(interval_by_change: Mapping[str, tuple[float, float, float]]) -> str:
    """Differences with their 95 % intervals; those that are not significant are gray."""
    figure = Figure(figsize=(6, 0.22 * len(interval_by_change) + 0.8))
    axis = figure.subplots()
    names = list(interval_by_change)[::-1]
    for y, name in enumerate(names):
        value, low, high = interval_by_change[name]
        color = "#1b7f5c" if high < 0 else "#c2571a" if low > 0 else "#bbbbbb"
        axis.plot([low, high], [y, y], "-", lw=1.5, color=color)
        axis.plot([value], [y], "o", ms=4, color=color)
    axis.axvline(0, color="#999999", lw=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("difference of NE, 1e-4; left is better")
    return to_svg(figure)
