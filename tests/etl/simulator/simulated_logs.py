"""Readers of the logs and the truth that the simulator writes."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Record = dict[str, Any]


def read_lines(run: Path, folder: str) -> list[bytes]:
    files = sorted((run / folder).rglob("*.json.gz"))
    return [line for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def is_valid(record: Record) -> bool:
    return (
        {"user_id", "item_id", "event_id"} <= record.keys()
        and record["surface"] in ("feed", "reels", "messaging")
        and isinstance(record["event_time"], int)
        and 1.7e12 < record["event_time"] < 1.9e12
        and isinstance(record.get("position", 0), int)
        and record.get("dwell_ms", 0) >= 0
    )


@functools.cache
def valid_records(run: Path) -> list[Record]:
    """All valid records, with duplicates, in the order of their ingest."""
    records = []
    for line in read_lines(run, "events"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if is_valid(record):
            records.append(record)
    return sorted(records, key=lambda record: record["ingest_time"])


@functools.cache
def unique_events(run: Path) -> list[Record]:
    """The copy of each event that was ingested first."""
    events: dict[str, Record] = {}
    for record in valid_records(run):
        events.setdefault(record["event_id"], record)
    return list(events.values())


@functools.cache
def truth_of(run: Path) -> dict[str, Record]:
    return {row["impression_id"]: row for row in pq.read_table(run / "truth").to_pylist()}


def of_type(records: list[Record], event_type: str) -> list[Record]:
    return [record for record in records if record["type"] == event_type]
