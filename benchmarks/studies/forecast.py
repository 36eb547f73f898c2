"""`gemline bench forecast`: forecasts of a simulated world, in which all answers are known.

A week of more than five million impressions is sampled; the tables are built by the Spark job and
read as the service reads them.
"""

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BenchmarkResult, require_known
from etl.errors import UserError
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.studies.forecast_world import ForecastWorld
    from etl.array_types import Float64
    from etl.tables.lake import Lake
    from ranking.forecast.conditions import Box
    from ranking.forecast.expansion import SegmentSize
    from ranking.forecast.forecaster import Forecaster

PARTS = ("errors", "service")
SAMPLE_SHARE = 0.01  # of the impressions, for the errors
LATENCY_ROWS = 1_000_000  # sampled rows, for the times
QUERIES = 2500
MIN_USERS = 50
DECADES = (100, 1_000, 10_000, 100_000)
MIN_WEEK_IMPRESSIONS = 1_000  # of a segment whose next week is forecast
GOALS = {
    "p95_ratio_small_segments": "<= 0.5",
    "interval_coverage": "0.93 to 0.97",
    "mape_week": "below repeats",
}


class ForecastArgs(StrictModel):
    """Arguments of the benchmark."""

    users: int = Field(default=500_000, ge=1000)
    workers: int = Field(default=2, ge=1)
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="errors, service; by default both")] = (
        "errors",
        "service",
    )
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


@dataclass(frozen=True)
class Build:
    """The tables of a world in a lake, and the file of their spec."""

    lake: "Lake"
    spec_file: Path


def bench_forecast(args: ForecastArgs) -> None:
    """Errors of segments and campaigns, coverage, times, killed workers, and the week after."""
    from benchmarks.studies.forecast_campaigns import measure_campaigns
    from benchmarks.studies.forecast_service import measure_service
    from benchmarks.studies.forecast_world import ForecastWorld

    require_known(args.only, PARTS)
    result = BenchmarkResult("Forecasts", ("figure", "ours", "alternatives", "goal"))
    world = ForecastWorld.draw(0, args.users)
    result.record("universe_impressions", len(world.user), "")
    with tempfile.TemporaryDirectory() as folder:
        rows_file = Path(folder) / "rows.parquet"
        _write_rows(world, rows_file)
        if "errors" in args.only:
            sample_rows = int(SAMPLE_SHARE * len(world.user))
            build = build_tables(world, rows_file, Path(folder) / "small", sample_rows)
            forecaster = open_forecaster(build.lake)
            measure_errors(result, world, forecaster, sample_rows)
            measure_week(result, world, forecaster)
            measure_campaigns(result, forecaster, rows_file)
        if "service" in args.only:
            build = build_tables(world, rows_file, Path(folder) / "large", LATENCY_ROWS)
            asyncio.run(measure_service(result, build.lake, build.spec_file, args.workers))
    result.show(args.as_json)


