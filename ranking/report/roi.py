"""The report's section on return on spend: response curves, and a plan of the same total."""

from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from etl.tables import arrow, roi_schemas
from etl.tables.lake import Lake
from ranking.report.figures import PANEL_WIDTH, to_svg

SHOWN = 12  # campaigns with the largest spends
PANELS = 4
LARGEST_SPEND = 2.0  # of a curve's panel, as a multiple of the current spend


@dataclass(frozen=True)
class RoiSection:
    """Campaigns by spend as rows of `response_curves`, on the latest day, and totals of all."""

    day: date
    campaigns: list[dict[str, Any]]
    num_campaigns: int
    currency: str
    total_spend: float
    value_before: float
    value_after: float
    num_incremental: int  # campaigns whose share of incremental conversions is known

    @property
    def figure(self) -> str:
        """The curves of the largest campaigns as an SVG."""
        return plot_curves(self.campaigns[:PANELS], self.currency)


def roi_section(lake: Lake, until: date) -> RoiSection | None:
    """The section on the latest day up to one; None without curves."""
    schema = roi_schemas.response_curves(lake.spec)
    if lake.spec.roi is None or not lake.exists(schema.name):
        return None
    table = arrow.snapshot(lake, schema)
    days = [day for day in table.days() if day <= until]
    if not days:
        return None
    rows = table.read(day=days[-1]).to_pylist()
    rows.sort(key=lambda row: -row["current_spend"])
    values = [row["value_per_conversion"] for row in rows]
    before = sum(v * row["conversions"] for v, row in zip(values, rows, strict=True))
    after = sum(v * row["planned_conversions"] for v, row in zip(values, rows, strict=True))
    total = sum(row["current_spend"] for row in rows)
    currency = rows[0]["currency"]
    incremental = sum(row.get("incremental_share") is not None for row in rows)
    return RoiSection(
        days[-1], rows[:SHOWN], len(rows), currency, total, before, after, incremental
    )


def plot_curves(campaigns: list[dict[str, Any]], currency: str) -> str:
    """Conversions by spend, the interval at the current spend, and the planned spend."""
    figure = Figure(figsize=(PANEL_WIDTH * len(campaigns), 2.8))
    axes = np.ravel(figure.subplots(1, len(campaigns)))
    for axis, row in zip(axes, campaigns, strict=True):
        _plot_curve(axis, row)
        axis.set_xlabel(f"{currency} a day")
    axes[0].set_ylabel("conversions a day")
    figure.tight_layout()
    return to_svg(figure)


def _plot_curve(axis: Axes, row: dict[str, Any]) -> None:
    current, half = row["current_spend"], row["half_saturation"]
    spend = np.linspace(0, LARGEST_SPEND * current, 60)
    axis.plot(spend, row["conversions"] * spend * (current + half) / (current * (spend + half)))
    error = [[row["conversions"] - row["low"]], [row["high"] - row["conversions"]]]
    axis.errorbar([current], [row["conversions"]], yerr=error, fmt="o", color="tab:blue", capsize=3)
    axis.axvline(row["planned_spend"], color="tab:orange", linestyle="--")
    axis.set_title(row["campaign"])
    axis.set_ylim(0)
