"""Times of the forecast service, and its answers while workers are killed."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.harness import BenchmarkResult
from benchmarks.studies.forecast_campaigns import campaign_request
from benchmarks.studies.forecast_world import draw_boxes, targeting_text
from etl.errors import TemporaryError, UserError
from etl.tables.lake import Lake
from ranking.forecast.forecaster import Forecaster
from ranking.forecast.pool import WorkerPool
from ranking.forecast.schemas import Forecast, ForecastRequest
from ranking.forecast.tables import SAMPLE, read_sample, read_tables, table_versions
from ranking.forecast.worker import WorkerSettings

REQUESTS, KILL_EVERY = 200, 20
LEAST_USERS = 200  # of a segment, so that the estimate of half of the sample is not refused
GOALS = {"query_p99_ms": "<= 20", "killed_worker_answers": f"{REQUESTS} of {REQUESTS}"}


async def measure_service(
    result: BenchmarkResult, lake: Lake, spec_file: Path, workers: int
) -> None:
    """Times of forecasts with campaigns by worker processes, and answers while these are killed."""
    versions = table_versions(lake)
    sample = read_sample(lake, versions[SAMPLE])
    settings = WorkerSettings(spec=spec_file, lake=lake.root, versions=versions, shard=(0, workers))
    result.record("sampled_rows", sample.num_rows, "")
    pool = WorkerPool(settings, workers)
    try:
        await pool.wait_until_ready()
        forecaster = Forecaster(read_tables(lake, sample, versions), pool)
        requests = await answerable_requests(forecaster)
        others = f"{sample.num_rows:,} rows in {workers} workers"
        await measure_times(result, forecaster, requests, others)
        await measure_kills(result, forecaster, pool, requests)
    finally:
        await pool.close()


async def measure_times(
    result: BenchmarkResult,
    forecaster: Forecaster,
    requests: Sequence[ForecastRequest],
    service: str,
) -> None:
    """Median and 99th percentile of the milliseconds of forecasts, one after the other."""
    seconds = []
    for request in requests:
        start = time.perf_counter()
        await forecaster.forecast(request)
        seconds.append(time.perf_counter() - start)
    p50, p99 = (float(q) for q in np.quantile(1e3 * np.array(seconds), (0.5, 0.99)))
    result.record("query_p50_ms", p50, "")
    result.record("query_p99_ms", p99, "")
    others = f"P50 {p50:.1f}; {service}"
    result.rows.append(("P99 of a forecast, ms", f"{p99:.1f}", others, GOALS["query_p99_ms"]))


async def answerable_requests(forecaster: Forecaster) -> list[ForecastRequest]:
    """Campaigns with targetings of one to four attributes, some in hours of the day."""
    rng = np.random.default_rng(1)
    requests: list[ForecastRequest] = []
    while len(requests) < REQUESTS:
        (box,) = draw_boxes(rng, 1, context=True)
        text, first_hour = targeting_text(box), int(rng.integers(0, 12))
        if rng.random() < 0.3:
            text += f" and hour between {first_hour} and {first_hour + 10}"
        request = campaign_request(rng, text)
        with suppress(UserError):  # too few users
            forecast = await forecaster.forecast(request)
            if forecast.campaign and forecast.users.value > LEAST_USERS:
                requests.append(request)
    return requests


async def measure_kills(
    result: BenchmarkResult,
    forecaster: Forecaster,
    pool: WorkerPool,
    requests: Sequence[ForecastRequest],
) -> None:
    """Answers while a worker is killed every few requests, and their intervals without it."""
    answered, wider, kills = 0, 0, 0
    for number, request in enumerate(requests):
        if number % KILL_EVERY == 0:
            await pool.wait_until_ready()
            complete = await forecaster.forecast(request)
            kill(pool, kills)
            kills += 1
        forecast = await forecast_or_none(forecaster, request)
        if forecast is None or forecast.campaign is None:
            continue
        answered += 1
        if number % KILL_EVERY == 0:
            wider += reach_width(forecast) > reach_width(complete)
    result.record("killed_worker_answers", answered, "")
    result.record("killed_worker_wider_intervals", wider / kills, "")
    others = f"{wider} of {kills} intervals wider just after a kill"
    goal = GOALS["killed_worker_answers"]
    result.rows.append(("answers while workers are killed", f"{answered}", others, goal))


async def forecast_or_none(forecaster: Forecaster, request: ForecastRequest) -> Forecast | None:
    """The forecast; None if the answer is an error."""
    with suppress(UserError, TemporaryError):
        return await forecaster.forecast(request)
    return None


def kill(pool: WorkerPool, number: int) -> None:
    """Kill one of the worker processes."""
    process = pool.workers[number % len(pool.workers)].process
    assert process
    os.kill(process.pid, signal.SIGKILL)


def reach_width(forecast: Forecast) -> float:
    """The width of the interval of the reach, relative to the reach."""
    assert forecast.campaign
    reach = forecast.campaign.reach
    return (reach.high - reach.low) / reach.value
