"""Building packed histories beside a plain shuffle, sort and write of the same rows."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.data.clock import in_turn
from benchmarks.data.world import make_world
from benchmarks.result import Result
from features.history.build import pack_rows

ORDER = ("user_id", "visible_ts", "event_ts", "event_id")


def measure(result: Result, work: Path, millions: int = 10, users: int = 100_000) -> None:
    """`history_build_share` and `history_growth`."""
    rates = {}
    for size, rounds in ((millions, 5), (1, 3), (3 * millions, 1)):
        events = _stored(work, size * 1_000_000, users * size // millions)
        seconds = in_turn(_rivals(events, work), rounds)
        rates[size] = {name: size * 1e6 / taken for name, taken in seconds.items()}
    ours, plain = rates[millions]["packed"], rates[millions]["plain"]
    result.take("history_build_share", ours / plain, "")
    result.take("history_growth", rates[3 * millions]["packed"] / rates[1]["packed"], "")
    result.rows.append(
        (
            f"build histories, {millions} M events",
            f"{ours:,.0f} events/s",
            f"{plain:,.0f} shuffle, sort, write",
            f"{ours / plain:.2f}",
            ">= 0.75",
        )
    )
    result.rows.append(
        (
            f"… {3 * millions} M events against 1 M",
            f"{rates[3 * millions]['packed']:,.0f} events/s",
            f"{rates[1]['packed']:,.0f}",
            f"{rates[3 * millions]['packed'] / rates[1]['packed']:.2f}",
            ">= 0.9",
        )
    )


def _stored(work: Path, events: int, users: int) -> DataFrame:
    path = work / f"events-{events}.parquet"
    if not path.exists():
        pq.write_table(make_world(events, users).table(), path, row_group_size=500_000)
    return SparkSession.active().read.parquet(str(path))


def _rivals(events: DataFrame, work: Path) -> dict[str, Callable[[], None]]:
    def write(rows: DataFrame, name: str) -> None:
        shutil.rmtree(work / name, ignore_errors=True)
        rows.write.parquet(str(work / name))

    def plain() -> None:
        write(events.repartition("user_id").sortWithinPartitions(*ORDER), "plain")

    def packed() -> None:
        write(pack_rows(events), "packed")

    return {"plain": plain, "packed": packed}