def _write_rows(world: "ForecastWorld", file: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(world.rows(), file)


def build_tables(world: "ForecastWorld", rows_file: Path, root: Path, sample_rows: int) -> Build:
    """Build the tables of a forecast by the Spark job."""
    import yaml
    from pyspark.sql import SparkSession

    from benchmarks.studies.forecast_world import sampled_days, world_spec
    from etl.runtime.spark import spark_session
    from etl.tables.lake import Lake
    from features.forecast.build import write_forecast

    spark_session("bench forecast")
    spark = SparkSession.active()
    root.mkdir()
    spec = world_spec(sample_rows, MIN_USERS)
    spec_file = root / "spec.yaml"
    dumped = spec.model_dump(mode="json", exclude_unset=True)
    spec_file.write_text(yaml.safe_dump(dumped, sort_keys=False))
    lake = Lake(str(root / "lake"), spec)
    supply = [
        (surface, round(count), day)
        for surface, by_day in world.daily_supply().items()
        for day, count in by_day.items()
    ]
    supply_rows = spark.createDataFrame(supply, "surface string, impressions bigint, day date")
    rows = spark.read.parquet(str(rows_file))
    write_forecast(lake, rows, supply_rows, sampled_days()[-1], {})
    return Build(lake, spec_file)


def open_forecaster(lake: "Lake") -> "Forecaster":
    """The forecaster of a lake, with its sample in this process."""
    from ranking.forecast.forecaster import Forecaster
    from ranking.forecast.pool import open_forecast

    return Forecaster(*open_forecast(lake))


@dataclass(frozen=True)
class Errors:
    """Relative errors of the designs by query (Q), and whether our intervals cover the truth."""

    users: "Float64"
    errors: dict[str, "Float64"]
    covered: "list[bool]"


def measure_errors(
    result: BenchmarkResult, world: "ForecastWorld", forecaster: "Forecaster", sample_rows: int
) -> None:
    """Relative errors by decade of the size of segments, and the coverage of intervals."""
    import numpy as np

    margins = forecaster.tables.model.impressions.counts.shape[0] ** 2 // 2
    designs = baseline_samples(world, sample_rows + margins)
    found = errors_of_queries(world, forecaster, designs)
    decade = np.digitize(found.users, DECADES)
    for d in range(len(DECADES) + 1):
        chosen = decade == d
        if not chosen.any():
            continue
        quantiles = {
            name: np.quantile(errors[chosen], (0.5, 0.95)) for name, errors in found.errors.items()
        }
        name = _decade_name(d)
        for design, (median, p95) in quantiles.items():
            result.record(f"{design}_p50_{name}", float(median), "")
            result.record(f"{design}_p95_{name}", float(p95), "")
        texts = {design: f"{q[0]:.3f}, {q[1]:.3f}" for design, q in quantiles.items()}
        others = f"{texts['uniform']} uniform; {texts['stratified']} stratified"
        result.rows.append((f"error P50, P95, users {name}", texts["ours"], others, ""))
    small = decade == 1
    p95 = {name: float(np.quantile(e[small], 0.95)) for name, e in found.errors.items()}
    ratio = p95["ours"] / min(p95["uniform"], p95["stratified"])
    result.record("p95_ratio_small_segments", ratio, "")
    goal = GOALS["p95_ratio_small_segments"]
    result.rows.append(("P95 error, 100 to 1,000 users, over the best", f"{ratio:.3f}", "", goal))
    coverage = sum(found.covered) / len(found.covered)
    result.record("interval_coverage", coverage, "")
    goal = GOALS["interval_coverage"]
    result.rows.append(("coverage of 95 % intervals", f"{coverage:.3f}", "", goal))


def _decade_name(decade: int) -> str:
    bounds = [MIN_USERS, *DECADES]
    return f"{bounds[decade]}" if decade < len(DECADES) else f"{DECADES[-1]}_up"


def baseline_samples(world: "ForecastWorld", rows: int) -> "dict[str, Float64]":
    """The weight of each user (N), 0 if not sampled, in samples of as many rows.

    `uniform` samples users with one probability, `stratified` as many in proportion of each stratum
    of country and age.
    """
    import numpy as np

    share = rows / len(world.user)
    users = len(world.values)
    uniform = np.where(world.rng.random(users) < share, 1.0 / share, 0.0)
    stratum = world.values[:, 2] * 6 + world.values[:, 0]
    order = np.lexsort((world.rng.random(users), stratum))
    sizes = np.bincount(stratum)
    position = np.empty(users, np.int64)
    position[order] = np.arange(users) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    allocated = np.maximum(np.round(sizes * share), np.minimum(sizes, 1)).astype(int)
    weight = sizes / np.maximum(allocated, 1)
    stratified = np.where(position < allocated[stratum], weight[stratum], 0.0)
    return {"uniform": uniform, "stratified": stratified}


def errors_of_queries(
    world: "ForecastWorld", forecaster: "Forecaster", designs: "dict[str, Float64]"
) -> Errors:
    """Errors of the number of users, and coverage of users and impressions.

    Intervals of segments of one or two attributes are exact and are left out of the coverage.
    """
    import numpy as np

    from benchmarks.studies.forecast_world import draw_boxes

    true_users, covered = [], []
    errors: dict[str, list[float]] = {name: [] for name in ("ours", *designs)}
    for box in draw_boxes(world.rng, QUERIES):
        counts = world.user_counts(box)
        users, impressions = int((counts > 0).sum()), int(counts.sum())
        if users < MIN_USERS:
            continue
        size = asyncio.run(segment_size(forecaster, box))
        true_users.append(users)
        errors["ours"].append(abs(size.users.value / users - 1))
        for name, weights in designs.items():
            errors[name].append(abs(float(weights[counts > 0].sum()) / users - 1))
        if len(box) > 2:
            covered.append(size.users.low <= users <= size.users.high)
            covered.append(size.impressions.low <= impressions <= size.impressions.high)
    return Errors(
        np.array(true_users), {name: np.array(values) for name, values in errors.items()}, covered
    )


async def segment_size(forecaster: "Forecaster", box: "Box") -> "SegmentSize":
    """The estimated size of a segment in the window."""
    from benchmarks.studies.forecast_world import targeting_text
    from ranking.forecast.shard import Query
    from ranking.forecast.targeting import parse_targeting

    targeting = parse_targeting(targeting_text(box), forecaster.tables.domain)
    sums = await forecaster.pool.sums(Query(*targeting.sql(), forecaster.tables.window))
    return forecaster.segment_size(targeting, sums)


def measure_week(result: BenchmarkResult, world: "ForecastWorld", forecaster: "Forecaster") -> None:
    """Errors of the impressions of the next week, against those of repeating the last one."""
    from benchmarks.studies.forecast_world import draw_boxes, targeting_text
    from ranking.forecast.schemas import ForecastRequest

    after, ours, repeats = world.next_week(), [], []
    for box in draw_boxes(world.rng, QUERIES // 5):
        now, truth = int(world.user_counts(box).sum()), int(after.user_counts(box).sum())
        if min(now, truth) < MIN_WEEK_IMPRESSIONS:
            continue
        request = ForecastRequest(targeting=targeting_text(box))
        with suppress(UserError):  # too few users, in a small world
            predicted = asyncio.run(forecaster.forecast(request)).impressions.value
            ours.append(abs(predicted / truth - 1))
            repeats.append(abs(now / truth - 1))
    result.record("mape_week", mean(ours), "")
    result.record("mape_week_repeat", mean(repeats), "")
    others = f"{mean(repeats):.4f} repeats of last week"
    row = ("error of next week's impressions", f"{mean(ours):.4f}", others, GOALS["mape_week"])
    result.rows.append(row)
