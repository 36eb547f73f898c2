"""What campaigns win of a simulated world, against their forecasts from a sample of it."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import BenchmarkResult
from benchmarks.studies.forecast_world import draw_boxes, targeting_text
from etl.errors import UserError
from ranking.forecast.forecaster import Forecaster
from ranking.forecast.schemas import CampaignForecast, ForecastRequest, Interval
from ranking.forecast.shard import SPEND, USERS, Campaign, Query, Shard
from ranking.forecast.sums import SampleSums
from ranking.forecast.targeting import parse_targeting

CAMPAIGNS = 500
BIDS = (0.05, 0.4)
FREQUENCY_CAP = 5
GOAL, OBJECTIVE = "traffic", "click"
MIN_REACH = 100  # users that the campaign truly reaches
COVERAGE_GOAL = "0.93 to 0.97"


def measure_campaigns(result: BenchmarkResult, forecaster: Forecaster, rows_file: Path) -> None:
    """Errors of the reach, and coverage of the intervals of the reach and the cost per click.

    All impressions of the week are counted for the truth. Impressions, spend and events of the next
    week are those of the supply, whose errors `mape_week` shows.
    """
    everyone = pq.read_table(rows_file)
    certain = pa.array(np.ones(everyone.num_rows))
    tables = forecaster.tables
    shard = Shard(
        forecaster.spec, everyone.append_column("probability", certain), dict(tables.domain)
    )
    errors: list[float] = []
    covered: list[bool] = []
    rng = np.random.default_rng(2)
    for box in draw_boxes(rng, CAMPAIGNS, context=True):
        request = campaign_request(rng, targeting_text(box))
        with suppress(UserError):  # too few users, all or sampled ones
            targeting = parse_targeting(request.targeting, tables.domain)
            campaign = Campaign(OBJECTIVE, request.bid or 0.0, FREQUENCY_CAP)
            truth = shard.sums(Query(*targeting.sql(), tables.window, campaign))
            forecast = asyncio.run(forecaster.forecast(request)).campaign
            if forecast is None or truth.totals[USERS] < MIN_REACH:
                continue
            errors.append(abs(forecast.reach.value / truth.totals[USERS] - 1))
            covered += _coverage(truth, forecast)
    result.record("campaign_reach_error_p50", float(np.median(errors)), "")
    result.record("campaign_reach_error_p95", float(np.quantile(errors, 0.95)), "")
    result.record("campaign_interval_coverage", float(np.mean(covered)), "")
    text = f"{np.median(errors):.3f}, {np.quantile(errors, 0.95):.3f}"
    result.rows.append((f"error P50, P95 of the reach of {len(errors)} campaigns", text, "", ""))
    row = ("coverage of reach and cost per click", f"{np.mean(covered):.3f}", "", COVERAGE_GOAL)
    result.rows.append(row)


def campaign_request(rng: np.random.Generator, targeting: str) -> ForecastRequest:
    """A campaign with a random bid."""
    bid = float(rng.uniform(*BIDS))
    return ForecastRequest(targeting=targeting, goal=GOAL, bid=bid, frequency_cap=FREQUENCY_CAP)


def _coverage(truth: SampleSums, forecast: CampaignForecast) -> Iterator[bool]:
    """Whether the intervals of the reach and the cost per click cover the true ones."""
    yield _covers(forecast.reach, float(truth.totals[USERS]))
    clicks = float(truth.totals[SPEND + 1 + list(forecast.events).index(OBJECTIVE)])
    if clicks > 0 and forecast.cost_per_event:
        yield _covers(forecast.cost_per_event, float(truth.totals[SPEND]) / clicks)


def _covers(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high
