"""A day in refreshes of several hours against one daily run: equal tables, and how long each takes.

Part of `gemline bench freshness`.
"""

import gzip
import json
import time
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.pipelines import fresh_copy
from dags.steps import PipelinePaths
from etl.cli.runner import format_data_until
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.units import SECONDS
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from features.history.codec import join_byte_planes, plane_columns

TABLES = (
    "events", "excluded_events", "quarantine", "ingest_metrics", "attributes_user",
    "attributes_item", "attributes_user_snapshots", "attributes_item_snapshots", "impressions",
    "items", "item_versions", "first_item_versions", "history", "user_event_counts", "examples",
    "feature_statistics",
)  # fmt: skip
# Where a row was read and what it points to differ between lakes with equal rows.
PROVENANCE = ("source_file", "line", "history_version")
REFRESH_HOURS = (0, 6, 12, 18, 24)


@dataclass(frozen=True)
class HourlyRuns:
    """A copy of a lake that has all days before one, whose logs land in parts.

    `paths` are those of the copy; the raw folder links to all other files.
    """

    paths: PipelinePaths
    day: date

    @classmethod
    def copy_of(cls, paths: PipelinePaths, day: date, folder: Path) -> "HourlyRuns":
        """Copies the lake of a pipeline, which ends the day before, into an empty folder."""
        copy, raw = fresh_copy(paths, folder), Path(paths.raw)
        for file in raw.rglob("*"):
            if file.is_file() and f"day={day}" not in file.parent.name:
                link = folder / "raw" / file.relative_to(raw)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())
        return cls(replace(copy, raw=str(folder / "raw")), day)

    def refresh_all(self, raw: Path) -> list[float]:
        """Refreshes until the end of the day; minutes of each, in order."""
        from gemline import main

        spec, minutes = load_spec(self.paths.spec), []
        lines = _lines_by_hour(raw / "events" / f"day={self.day}")
        folder = Path(self.paths.raw, "events", f"day={self.day}")
        folder.mkdir(parents=True)
        for first, end in pairwise(REFRESH_HOURS):
            lines_until = [line for hour in range(first, end) for line in lines[hour]]
            content = gzip.compress("\n".join(lines_until).encode())
            (folder / f"part-{first:02}.json.gz").write_bytes(content)
            until = spec.day_start(self.day) + end * SECONDS["h"]
            start = time.perf_counter()
            flags = ["--raw", self.paths.raw, "--data-until", format_data_until(until)]
            if main(["refresh", *self.paths.cli_flags, *flags]):
                raise UserError("a refresh failed; the reason is above")
            minutes.append((time.perf_counter() - start) / 60)
        return minutes

    def different_tables(self, other: str) -> list[str]:
        """The tables whose rows differ from those of another lake of the same spec."""
        lakes = [Lake(root, load_spec(self.paths.spec)) for root in (self.paths.lake, other)]
        return [
            name
            for name in TABLES
            if not comparable(lakes[0], name).equals(comparable(lakes[1], name))
        ]


def _lines_by_hour(folder: Path) -> list[list[str]]:
    """The records of a simulated day by the hour of their ingest; invalid ones in the first."""
    by_hour: list[list[str]] = [[] for _ in range(24)]
    for file in sorted(folder.glob("*.json.gz")):
        for line in gzip.decompress(file.read_bytes()).decode().splitlines():
            by_hour[_ingest_hour(line)].append(line)
    return by_hour


def _ingest_hour(line: str) -> int:
    try:
        milliseconds = int(json.loads(line)["ingest_time"])
    except (ValueError, KeyError, TypeError):
        return 0
    return milliseconds // (1000 * SECONDS["h"]) % 24


def comparable(lake: Lake, name: str) -> pa.Table:
    """A table's rows in an order of their own, with item ids instead of indexes.

    Items that are first seen on a day get their indexes in the order in which refreshes see them.
    """
    table = snapshot(lake, schemas.table_schema(lake.spec, name)).read().combine_chunks()
    table = table.drop_columns([column for column in PROVENANCE if column in table.column_names])
    item_ids = _item_ids(lake)
    if name == "history":
        lengths = table["events"].to_numpy().astype(np.int64)
        planes = {c: table[c].combine_chunks() for c in plane_columns("items")}
        ids = item_ids.take(pa.array(join_byte_planes("items", planes, lengths)))
        offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        table = table.drop_columns(list(planes))
        table = table.append_column("items", pa.ListArray.from_arrays(offsets, ids))
    elif "item_index" in table.column_names:
        ids = item_ids.take(table["item_index"].combine_chunks().fill_null(0))
        table = table.drop_columns(["item_index"]).append_column("item_of_index", ids)
    order = [
        (field.name, "ascending")
        for field in table.schema
        if not (pa.types.is_nested(field.type) or pa.types.is_binary(field.type))
    ]
    return table.sort_by(order).select(sorted(table.column_names))


def _item_ids(lake: Lake) -> pa.Array:
    """Item ids by index; a reserved index is its own number."""
    items = snapshot(lake, schemas.items(lake.spec)).read(["item_id", "item_index"])
    index = items["item_index"].to_numpy()
    names = np.arange(index.max(initial=schemas.RESERVED_ITEM_INDICES) + 1).astype(object)
    names[index] = items["item_id"].to_numpy()
    return pc.cast(pa.array(names.astype(str)), pa.string())
