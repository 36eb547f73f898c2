"""The pictures of a report, as SVG."""

import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure

from training.knowledge.foretold import Foretold
from training.loop.metrics import Score
from training.predictions import Predictions
from training.study import Study

matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False,
                            "axes.spines.right": False})  # fmt: skip
COLOURS = {
    "bound": "#999999",
    "gem": "#1f5fa8",
    "lightgbm": "#c2571a",
    "student": "#8fb8a8",
    "distilled": "#1b7f5c",
}
BINS = 10
FEWEST_OUTCOMES = 20  # of a day, below which a measure is noise


def svg(figure: Figure) -> str:
    """A figure as an SVG element."""
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight")
    text = out.getvalue()
    return text[text.index("<svg") :]


def ne_bars(
    scores: dict[str, list[Score]], names: dict[str, str], objectives: Sequence[str]
) -> str:
    """NE of each model on all surfaces, one panel an objective; lower is better."""
    figure = Figure(figsize=(3.4 * len(objectives), 2.2))
    for axis, objective in zip(
        np.ravel(figure.subplots(1, len(objectives))), objectives, strict=True
    ):
        found = {
            model: s.ne
            for model, rows in scores.items()
            for s in rows
            if s.surface == "all" and s.objective == objective and not np.isnan(s.ne)
        }
        models = list(found)[::-1]
        values = [found[m] for m in models]
        axis.barh(range(len(models)), values, color=[COLOURS[m] for m in models])
        axis.set_yticks(range(len(models)), [names[m] for m in models])
        axis.set_title(objective)
        axis.set_xlabel("NE, lower is better")
        if values:
            axis.set_xlim(min(values) * 0.97, max(values) * 1.02)
        for y, value in enumerate(values):
            axis.text(value, y, f" {value:.3f}", va="center")
    figure.tight_layout()
    return svg(figure)


def reliability(
    found: dict[str, Predictions], names: dict[str, str], objectives: Sequence[str]
) -> str:
    """Share of outcomes against mean prediction, in tenths of the rows, one panel an objective."""
    figure = Figure(figsize=(3.4 * len(objectives), 3.2))
    axes = np.ravel(figure.subplots(1, len(objectives)))
    for axis, objective in zip(axes, objectives, strict=True):
        top = 0.0
        for model, p in found.items():
            i = p.objectives.index(objective)
            known = p.known[:, i]
            if p.labels[known, i].sum() < BINS:
                continue
            parts = np.array_split(np.argsort(p.probability[known, i], kind="stable"), BINS)
            said = [p.probability[known, i][part].mean() for part in parts]
            happened = [p.labels[known, i][part].mean() for part in parts]
            axis.plot(said, happened, "o-", ms=3, lw=1, color=COLOURS[model], label=names[model])
            top = max(top, *said, *happened)
        axis.plot([0, top], [0, top], ":", color="#bbbbbb")
        axis.set_title(objective)
        axis.set_xlabel("predicted")
        axis.set_ylabel("happened")
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return svg(figure)


def by_day(found: Sequence[Foretold]) -> str:
    """Prequential NE and predictions over outcomes by day: a line a surface, a column an objective.

    Days with too few outcomes to tell are left out.
    """
    told = [one for one in found if min(one.said, one.happened) >= FEWEST_OUTCOMES]
    objectives = list(dict.fromkeys(one.objective for one in told))
    if not told:
        return ""
    figure = Figure(figsize=(3.4 * len(objectives), 4.4))
    panels = figure.subplots(2, len(objectives), sharex=True, sharey="row", squeeze=False)
    for axes, what in zip(panels, ("ne", "ratio"), strict=True):
        for axis, objective in zip(axes, objectives, strict=True):
            for surface in dict.fromkeys(one.surface for one in told):
                points = [o for o in told if (o.surface, o.objective) == (surface, objective)]
                days, values = [o.day for o in points], [getattr(o, what) for o in points]
                axis.plot(days, values, "o-", ms=3, lw=1, label=surface)
            axis.axhline(1, ls=":", color="#bbbbbb")
    for axis, objective in zip(panels[0], objectives, strict=True):
        axis.set_title(objective)
    for axis in panels[1]:
        axis.xaxis.set_major_locator(AutoDateLocator(minticks=2))
        axis.xaxis.set_major_formatter(DateFormatter("%d %b"))
        axis.tick_params("x", rotation=60)
    panels[0, 0].set_ylabel("NE before learning")
    panels[1, 0].set_ylabel("predicted / happened")
    panels[1, 0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return svg(figure)


def step_times(seconds: Sequence[tuple[str, float]]) -> str:
    """Seconds of each step."""
    figure = Figure(figsize=(7, 0.24 * len(seconds) + 0.6))
    axis = figure.subplots()
    names = [name for name, _ in seconds][::-1]
    values = [value for _, value in seconds][::-1]
    axis.barh(range(len(names)), values, color="#5b7083")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("seconds")
    for y, value in enumerate(values):
        axis.text(value, y, f" {value:.1f}", va="center")
    return svg(figure)


def study(found: Study) -> str:
    """The picture of a study; none where it has neither curves nor intervals."""
    parts = []
    if found.curves:
        parts.append(curves(found.curves))
    if found.intervals:
        parts.append(intervals(found.intervals))
    return "".join(parts)


def curves(found: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """NE against FLOPs, with the line of least squares through each model's points."""
    figure = Figure(figsize=(6, 3.2))
    axis = figure.subplots()
    for name, points in found.items():
        flops, ne = np.array(points).T
        (drawn,) = axis.plot(flops, ne, "o", ms=4, label=name)
        fitted = np.polynomial.Polynomial.fit(np.log10(flops), ne, 1)
        axis.plot(flops, fitted(np.log10(flops)), "-", lw=1, color=drawn.get_color())
    axis.set_xscale("log")
    axis.set_xlabel("FLOPs of an example, forward and backward")
    axis.set_ylabel("NE, lower is better")
    axis.legend(frameon=False, fontsize=8)
    return svg(figure)


def intervals(found: Mapping[str, tuple[float, float, float]]) -> str:
    """Differences with their bounds; those that may be nothing are pale."""
    figure = Figure(figsize=(6, 0.22 * len(found) + 0.8))
    axis = figure.subplots()
    names = list(found)[::-1]
    for y, name in enumerate(names):
        value, low, high = found[name]
        colour = "#1b7f5c" if high < 0 else "#c2571a" if low > 0 else "#bbbbbb"
        axis.plot([low, high], [y, y], "-", lw=1.5, color=colour)
        axis.plot([value], [y], "o", ms=4, color=colour)
    axis.axvline(0, color="#999999", lw=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("difference of NE, 1e-4; left is better")
    return svg(figure)
