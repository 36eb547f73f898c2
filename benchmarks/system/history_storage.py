"""Packed histories and pointers, compared with event lists copied into every example.

Measures their size on disk, and the CPU time to read a user's last events for each example.
"""

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import BenchmarkResult, interleaved_median_seconds
from benchmarks.synthetic_data import DAYS, IMPRESSION, START, SyntheticEvents, generate_events
from etl.array_types import Int64
from etl.spec.units import DAY
from features.history.build import pack_user_days
from features.history.compact import compact_users
from features.ragged import concat_ranges
from training.data.histories import histories_from_table

MAX_LIST_EVENTS = 1000  # maximum length of a copied list
ZSTD = {"compression": "zstd", "compression_level": 3}
BATCH_ROWS = 1024
KEY_COUNT = 11
ROUNDS = 3
EVENT_COLUMNS = ("visible_ts", "item", "surface", "type", "dwell")


def measure_storage(
    result: BenchmarkResult, work: Path, events: int = 2_000_000, users: int = 1_000
) -> None:
    """`bytes_per_event`, and `storage_ratio` to copied lists in the better of two orders.

    In order of users the overlapping lists of a user are compressed together, in order of time not.
    """
    log = generate_events(events, users)
    by_user = sort_by_user(log)
    daily = pack_user_days(log.to_arrow().take(pa.array(by_user)))
    items = _write(_item_index(log), work / "items.parquet")
    daily_size = _write(daily, work / "daily.parquet") + items
    compacted_size = _write(compact(daily), work / "compacted.parquet") + items
    pointers = _write(example_pointers(log, by_user), work / "pointers.parquet")
    of_user = by_user[log.type[by_user] == IMPRESSION]
    by_order = {
        "time": write_copied_lists(log, by_user, impressions_of(log), work / "lists.parquet"),
        "user": write_copied_lists(log, by_user, of_user, work / "lists.parquet"),
    }
    smaller = min(by_order, key=lambda order: by_order[order])
    total = compacted_size + pointers
    per_event, per_event_by_day = compacted_size / events, daily_size / events
    result.record("bytes_per_event", per_event, "")
    result.record("bytes_per_event_by_day", per_event_by_day, "")
    result.record("storage_ratio", by_order[smaller] / total, "")
    result.record("storage_ratio_in_order_of_time", by_order["time"] / total, "")
    before_compaction = f"{per_event_by_day:.2f} B before compaction"
    result.rows.append(("a stored event", f"{per_event:.2f} B", before_compaction, "", "<= 6.0"))
    result.rows.append(
        (
            "histories and examples",
            f"{total / 1e6:.1f} MB",
            "; ".join(
                f"{size / 1e6:,.0f} MB of lists in every example, in order of {order}"
                for order, size in by_order.items()
            ),
            f"{by_order[smaller] / total:.1f}",
            ">= 20",
        )
    )


def sort_by_user(log: SyntheticEvents) -> Int64:
    """Positions of the events in order of user and time."""
    return np.lexsort((np.arange(len(log)), log.user))


def compact(daily: pa.Table) -> pa.Table:
    """Packed rows per user and day as compacted ones, with all of their events."""
    rows = daily.append_column("dropped", pa.array(np.zeros(len(daily), np.int32)))
    return compact_users(rows.drop(["day"]).combine_chunks(), 10**9, 0)


def _write(table: pa.Table, path: Path) -> int:
    pq.write_table(table, path, **ZSTD)
    return path.stat().st_size


def _item_index(log: SyntheticEvents) -> pa.Table:
    """Each item's 40-bit id and its index."""
    index = np.unique(log.item)
    ids = np.random.default_rng(1).integers(0, 2**40, len(index))
    return pa.table({"item_id": np.char.mod("%x", ids), "item_index": index})


def example_pointers(log: SyntheticEvents, by_user: Int64) -> pa.Table:
    """The pointers of examples into histories: user, as-of second, length and version."""
    begin, end = history_bounds(log, by_user)
    impressions = impressions_of(log)
    return pa.table(
        {
            "user_id": np.char.add("u", log.user[impressions].astype(str)),
            "as_of_ts": log.seconds[impressions],
            "history_length": (end - begin)[impressions].astype(np.int32),
            "history_version": np.zeros(len(impressions), np.int64),
        }
    )


def history_bounds(log: SyntheticEvents, by_user: Int64) -> tuple[Int64, Int64]:
    """Start and end of each event's history among the events by user."""
    span = 2 * DAYS * DAY
    position = log.user * span + log.seconds - START
    ordered = position[by_user]
    first = np.searchsorted(ordered, log.user * span)
    return first, np.searchsorted(ordered, position)


def impressions_of(log: SyntheticEvents) -> Int64:
    """Positions of the impressions, in order of time."""
    return np.flatnonzero(log.type == IMPRESSION)


