"""The newest earlier row of a user for each impression: window, range join, DuckDB, Polars."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.data.clock import in_turn
from benchmarks.data.world import make_world
from benchmarks.result import Result
from features.as_of_join import last_before


def measure(result: Result, work: Path, events: int = 2_000_000, users: int = 20_000) -> None:
    """`asof_ratio`, and the same with DuckDB."""
    asked, rows = _stored(work, events, users)
    answers: dict[str, int] = {}

    def sum_of(name: str, found: DataFrame) -> None:
        total = found.agg(F.sum("event").alias("sum"), F.count("*").alias("n")).first()
        assert total is not None
        answers[name] = total["sum"]

    rivals: dict[str, Callable[[], None]] = {
        "window": lambda: sum_of("window", last_before(asked, rows, "user", "ts")),
        "range join": lambda: sum_of("range join", range_join(asked, rows)),
    }
    seconds = in_turn(rivals, 2)
    assert answers["window"] == answers["range join"], answers
    peers = in_turn(_in_one_process(work, answers["window"]), 3)
    ours = seconds["window"]
    ratio = seconds["range join"] / ours
    result.take("asof_ratio", ratio, "")
    told = "".join(f"; {taken:.2f} s {name}, one process" for name, taken in peers.items())
    for name, taken in peers.items():
        result.take(f"asof_{name.lower()}_ratio", taken / ours, "")
    other = f"{seconds['range join']:.1f} s range join, as Feast's Spark store does it{told}"
    result.rows.append(("as-of join", f"{ours:.1f} s", other, f"{ratio:.1f}", ">= 7"))


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
    told = pa.table({"user": world.user[rows], "ts": world.seconds[rows], "event": rows})
    pq.write_table(told, work / "told.parquet")
    read = SparkSession.active().read
    return read.parquet(str(work / "asked.parquet")), read.parquet(str(work / "told.parquet"))


def range_join(asked: DataFrame, rows: DataFrame) -> DataFrame:
    """As feature stores do it: all earlier rows of the key, then the newest."""
    a, r = asked.alias("a"), rows.alias("r")
    earlier = (F.col("a.user") == F.col("r.user")) & (F.col("r.ts") < F.col("a.ts"))
    pairs = a.join(r, earlier, "left")
    newest = F.max_by(F.col("r.event"), F.col("r.ts")).alias("event")
    return pairs.groupBy("impression_id").agg(newest)


def _in_one_process(work: Path, answer: int) -> dict[str, Callable[[], None]]:
    """DuckDB's and Polars' own as-of joins of the same files, on as many cores."""
    import duckdb
    import polars as pl

    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    for name in ("asked", "told"):
        connection.read_parquet(str(work / f"{name}.parquet")).create_view(name)
    query = """SELECT sum(event) FROM asked
        ASOF LEFT JOIN told ON asked.user = told.user AND asked.ts > told.ts"""

    def duck() -> None:
        row = connection.execute(query).fetchone()
        assert row and row[0] == answer

    def polars() -> None:
        asked, told = (pl.scan_parquet(work / f"{n}.parquet").sort("ts") for n in ("asked", "told"))
        found = asked.join_asof(told, on="ts", by="user", allow_exact_matches=False)
        assert found.select(pl.sum("event")).collect().item() == answer

    return {"DuckDB": duck, "Polars": polars}
