"""The report's section on forecasts: the coming days by surface, and reach and spend by bid."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from etl.array_types import Float64
from etl.errors import UserError
from etl.tables.lake import Lake
from ranking.forecast.forecaster import Forecaster
from ranking.forecast.pool import open_forecast
from ranking.forecast.schemas import CampaignForecast, Forecast, ForecastRequest
from ranking.forecast.shard import Shard
from ranking.forecast.tables import SAMPLE
from ranking.report.figures import PANEL_WIDTH, to_svg

NUM_BIDS = 8
BID_QUANTILES = (0.05, 0.95)  # of what the places of the sample cost per event


@dataclass(frozen=True)
class BidCurve:
    """What campaigns of a goal that target everyone would win, by bid; at least one bid."""

    goal: str
    bids: list[float]
    campaigns: list[CampaignForecast]


@dataclass(frozen=True)
class ForecastSection:
    """Everyone and each surface in the days after the sample, and bid curves by goal.

    Surfaces and bids of too few users are left out; the notes of everyone name them.
    """

    segments: dict[str, Forecast]
    curves: list[BidCurve]

    @property
    def figure(self) -> str:
        """Reach and spend by bid as an SVG, a panel for each goal; empty if there is none."""
        return plot_bid_curves(self.curves) if self.curves else ""


def forecast_section(lake: Lake) -> ForecastSection | None:
    """The section; None if no forecast has been built, or if its users are too few to report."""
    if lake.spec.forecast is None or not lake.exists(SAMPLE):
        return None
    tables, local = open_forecast(lake)
    return asyncio.run(_forecast(Forecaster(tables, local), local.shard))


async def _forecast(forecaster: Forecaster, shard: Shard) -> ForecastSection | None:
    spec = forecaster.spec
    targetings = {"everyone": ""} | {name: f"surface = '{name}'" for name in spec.ad_surfaces}
    segments = {}
    for name, targeting in targetings.items():
        with suppress(UserError):  # too few users
            segments[name] = await forecaster.forecast(ForecastRequest(targeting=targeting))
    if "everyone" not in segments:
        return None
    notes = [f"surface {name} has too few users to report" for name in targetings.keys() - segments]
    curves = []
    for goal, objective in (spec.auction.goal_objectives if spec.auction else {}).items():
        bids = [float(bid) for bid in typical_bids(shard, objective)]
        won = {bid: await _campaign(forecaster, goal, bid) for bid in bids}
        points = {bid: campaign for bid, campaign in won.items() if campaign is not None}
        if len(points) < len(won):
            number = len(won) - len(points)
            notes.append(f"{number} of {len(won)} bids for {goal} win too few users to report")
        if points:
            curves.append(BidCurve(goal, list(points), list(points.values())))
    everyone = segments["everyone"]
    noted = everyone.model_copy(update={"notes": (*everyone.notes, *sorted(notes))})
    return ForecastSection(segments | {"everyone": noted}, curves)


async def _campaign(forecaster: Forecaster, goal: str, bid: float) -> CampaignForecast | None:
    """What a campaign that targets everyone would win; None if these are too few users."""
    return (await forecaster.forecast(ForecastRequest(goal=goal, bid=bid))).campaign


def typical_bids(shard: Shard, objective: str) -> Float64:
    """Bids per event of an objective that win from few to most places of the sample."""
    low, high = shard.cost_per_event(objective, BID_QUANTILES)
    return np.geomspace(low, high, NUM_BIDS)


def plot_bid_curves(curves: list[BidCurve]) -> str:
    """Reach with its interval, and spend, by bid."""
    figure = Figure(figsize=(PANEL_WIDTH * len(curves), 3.2))
    axes = np.ravel(figure.subplots(1, len(curves)))
    for axis, curve in zip(axes, curves, strict=True):
        reach = np.array([[c.reach.low, c.reach.value, c.reach.high] for c in curve.campaigns])
        axis.fill_between(curve.bids, reach[:, 0], reach[:, 2], alpha=0.2, linewidth=0)
        axis.plot(curve.bids, reach[:, 1], label="reach")
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())  # labels of minor ticks overlap
        axis.set_ylim(0)
        axis.set_title(curve.goal)
        axis.set_xlabel("bid per event")
        spend = axis.twinx()
        spent = [campaign.spend.value for campaign in curve.campaigns]
        spend.plot(curve.bids, spent, color="tab:orange", ls="--")
        spend.set_ylim(0)
        spend.tick_params(axis="y", colors="tab:orange", labelsize=7)
    axes[0].set_ylabel("users reached (dashed: spend)")
    figure.tight_layout()
    return to_svg(figure)
