"""The reader's pointer join and tensors, beside reading lists that were copied into examples."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.clock import in_turn
from benchmarks.data.storage import LONGEST, pointers, write_lists
from benchmarks.data.world import make_world
from benchmarks.result import Result
from features.history.build import pack_users
from features.history.compact import compact_users
from features.ranges import ranges
from training.data.histories import unpacked

ROWS = 1024  # of a batch
KEYS = 11
ROUNDS = 3
FIVE = ("visible_ts", "item", "surface", "type", "dwell")


def measure(result: Result, work: Path, events: int = 2_000_000, users: int = 20_000) -> None:
    """`reader_samples_per_cpu_s`, `reader_ratio` and `tensor_samples_per_cpu_s`."""
    world = make_world(events, users)
    by_user = np.lexsort((np.arange(len(world)), world.user))
    packed, pointed, lists = (work / f"{n}.parquet" for n in ("packed", "pointed", "copied"))
    write_lists(world, by_user, lists)
    pq.write_table(pointers(world, by_user), pointed, compression="zstd")
    daily = pack_users(world.table().take(pa.array(by_user))).drop(["day"])
    daily = daily.append_column("dropped", pa.array(np.zeros(len(daily), np.int32)))
    pq.write_table(compact_users(daily.combine_chunks(), 10**9, 0), packed, compression="zstd")
    shown = int(np.sum(world.type == 1))

    rivals = {
        "ours": lambda: join(packed, pointed),
        "copied": lambda: read_copied(lists),
        "tensors": lambda: to_tensors(shown),
    }
    seconds = in_turn(rivals, ROUNDS, time.process_time)
    ours, theirs, tensors = (shown / taken for taken in seconds.values())
    result.take("reader_samples_per_cpu_s", ours, "")
    result.take("reader_ratio", ours / theirs, "")
    result.take("tensor_samples_per_cpu_s", tensors, "")
    what = f"{theirs:,.0f} from lists in every example"
    result.rows.append(
        ("read 5 columns, 1 thread", f"{ours:,.0f} samples/cpu-s", what, f"{ours / theirs:.1f}",
         ">= 400,000; >= 5")
    )  # fmt: skip
    result.rows.append(
        (f"tensors of {KEYS} keys", f"{tensors:,.0f} samples/cpu-s", "", "", ">= 1,000,000")
    )


def join(packed: Path, pointed: Path) -> int:
    """Read packed histories and slice them for all impressions in random order."""
    table = pq.read_table(packed, use_threads=False)
    days = pa.array(np.zeros(len(table), np.int32), pa.int32()).cast(pa.date32())
    histories = unpacked(table.append_column("day", days))
    rows = pq.read_table(pointed, use_threads=False)
    user = histories.find(rows["user_id"].combine_chunks())
    as_of, length = rows["as_of_ts"].to_numpy(), rows["hist_len"].to_numpy().astype(np.int64)
    order, read = np.random.default_rng(0).permutation(len(rows)), 0
    for at in range(0, len(order), ROWS):
        part = order[at : at + ROWS]
        cut = histories.slices(user[part], as_of[part], length[part], LONGEST)
        columns = [np.ascontiguousarray(cut.events[name]) for name in FIVE]
        read += sum(len(column) for column in columns)
    return read


def read_copied(lists: Path) -> int:
    """Read the same lists where each example has its own, in random order within a row group."""
    file, read = pq.ParquetFile(lists), 0
    rng = np.random.default_rng(0)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False).combine_chunks()
        columns = [table[n].combine_chunks() for n in ("ts", "item", "surface", "type", "dwell")]
        offsets = columns[0].offsets.to_numpy()
        flat = [column.flatten().to_numpy() for column in columns]
        order = rng.permutation(len(table))
        for at in range(0, len(order), ROWS):
            rows = order[at : at + ROWS]
            positions = ranges(offsets[rows], offsets[rows + 1])
            read += sum(len(values[positions]) for values in flat)
    return read


def to_tensors(rows: int) -> int:
    """Batches of ids of all keys to what torchrec looks up."""
    import torch
    from torchrec import KeyedJaggedTensor

    rng = np.random.default_rng(0)
    columns = {f"key_{i}": rng.integers(0, 1000, rows) for i in range(KEYS)}
    order, read = rng.permutation(rows), 0
    for at in range(0, rows, ROWS):
        part = order[at : at + ROWS]
        values = torch.from_numpy(np.concatenate([c[part] for c in columns.values()]))
        lengths = torch.full((KEYS,), len(part), dtype=torch.int64)
        read += len(KeyedJaggedTensor(list(columns), values, lengths=lengths).values())
    return read
