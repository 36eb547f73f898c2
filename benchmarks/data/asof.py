"""The newest earlier row of a user for each impression: window, range joins, DuckDB, Polars."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.clock import in_turn
from benchmarks.data.world import make_world
from benchmarks.result import Result
from features.as_of_join import last_before

VALUES = ("event", "item", "type", "dwell_ms")
Answer = tuple[int, ...]


def measure(result: Result, work: Path, events: int = 2_000_000, users: int = 20_000) -> None:
    """`asof_ratio`, against the range join in one pass; and against other ways of the same."""
    _in_spark(work, events // 10, users // 10, 1)  # warm
    seconds, answer = _in_spark(work, events, users, 2)
    rivals = _in_one_process(work, answer)
    in_turn(rivals, 1)
    seconds |= in_turn(rivals, 3)
    ours = seconds.pop("window")
    result.take("asof_ratio", seconds["range join"] / ours, "")
    for name, taken in seconds.items():
        if name != "range join":
            result.take(f"asof_{name.lower().replace(' ', '_')}_ratio", taken / ours, "")
    told = "; ".join(f"{taken:.1f} s {name}" for name, taken in seconds.items())
    ratio = f"{seconds['range join'] / ours:.1f}"
    result.rows.append(("as-of join of 4 columns", f"{ours:.1f} s", told, ratio, ">= 7"))


def _in_spark(work: Path, events: int, users: int, rounds: int) -> tuple[dict[str, float], Answer]:
    """Median seconds of each way, and the one answer of all."""
    asked, rows = _stored(work, events, users)
    answers: dict[str, Answer] = {}

    def sums_of(name: str, way: Callable[[DataFrame, DataFrame], DataFrame]) -> None:
        sums = way(asked, rows).agg(*[F.sum(f"row.{value}") for value in VALUES]).first()
        assert sums is not None
        answers[name] = tuple(sums)

    seconds = in_turn({name: partial(sums_of, name, way) for name, way in WAYS.items()}, rounds)
    assert len(set(answers.values())) == 1, answers
    return seconds, answers["window"]


def _stored(work: Path, events: int, users: int) -> tuple[DataFrame, DataFrame]:
    world = make_world(events, users)
    shown = world.type == 1
    # one row a user and second: with ties there would be several right answers
    _, first = np.unique(np.stack((world.user, world.seconds)), axis=1, return_index=True)
    rows = np.intersect1d(np.flatnonzero(~shown), first)
    asked = pa.table({
        "user": world.user[shown], "ts": world.seconds[shown],
        "impression_id": np.arange(shown.sum()).astype(str),
    })  # fmt: skip
    pq.write_table(asked, work / "asked.parquet")
    told = pa.table({
        "user": world.user[rows], "ts": world.seconds[rows], "event": rows,
        "item": world.item[rows].astype(np.int64), "type": world.type[rows].astype(np.int64),
        "dwell_ms": np.nan_to_num(world.dwell_ms[rows]).astype(np.int64),
    })  # fmt: skip
    pq.write_table(told, work / "told.parquet")
    read = SparkSession.active().read
    told_rows = read.parquet(str(work / "told.parquet"))
    return read.parquet(str(work / "asked.parquet")), told_rows.select(
        "user", "ts", F.struct(*VALUES).alias("row")
    )


def range_join(asked: DataFrame, rows: DataFrame) -> DataFrame:
    """All earlier rows of the key; the newest of them in one pass."""
    newest = F.max_by(F.col("r.row"), F.col("r.ts")).alias("row")
    return _pairs(asked, rows).groupBy("impression_id").agg(newest)


def two_joins(asked: DataFrame, rows: DataFrame) -> DataFrame:
    """Only the newest time by a range join, then its row by another join; times must be unique."""
    newest = _pairs(asked, rows).groupBy("impression_id", "a.user").agg(F.max("r.ts").alias("ts"))
    return newest.join(rows, ["user", "ts"], "left")


def _pairs(asked: DataFrame, rows: DataFrame) -> DataFrame:
    a, r = asked.alias("a"), rows.alias("r")
    earlier = (F.col("a.user") == F.col("r.user")) & (F.col("r.ts") < F.col("a.ts"))
    return a.join(r, earlier, "left")


WAYS: dict[str, Callable[[DataFrame, DataFrame], DataFrame]] = {
    "window": partial(last_before, key="user", ts="ts"),
    "range join": range_join,
    "two joins": two_joins,
}


def _in_one_process(work: Path, answer: Answer) -> dict[str, Callable[[], None]]:
    """DuckDB's and Polars' own as-of joins of the same files, on as many cores."""
    import duckdb
    import polars as pl

    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    for name in ("asked", "told"):
        connection.read_parquet(str(work / f"{name}.parquet")).create_view(name)
    query = """SELECT sum(event), sum(item), sum(type), sum(dwell_ms) FROM asked
        ASOF LEFT JOIN told ON asked.user = told.user AND asked.ts > told.ts"""

    def duck() -> None:
        assert connection.execute(query).fetchone() == answer

    def polars() -> None:
        asked, told = (pl.scan_parquet(work / f"{n}.parquet").sort("ts") for n in ("asked", "told"))
        found = asked.join_asof(told, on="ts", by="user", allow_exact_matches=False)
        assert found.select(pl.sum(*VALUES).cast(pl.Int64)).collect().row(0) == answer

    return {"DuckDB": duck, "Polars": polars}
