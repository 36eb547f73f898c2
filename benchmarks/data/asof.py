"""The newest earlier row of a user for each impression: window, range join, DuckDB."""

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
    duck = duckdb_seconds(work, answers)
    ratio = seconds["range join"] / seconds["window"]
    result.take("asof_ratio", ratio, "")
    result.take("asof_duckdb_ratio", duck and duck / seconds["window"], "DuckDB is not installed")
    other = f"{seconds['range join']:.1f} s range join"
    other += f"; {duck:.2f} s DuckDB, one process" if duck else ""
    result.rows.append(("as-of join", f"{seconds['window']:.1f} s", other, f"{ratio:.1f}", ">= 7"))


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


def duckdb_seconds(work: Path, answers: dict[str, int]) -> float | None:
    """Seconds of DuckDB's ASOF JOIN on the same files; None where it is not installed."""
    try:
        import duckdb
    except ImportError:
        return None
    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    for name in ("asked", "told"):
        connection.read_parquet(str(work / f"{name}.parquet")).create_view(name)
    query = """SELECT sum(event) FROM asked
        ASOF LEFT JOIN told ON asked.user = told.user AND asked.ts > told.ts"""

    def run() -> None:
        row = connection.execute(query).fetchone()
        assert row and row[0] == answers["window"]

    return in_turn({"duckdb": run}, 3)["duckdb"]
