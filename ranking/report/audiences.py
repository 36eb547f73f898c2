"""The report's section on audiences: how good each data provider's labels are."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from etl.tables import arrow, audience_schemas
from etl.tables.lake import Lake
from ranking.report.figures import PANEL_WIDTH, to_svg


@dataclass(frozen=True)
class ProviderLabels:
    """The published figures of a provider's labels for the classes of an audience.

    Attributes:
        precision, low, high: P(class | label) (labels, classes) and its 95 % interval.
    """

    provider: str
    coverage: float
    information: float
    labels: list[str]
    impressions: list[int]
    precision: np.ndarray[Any, np.dtype[np.float64]]
    low: np.ndarray[Any, np.dtype[np.float64]]
    high: np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class AudienceSection:
    """An audience on its latest day: its classes, and the labels of its providers."""

    name: str
    day: date
    classes: tuple[str, ...]
    providers: list[ProviderLabels]

    @property
    def figure(self) -> str:
        """P(class | label) as an SVG, a panel for each provider."""
        return plot_precision(self.classes, self.providers)


def audience_sections(lake: Lake, until: date) -> list[AudienceSection]:
    """The audiences with an estimate, as of the latest day up to one."""
    schema = audience_schemas.audience_quality(lake.spec)
    if not lake.spec.audiences or not lake.exists(schema.name):
        return []
    table = arrow.snapshot(lake, schema)
    days = [day for day in table.days() if day <= until]
    rows = table.read(day=days[-1:]).to_pylist() if days else []
    sections = []
    for name, audience in lake.spec.audiences.items():
        providers = [
            _provider_labels([r for r in rows if (r["audience"], r["provider"]) == (name, p)])
            for p in audience.providers
            if any((r["audience"], r["provider"]) == (name, p) for r in rows)
        ]
        if providers:
            sections.append(AudienceSection(name, days[-1], audience.classes, providers))
    return sections


def _provider_labels(rows: Sequence[dict[str, Any]]) -> ProviderLabels:
    """The figures of a provider; rows of a label are in the order of the classes."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    by_label = [[row for row in rows if row["label"] == label] for label in labels]
    matrices = {
        name: np.array([[row[name] for row in of_label] for of_label in by_label])
        for name in ("precision", "low", "high")
    }
    return ProviderLabels(
        provider=rows[0]["provider"],
        coverage=rows[0]["coverage"],
        information=rows[0]["information"],
        labels=labels,
        impressions=[of_label[0]["impressions"] for of_label in by_label],
        **matrices,
    )


def plot_precision(classes: Sequence[str], providers: Sequence[ProviderLabels]) -> str:
    """P(class | label) of each provider; the darker, the more certain."""
    height = 0.32 * max(len(provider.labels) for provider in providers) + 1.0
    figure = Figure(figsize=(PANEL_WIDTH * len(providers), height))
    axes = np.ravel(figure.subplots(1, len(providers)))
    for axis, provider in zip(axes, providers, strict=True):
        axis.imshow(provider.precision, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (a, k), value in np.ndenumerate(provider.precision):
            color = "white" if value > 0.6 else "black"
            axis.text(k, a, f"{value:.2f}", ha="center", va="center", color=color, fontsize=7)
        axis.set_xticks(range(len(classes)), classes, fontsize=7)
        axis.set_yticks(range(len(provider.labels)), provider.labels, fontsize=7)
        axis.set_title(provider.provider)
        axis.set_xlabel("true class")
    axes[0].set_ylabel("label")
    figure.tight_layout()
    return to_svg(figure)