def write_copied_lists(
    log: SyntheticEvents,
    by_user: Int64,
    impressions: Int64,
    path: Path,
    rows_per_group: int = 20_000,
) -> int:
    """Write each impression with a copy of its user's last events; returns the file's size.

    Rows are in the order of `impressions`, positions in the log.
    """
    begin, end = history_bounds(log, by_user)
    columns: dict[str, npt.NDArray[np.generic]] = {
        "ts": log.seconds[by_user],
        "item": log.item[by_user],
        "surface": log.surface[by_user],
        "type": log.type[by_user],
        "dwell": np.nan_to_num(log.dwell_ms[by_user]).astype(np.float32),
    }
    writer = None
    for start in range(0, len(impressions), rows_per_group):
        rows = impressions[start : start + rows_per_group]
        lengths = np.minimum((end - begin)[rows], MAX_LIST_EVENTS)
        events = concat_ranges(end[rows] - lengths, end[rows])
        offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
        lists = {
            name: pa.ListArray.from_arrays(offsets, pa.array(values[events]))
            for name, values in columns.items()
        }
        table = pa.table({"user": log.user[rows], "as_of": log.seconds[rows], **lists})
        writer = writer or pq.ParquetWriter(path, table.schema, **ZSTD)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return path.stat().st_size


def measure_reader(
    result: BenchmarkResult, work: Path, events: int = 2_000_000, users: int = 20_000
) -> None:
    """`reader_samples_per_cpu_s`, `reader_ratio` and `tensor_samples_per_cpu_s`."""
    log = generate_events(events, users)
    by_user = sort_by_user(log)
    packed, pointers, lists = (work / f"{n}.parquet" for n in ("packed", "pointers", "copied"))
    write_copied_lists(log, by_user, impressions_of(log), lists)
    pq.write_table(example_pointers(log, by_user), pointers, compression="zstd")
    daily = pack_user_days(log.to_arrow().take(pa.array(by_user)))
    pq.write_table(compact(daily), packed, compression="zstd")
    impressions = int(np.sum(log.type == IMPRESSION))

    variants = {
        "pointers": lambda: read_pointer_join(packed, pointers),
        "lists": lambda: read_copied_lists(lists),
        "tensors": lambda: build_jagged_tensors(impressions),
    }
    seconds = interleaved_median_seconds(variants, ROUNDS, time.process_time)
    speed = {name: impressions / duration for name, duration in seconds.items()}
    ratio = speed["pointers"] / speed["lists"]
    result.record("reader_samples_per_cpu_s", speed["pointers"], "")
    result.record("reader_ratio", ratio, "")
    result.record("tensor_samples_per_cpu_s", speed["tensors"], "")
    result.rows.append(
        (
            "read 5 columns, 1 thread",
            f"{speed['pointers']:,.0f} samples/cpu-s",
            f"{speed['lists']:,.0f} from lists in every example",
            f"{ratio:.1f}",
            ">= 400,000; >= 5",
        )
    )
    tensor_speed = f"{speed['tensors']:,.0f} samples/cpu-s"
    result.rows.append((f"tensors of {KEY_COUNT} keys", tensor_speed, "", "", ">= 1,000,000"))


def read_pointer_join(packed: Path, examples: Path) -> int:
    """Slice packed histories for all examples in random order; returns the values read."""
    table = pq.read_table(packed, use_threads=False)
    days = pa.array(np.zeros(len(table), np.int32), pa.int32()).cast(pa.date32())
    histories = histories_from_table(table.append_column("day", days))
    rows = pq.read_table(examples, use_threads=False)
    user = histories.user_positions(rows["user_id"].combine_chunks())
    as_of, length = rows["as_of_ts"].to_numpy(), rows["history_length"].to_numpy().astype(np.int64)
    order, values_read = np.random.default_rng(0).permutation(len(rows)), 0
    for start in range(0, len(order), BATCH_ROWS):
        batch = order[start : start + BATCH_ROWS]
        slices = histories.slices(user[batch], as_of[batch], length[batch], MAX_LIST_EVENTS)
        columns = [np.ascontiguousarray(slices.events[name]) for name in EVENT_COLUMNS]
        values_read += sum(len(column) for column in columns)
    return values_read


def read_copied_lists(lists: Path) -> int:
    """Read all lists in random order within a row group; returns the values read."""
    file, values_read = pq.ParquetFile(lists), 0
    rng = np.random.default_rng(0)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False).combine_chunks()
        columns = [table[n].combine_chunks() for n in ("ts", "item", "surface", "type", "dwell")]
        offsets = columns[0].offsets.to_numpy()
        flat = [column.flatten().to_numpy() for column in columns]
        order = rng.permutation(len(table))
        for start in range(0, len(order), BATCH_ROWS):
            rows = order[start : start + BATCH_ROWS]
            positions = concat_ranges(offsets[rows], offsets[rows + 1])
            values_read += sum(len(values[positions]) for values in flat)
    return values_read


def build_jagged_tensors(rows: int) -> int:
    """Build TorchRec's input of all keys, batch by batch; returns the number of ids."""
    import torch
    from torchrec import KeyedJaggedTensor

    rng = np.random.default_rng(0)
    columns = {f"key_{i}": rng.integers(0, 1000, rows) for i in range(KEY_COUNT)}
    order, num_ids = rng.permutation(rows), 0
    for start in range(0, rows, BATCH_ROWS):
        batch = order[start : start + BATCH_ROWS]
        values = torch.from_numpy(np.concatenate([c[batch] for c in columns.values()]))
        lengths = torch.full((KEY_COUNT,), len(batch), dtype=torch.int64)
        num_ids += len(KeyedJaggedTensor(list(columns), values, lengths=lengths).values())
    return num_ids
