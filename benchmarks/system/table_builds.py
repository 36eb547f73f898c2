"""Speed of building packed histories, compared with a plain sort of the same rows."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import (
    BenchmarkResult,
    interleaved_median_seconds,
)
from benchmarks.synthetic_data import generate_events
from features.history.build import pack_events

ORDER = ("user_id", "visible_ts", "event_ts", "event_id")


def measure_history_build(
    result: BenchmarkResult, work: Path, millions: int = 10, users: int = 100_000
) -> None:
    """`history_build_share` (relative to a plain sort) and `history_growth` (large over small)."""
    few, events, many = (
        _read_events(work, size, users * size // millions) for size in (1, millions, 3 * millions)
    )
    for warm_up in (shuffle_sort_write, write_packed_histories):
        warm_up(few, work)
    seconds = interleaved_median_seconds(
        {
            "plain": lambda: shuffle_sort_write(events, work),
            "packed": lambda: write_packed_histories(events, work),
        },
        5,
    )
    packed, plain = (millions * 1e6 / seconds[name] for name in ("packed", "plain"))
    seconds = interleaved_median_seconds(
        {
            "few": lambda: write_packed_histories(few, work),
            "many": lambda: write_packed_histories(many, work),
        },
        2,  # in opposite orders
    )
    small, large = 1e6 / seconds["few"], 3e6 * millions / seconds["many"]
    result.record("history_build_share", packed / plain, "")
    result.record("history_growth", large / small, "")
    result.rows.append(
        (
            f"build histories, {millions} M events",
            f"{packed:,.0f} events/s",
            f"{plain:,.0f} shuffle, sort, write",
            f"{packed / plain:.2f}",
            ">= 0.75",
        )
    )
    result.rows.append(
        (
            f"… {3 * millions} M events against 1 M",
            f"{large:,.0f} events/s",
            f"{small:,.0f}",
            f"{large / small:.2f}",
            ">= 0.9",
        )
    )


def _read_events(work: Path, millions: int, users: int) -> DataFrame:
    path = work / f"events-{millions}.parquet"
    if not path.exists():
        pq.write_table(
            generate_events(millions * 1_000_000, users).to_arrow(), path, row_group_size=500_000
        )
    return SparkSession.active().read.parquet(str(path))


def shuffle_sort_write(events: DataFrame, work: Path) -> None:
    """The minimal cost of a table ordered by user: shuffle, sort and write its rows."""
    _overwrite(events.repartition("user_id").sortWithinPartitions(*ORDER), work / "plain")


def write_packed_histories(events: DataFrame, work: Path) -> None:
    """Pack the same rows as the `history` table does, and write them."""
    _overwrite(pack_events(events), work / "packed")


def _overwrite(rows: DataFrame, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    rows.write.parquet(str(path))
