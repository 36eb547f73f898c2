"""Peak memory of a training process that reads the histories of many users, bucket by bucket."""

import multiprocessing
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import SIMULATOR_SPEC, BenchmarkResult
from benchmarks.synthetic_data import DAYS, START, generate_events
from benchmarks.system.history_storage import sort_by_user
from etl.spec import load_spec
from etl.spec.units import DAY
from etl.tables import arrow, schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake, arrow_schema
from features.history.build import pack_user_days

EVENTS, USERS, BUCKETS = 20_000_000, 200_000, 16
HISTORY_LENGTH, BATCH_USERS, PASSES = 2048, 512, 2
END = START + DAYS * DAY
UNBOUNDED = 1 << 60


def measure_reader_memory(result: BenchmarkResult, work: Path) -> None:
    """`reader_memory_mb`: the peak while the histories of 20 M events are read twice.

    Beside it, a reader that keeps all histories.
    """
    lake = Lake(
        str(work / "reader-lake"), load_spec(SIMULATOR_SPEC).model_copy(update={"buckets": BUCKETS})
    )
    for bucket in range(BUCKETS):
        write_bucket(lake, bucket)
    context = multiprocessing.get_context("spawn")
    peaks = []
    for max_bytes in (None, UNBOUNDED):
        with context.Pool(1) as pool:
            peaks.append(pool.apply(peak_memory_mb, (lake, max_bytes)))
    result.record("reader_memory_mb", peaks[0], "")
    result.rows.append(
        (
            f"read histories of {EVENTS / 1e6:.0f} M events twice",
            f"{peaks[0]:,.0f} MB at most",
            f"{peaks[1]:,.0f} MB if all are kept",
            f"{peaks[0] / peaks[1]:.2f}",
            "<= 1,500 MB",
        )
    )


def write_bucket(lake: Lake, bucket: int) -> None:
    """Write the packed histories of the users of one bucket."""
    log = generate_events(EVENTS // BUCKETS, USERS // BUCKETS, seed=bucket)
    events = log.to_arrow().take(pa.array(sort_by_user(log)))
    names = np.char.add(f"{bucket}-", events["user_id"].to_numpy().astype(str))
    user = events.column_names.index("user_id")
    rows = pack_user_days(events.set_column(user, "user_id", pa.array(names)))
    constants = {
        "chunk": pa.nulls(len(rows), pa.int32()),
        "dropped": pa.array(np.zeros(len(rows), np.int32)),
        "bucket": pa.array(np.full(len(rows), bucket, np.int32)),
    }
    for name, column in constants.items():
        rows = rows.append_column(name, column)
    schema = schemas.history(lake.spec)
    rows = rows.select(list(schema.columns)).cast(arrow_schema(schema))
    arrow.replace_rows(lake, schema, rows, f"bucket = {bucket}", {})


def peak_memory_mb(lake: Lake, max_bytes: int | None) -> float:
    """The peak of this process while it reads all histories; None is the bound of readers."""
    from training.data.histories import HistoryCache, NeededEvents
    from training.data.reader import MAX_HISTORY_BYTES

    table = snapshot(lake, schemas.history(lake.spec))
    histories = HistoryCache(table, (), max_bytes or MAX_HISTORY_BYTES)
    for _ in range(PASSES):
        for bucket in range(BUCKETS):
            lengths = table.read(["user_id", "events"], bucket=bucket).group_by("user_id")
            users = lengths.aggregate([("events", "sum")])
            ids, length = users["user_id"].combine_chunks(), users["events_sum"].to_numpy()
            needed = NeededEvents.of_requests(ids, length, HISTORY_LENGTH)
            stored = histories.load(bucket, needed)
            position, as_of = stored.user_positions(ids), np.full(len(ids), END)
            for start in range(0, len(ids), BATCH_USERS):
                batch = slice(start, start + BATCH_USERS)
                stored.slices(position[batch], as_of[batch], length[batch], HISTORY_LENGTH)
    status = Path("/proc/self/status").read_text()  # ru_maxrss is at least that of the parent
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024
