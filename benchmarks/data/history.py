"""Building packed histories beside a plain shuffle, sort and write of the same rows."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.clock import in_turn
from benchmarks.data.world import make_world
from benchmarks.result import Result
from features.history.build import pack_rows

ORDER = ("user_id", "visible_ts", "event_ts", "event_id")


def measure(result: Result, work: Path, millions: int = 10, users: int = 100_000) -> None:
    """`history_build_share` and `history_growth`."""
    few, events, many = (
        _stored(work, size, users * size // millions) for size in (1, millions, 3 * millions)
    )
    for warm_up in (plain, packed):
        warm_up(few, work)
    seconds = in_turn(
        {"plain": lambda: plain(events, work), "ours": lambda: packed(events, work)}, 5
    )
    ours, other = (millions * 1e6 / seconds[name] for name in ("ours", "plain"))
    seconds = in_turn({"few": lambda: packed(few, work), "many": lambda: packed(many, work)}, 1)
    slow, fast = 1e6 / seconds["few"], 3e6 * millions / seconds["many"]
    result.take("history_build_share", ours / other, "")
    result.take("history_growth", fast / slow, "")
    result.rows.append(
        (
            f"build histories, {millions} M events",
            f"{ours:,.0f} events/s",
            f"{other:,.0f} shuffle, sort, write",
            f"{ours / other:.2f}",
            ">= 0.75",
        )
    )
    result.rows.append(
        (
            f"… {3 * millions} M events against 1 M",
            f"{fast:,.0f} events/s",
            f"{slow:,.0f}",
            f"{fast / slow:.2f}",
            ">= 0.9",
        )
    )


def _stored(work: Path, millions: int, users: int) -> DataFrame:
    path = work / f"events-{millions}.parquet"
    if not path.exists():
        pq.write_table(
            make_world(millions * 1_000_000, users).table(), path, row_group_size=500_000
        )
    return SparkSession.active().read.parquet(str(path))


def plain(events: DataFrame, work: Path) -> None:
    """What any table by user costs: rows to their partition, in order, written."""
    _write(events.repartition("user_id").sortWithinPartitions(*ORDER), work / "plain")


def packed(events: DataFrame, work: Path) -> None:
    """The history table's way from the same rows."""
    _write(pack_rows(events), work / "packed")


def _write(rows: DataFrame, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    rows.write.parquet(str(to))
