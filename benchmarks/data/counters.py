"""Point-in-time counters beside Spark's range windows, with the same answers."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession, Window, WindowSpec
from pyspark.sql import functions as F

from benchmarks.clock import in_turn
from benchmarks.data.world import make_world
from benchmarks.result import Result
from etl.spec import DataSpec, load_spec
from etl.spec.model import Counters
from etl.tables.contracts import counter_columns
from features.counters import count

SPEC = Path(__file__).parents[2] / "conf" / "specs" / "simulator.yaml"
KEYS = (("user",), ("item",), ("user", "category"), ("surface",))
WINDOWS = ("1h", "1d", "7d", "30d")
EVENTS = ("ad_impression", "ad_long_view", "ad_click", "conversion")


def measure(result: Result, work: Path, events: int = 30_000, users: int = 500) -> None:
    """`counter_ratio`."""
    spec = load_spec(SPEC)
    counters = Counters.model_validate({"windows": WINDOWS, "events": EVENTS, "keys": KEYS})
    spec = spec.model_copy(update={"counters": counters})
    answers: dict[str, list[int]] = {}

    def sums_of(name: str, found: DataFrame) -> None:
        columns = counter_columns(spec)
        row = found.agg(*[F.sum(column).alias(column) for column in columns]).first()
        assert row is not None
        answers[name] = [row[column] for column in columns]

    def seconds_of(events: int, users: int, rounds: int) -> dict[str, float]:
        happened, asked = _stored(work, events, users)
        rivals = {
            "ours": lambda: sums_of("ours", count(spec, happened, asked)),
            "windows": lambda: sums_of("windows", range_windows(spec, happened, asked)),
        }
        return in_turn(rivals, rounds)

    seconds_of(events // 10, users // 10, 1)  # warm
    seconds = seconds_of(events, users, 2)
    assert answers["ours"] == answers["windows"]
    ratio = seconds["windows"] / seconds["ours"]
    result.take("counter_ratio", ratio, "")
    what = f"{len(answers['ours'])} counters, {events:,} events, each seventh an impression"
    result.rows.append(
        (what, f"{seconds['ours']:.1f} s", f"{seconds['windows']:.1f} s range windows",
         f"{ratio:.1f}", ">= 3")
    )  # fmt: skip


def _stored(work: Path, events: int, users: int) -> tuple[DataFrame, DataFrame]:
    world = make_world(events, users)
    keys = {
        "k_user": world.user,
        "k_item": world.item.astype(np.int64),
        "k_surface": world.surface.astype(np.int64),
        "k_category": world.item.astype(np.int64) % 50,
    }
    rows = pa.table({"visible_ts": world.seconds, "type": world.type, **keys})
    pq.write_table(rows, work / "happened.parquet")
    shown = pa.array(world.type == 1)
    asked = rows.filter(shown).rename_columns({"visible_ts": "as_of_ts"}).drop(["type"])
    ids = pa.array(np.arange(len(asked)).astype(str))
    pq.write_table(asked.append_column("impression_id", ids), work / "counted.parquet")
    read = SparkSession.active().read
    return read.parquet(str(work / "happened.parquet")), read.parquet(str(work / "counted.parquet"))


def range_windows(spec: DataSpec, happened: DataFrame, asked: DataFrame) -> DataFrame:
    """Counts by `RANGE BETWEEN … PRECEDING AND 1 PRECEDING`, all keys in one plan."""
    query = asked.withColumnRenamed("as_of_ts", "visible_ts").withColumn("type", F.lit(0))
    both = happened.withColumn("impression_id", F.lit(None).cast("string")).unionByName(query)
    names, columns = iter(counter_columns(spec)), {}
    for key in spec.counters.keys:
        by = [F.col(f"k_{part}") for part in key]
        for window in spec.counters.windows:
            span = Window.partitionBy(*by).orderBy("visible_ts").rangeBetween(-window, -1)
            for event in spec.counters.events:
                columns[next(names)] = _count(spec.event_codes[event], span)
    return both.select("impression_id", *[c.alias(n) for n, c in columns.items()]).filter(
        "impression_id IS NOT NULL"
    )


def _count(code: int, span: WindowSpec) -> Column:
    return F.coalesce(F.sum(F.when(F.col("type") == code, 1)).over(span), F.lit(0))
