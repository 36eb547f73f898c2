"""The as-of join and point-in-time counters, compared with alternative implementations.

As-of joins: Spark's range join, two joins, DuckDB and Polars. Counters: Spark's range windows. All
must return the same sums.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession, Window, WindowSpec
from pyspark.sql import functions as F

from benchmarks.harness import SIMULATOR_SPEC, BenchmarkResult, interleaved_median_seconds
from benchmarks.synthetic_data import IMPRESSION, generate_events
from etl.spec import DataSpec, load_spec
from etl.spec.counters import CounterSpec
from features.counters.counting import count_events
from features.counters.key_prefixes import HOT_EVENTS, find_hot_prefixes
from features.examples import asof_join

VALUES = ("event", "item", "type", "dwell_ms")
KEYS = (("user",), ("item",), ("user", "category"), ("surface",))
HOT = (("item",), ("item", "surface"))
WINDOWS = ("1h", "1d", "7d", "30d")
EVENTS = ("ad_impression", "ad_long_view", "ad_click", "conversion")
THREADS = 2  # those of Spark: `local[2]`
BENCH_HOT_EVENTS = HOT_EVENTS // 4  # so that a smaller log has a hot item
ColumnSums = tuple[int, ...]


def measure_asof_join(
    result: BenchmarkResult, work: Path, events: int = 2_000_000, users: int = 20_000
) -> None:
    """`asof_ratio` to Spark's range join, and ratios to the other implementations."""
    _time_spark_joins(work, events // 10, users // 10, 1)  # warm-up
    seconds, sums = _time_spark_joins(work, events, users, 2)
    single_process = _single_process_joins(work, sums)
    interleaved_median_seconds(single_process, 1)
    seconds |= interleaved_median_seconds(single_process, 3)
    window = seconds.pop("window")
    result.record("asof_ratio", seconds["range join"] / window, "")
    for name, duration in seconds.items():
        if name != "range join":
            key = f"asof_{name.lower().replace(' ', '_')}_ratio"
            result.record(key, duration / window, "")
    others = "; ".join(f"{duration:.1f} s {name}" for name, duration in seconds.items())
    ratio = f"{seconds['range join'] / window:.1f}"
    result.rows.append(("as-of join of 4 columns", f"{window:.1f} s", others, ratio, ">= 7"))


def _time_spark_joins(
    work: Path, events: int, users: int, rounds: int
) -> tuple[dict[str, float], ColumnSums]:
    """Median seconds of each join, and their common column sums."""
    impressions, rows = _write_join_inputs(work, events, users)
    sums: dict[str, ColumnSums] = {}

    def run(name: str, join: Callable[[DataFrame, DataFrame], DataFrame]) -> None:
        row = join(impressions, rows).agg(*[F.sum(f"row.{value}") for value in VALUES]).first()
        assert row is not None
        sums[name] = tuple(row)

    seconds = interleaved_median_seconds(
        {name: partial(run, name, join) for name, join in SPARK_JOINS.items()}, rounds
    )
    assert len(set(sums.values())) == 1, sums
    return seconds, sums["window"]


def _write_join_inputs(work: Path, events: int, users: int) -> tuple[DataFrame, DataFrame]:
    """Impressions and other events, as files and as data frames."""
    log = generate_events(events, users)
    is_impression = log.type == IMPRESSION
    # One row per user and second: ties would have several correct results.
    _, first = np.unique(np.stack((log.user, log.seconds)), axis=1, return_index=True)
    rows = np.intersect1d(np.flatnonzero(~is_impression), first)
    impressions = pa.table({
        "user": log.user[is_impression], "ts": log.seconds[is_impression],
        "impression_id": np.arange(is_impression.sum()).astype(str),
    })  # fmt: skip
    pq.write_table(impressions, work / "impressions.parquet")
    other_events = pa.table({
        "user": log.user[rows], "ts": log.seconds[rows], "event": rows,
        "item": log.item[rows].astype(np.int64), "type": log.type[rows].astype(np.int64),
        "dwell_ms": np.nan_to_num(log.dwell_ms[rows]).astype(np.int64),
    })  # fmt: skip
    pq.write_table(other_events, work / "events.parquet")
    read = SparkSession.active().read
    event_rows = read.parquet(str(work / "events.parquet"))
    event_rows = event_rows.select("user", "ts", F.struct(*VALUES).alias("row"))
    return read.parquet(str(work / "impressions.parquet")), event_rows


def range_join(impressions: DataFrame, rows: DataFrame) -> DataFrame:
    """Join all earlier rows of the key, then keep the latest one."""
    newest = F.max_by(F.col("r.row"), F.col("r.ts")).alias("row")
    return _earlier_pairs(impressions, rows).groupBy("impression_id").agg(newest)


def two_joins(impressions: DataFrame, rows: DataFrame) -> DataFrame:
    """The latest time by a range join, then its row by another; times of a key must be unique."""
    newest = (
        _earlier_pairs(impressions, rows)
        .groupBy("impression_id", "a.user")
        .agg(F.max("r.ts").alias("ts"))
    )
    return newest.join(rows, ["user", "ts"], "left")


def _earlier_pairs(impressions: DataFrame, rows: DataFrame) -> DataFrame:
    a, r = impressions.alias("a"), rows.alias("r")
    earlier = (F.col("a.user") == F.col("r.user")) & (F.col("r.ts") < F.col("a.ts"))
    return a.join(r, earlier, "left")


SPARK_JOINS: dict[str, Callable[[DataFrame, DataFrame], DataFrame]] = {
    "window": partial(asof_join, key_column="user", ts_column="ts"),
    "range join": range_join,
    "two joins": two_joins,
}


def _single_process_joins(work: Path, expected: ColumnSums) -> dict[str, Callable[[], None]]:
    """DuckDB's and Polars' own as-of joins of the same files, on the same number of cores."""
    import duckdb

    os.environ["POLARS_MAX_THREADS"] = str(THREADS)  # read at import
    import polars as pl

    assert pl.thread_pool_size() == THREADS, "polars was imported before"
    connection = duckdb.connect()
    connection.execute(f"SET threads = {THREADS}")
    for name in ("impressions", "events"):
        connection.read_parquet(str(work / f"{name}.parquet")).create_view(name)
    query = """SELECT sum(event), sum(item), sum(type), sum(dwell_ms) FROM impressions
        ASOF LEFT JOIN events
        ON impressions.user = events.user AND impressions.ts > events.ts"""

    def run_duckdb() -> None:
        assert connection.execute(query).fetchone() == expected

    def run_polars() -> None:
        impressions = pl.scan_parquet(work / "impressions.parquet").sort("ts")
        events = pl.scan_parquet(work / "events.parquet").sort("ts")
        joined = impressions.join_asof(events, on="ts", by="user", allow_exact_matches=False)
        assert joined.select(pl.sum(*VALUES).cast(pl.Int64)).collect().row(0) == expected

    return {"DuckDB": run_duckdb, "Polars": run_polars}


def measure_counters(
    result: BenchmarkResult, work: Path, events: int = 30_000, users: int = 500
) -> None:
    """`counter_ratio` to Spark's range windows."""
    counter_spec = CounterSpec.model_validate({"windows": WINDOWS, "events": EVENTS, "keys": KEYS})
    spec = load_spec(SIMULATOR_SPEC).model_copy(update={"counters": counter_spec})
    columns = [counter.column for counter in spec.counters.columns]
    sums: dict[str, list[int]] = {}

    def sum_columns(name: str, counted: DataFrame) -> None:
        row = counted.agg(*[F.sum(column).alias(column) for column in columns]).first()
        assert row is not None
        sums[name] = [row[column] for column in columns]

    def time_variants(events: int, users: int, rounds: int) -> dict[str, float]:
        event_rows, queries = _write_counter_inputs(work, events, users)
        variants = {
            "ours": lambda: sum_columns("ours", count_events(spec, event_rows, queries)),
            "windows": lambda: sum_columns("windows", range_windows(spec, event_rows, queries)),
        }
        return interleaved_median_seconds(variants, rounds)

    time_variants(events // 10, users // 10, 1)  # warm-up
    seconds = time_variants(events, users, 2)
    assert sums["ours"] == sums["windows"]
    ratio = seconds["windows"] / seconds["ours"]
    result.record("counter_ratio", ratio, "")
    result.rows.append(
        (
            f"{len(columns)} counters, {events:,} events, every seventh an impression",
            f"{seconds['ours']:.1f} s",
            f"{seconds['windows']:.1f} s range windows",
            f"{ratio:.1f}",
            ">= 3",
        )
    )


def measure_hot_key(result: BenchmarkResult, work: Path, events: int = 2_000_000) -> None:
    """`hot_key_ratio`: seconds with one item that has half of all events, over uniform items.

    Keys are hot from BENCH_HOT_EVENTS on, fewer than by default.
    """
    counter_spec = CounterSpec.model_validate({"windows": WINDOWS, "events": EVENTS, "keys": HOT})
    spec = load_spec(SIMULATOR_SPEC).model_copy(update={"counters": counter_spec})
    uniform = _write_counter_inputs(work, events, events // 100)
    is_hot = F.pmod(F.xxhash64("key_user", "visible_ts"), F.lit(2)) == 0
    item = F.when(is_hot, F.lit(0).cast("bigint")).otherwise(F.col("key_item"))
    hot_events, hot_queries = (
        frame.withColumnRenamed("as_of_ts", "visible_ts").withColumn("key_item", item)
        for frame in uniform
    )
    hot = hot_events, hot_queries.withColumnRenamed("visible_ts", "as_of_ts")
    variants = {
        name: partial(_sum_counters, spec, *inputs)
        for name, inputs in (("uniform", uniform), ("hot", hot))
    }
    interleaved_median_seconds(variants, 1)  # warm-up
    seconds = interleaved_median_seconds(variants, 3)
    result.record("hot_key_ratio", seconds["hot"] / seconds["uniform"], "")
    result.rows.append(
        (
            f"counters of items, {events:,} events, half of them of one item; "
            f"hot from {BENCH_HOT_EVENTS:,} events on (default {HOT_EVENTS:,})",
            f"{seconds['hot']:.1f} s",
            f"{seconds['uniform']:.1f} s uniform items",
            f"{seconds['hot'] / seconds['uniform']:.2f}",
            "<= 1.3",
        )
    )


def _sum_counters(spec: DataSpec, events: DataFrame, queries: DataFrame) -> None:
    counted = count_events(spec, events, queries, find_hot_prefixes(spec, events, BENCH_HOT_EVENTS))
    counted.agg(*[F.sum(counter.column) for counter in spec.counters.columns]).collect()


def _write_counter_inputs(work: Path, events: int, users: int) -> tuple[DataFrame, DataFrame]:
    """Events and queries, with the columns of `count_events`."""
    log = generate_events(events, users)
    keys = {
        "key_user": log.user,
        "key_item": log.item.astype(np.int64),
        "key_surface": log.surface.astype(np.int64),
        "key_category": log.item.astype(np.int64) % 50,
    }
    rows = pa.table({"visible_ts": log.seconds, "type": log.type, **keys})
    pq.write_table(rows, work / "counted.parquet")
    impressions = rows.filter(pa.array(log.type == IMPRESSION))
    queries = impressions.rename_columns({"visible_ts": "as_of_ts"}).drop(["type"])
    ids = pa.array(np.arange(len(queries)).astype(str))
    pq.write_table(queries.append_column("impression_id", ids), work / "queries.parquet")
    read = SparkSession.active().read
    return read.parquet(str(work / "counted.parquet")), read.parquet(str(work / "queries.parquet"))


def range_windows(spec: DataSpec, events: DataFrame, impressions: DataFrame) -> DataFrame:
    """Counts by `RANGE BETWEEN … PRECEDING AND 1 PRECEDING`, all keys in one plan."""
    query = impressions.withColumnRenamed("as_of_ts", "visible_ts").withColumn("type", F.lit(0))
    both = events.withColumn("impression_id", F.lit(None).cast("string")).unionByName(query)
    columns = []
    for counter in spec.counters.columns:
        key = Window.partitionBy(*[F.col(f"key_{part}") for part in counter.key])
        assert counter.period, "these are counts only"
        window = key.orderBy("visible_ts").rangeBetween(-counter.period, -1)
        count = _count_in_window(spec.event_codes[counter.event], window)
        columns.append(count.alias(counter.column))
    return both.select("impression_id", *columns).filter("impression_id IS NOT NULL")


def _count_in_window(event_code: int, window: WindowSpec) -> Column:
    is_counted = F.when(F.col("type") == event_code, 1)
    return F.coalesce(F.sum(is_counted).over(window), F.lit(0))
