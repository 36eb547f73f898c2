"""Bytes of a stored event, and of all examples, beside lists copied into every example."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.data.world import DAYS, START, World, make_world
from benchmarks.result import Result
from features.history.build import pack_users
from features.history.compact import compact_users
from features.ranges import ranges

LONGEST = 1000  # events of a copied list
ZSTD = {"compression": "zstd", "compression_level": 3}
Int64 = npt.NDArray[np.int64]


def measure(result: Result, work: Path, events: int = 2_000_000, users: int = 1_000) -> None:
    """`bytes_per_event` and `storage_ratio`."""
    world = make_world(events, users)
    by_user = np.lexsort((np.arange(len(world)), world.user))
    daily = pack_users(world.table().take(pa.array(by_user)))
    once = daily.append_column("dropped", pa.array(np.zeros(len(daily), np.int32)))
    compacted = compact_users(once.drop(["day"]).combine_chunks(), 10**9, 0)
    sizes = {
        "daily": _write(daily, work / "daily.parquet"),
        "compacted": _write(compacted, work / "compacted.parquet"),
        "items": _write(_item_index(world), work / "items.parquet"),
        "pointers": _write(pointers(world, by_user), work / "pointers.parquet"),
        "lists": write_lists(world, by_user, work / "lists.parquet"),
    }
    each = (sizes["compacted"] + sizes["items"]) / events
    ours = sizes["compacted"] + sizes["items"] + sizes["pointers"]
    result.take("bytes_per_event", each, "")
    result.take("bytes_per_event_by_day", (sizes["daily"] + sizes["items"]) / events, "")
    result.take("storage_ratio", sizes["lists"] / ours, "")
    daily_each = (sizes["daily"] + sizes["items"]) / events
    result.rows.append(
        ("a stored event", f"{each:.2f} B", f"{daily_each:.2f} B before compaction", "", "<= 6.0")
    )
    result.rows.append(
        (
            "histories and examples",
            f"{ours / 1e6:.1f} MB",
            f"{sizes['lists'] / 1e6:,.0f} MB of lists in every example",
            f"{sizes['lists'] / ours:.0f}",
            ">= 20",
        )
    )


def _write(table: pa.Table, path: Path) -> int:
    pq.write_table(table, path, **ZSTD)
    return path.stat().st_size


def _item_index(world: World) -> pa.Table:
    """Each item's 40-bit id and its index."""
    index = np.unique(world.item)
    ids = np.random.default_rng(1).integers(0, 2**40, len(index))
    return pa.table({"item_id": np.char.mod("%x", ids), "item_ix": index})


def pointers(world: World, by_user: Int64) -> pa.Table:
    """What examples hold of a history: user, as of, length, version."""
    begin, end = cuts(world, by_user)
    shown = np.flatnonzero(world.type == 1)
    return pa.table(
        {
            "user_id": np.char.add("u", world.user[shown].astype(str)),
            "as_of_ts": world.seconds[shown],
            "hist_len": (end - begin)[shown].astype(np.int32),
            "history_version": np.zeros(len(shown), np.int64),
        }
    )


def cuts(world: World, by_user: Int64) -> tuple[Int64, Int64]:
    """Where the history of each event begins and ends among the events by user."""
    moment = world.user * (2 * DAYS * 86_400) + world.seconds - START
    ordered = moment[by_user]
    first = np.searchsorted(ordered, world.user * (2 * DAYS * 86_400))
    return first, np.searchsorted(ordered, moment)


def write_lists(world: World, by_user: Int64, path: Path, rows: int = 20_000) -> int:
    """Each impression, in order of time, with a copy of its user's last events."""
    begin, end = cuts(world, by_user)
    shown = np.flatnonzero(world.type == 1)
    columns: dict[str, npt.NDArray[np.generic]] = {
        "ts": world.seconds[by_user],
        "item": world.item[by_user],
        "surface": world.surface[by_user],
        "type": world.type[by_user],
        "dwell": np.nan_to_num(world.dwell_ms[by_user]).astype(np.float32),
    }
    writer = None
    for at in range(0, len(shown), rows):
        part = shown[at : at + rows]
        lengths = np.minimum((end - begin)[part], LONGEST)
        stops = np.cumsum(lengths)
        events = ranges(end[part] - lengths, end[part])
        offsets = pa.array(np.append(0, stops).astype(np.int32))
        lists = {
            name: pa.ListArray.from_arrays(offsets, pa.array(values[events]))
            for name, values in columns.items()
        }
        table = pa.table({"user": world.user[part], "as_of": world.seconds[part], **lists})
        writer = writer or pq.ParquetWriter(path, table.schema, **ZSTD)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return path.stat().st_size
