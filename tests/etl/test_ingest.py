"""Ingest of the simulated logs: record counts, duplicates, quarantine, and refused input."""

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from etl.errors import UserError
from etl.ingest.file_discovery import RawSelection
from etl.ingest.readers import read_raw_records
from etl.ingest.run import ingest
from etl.spec import DataSpec, load_spec
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST, SPEC
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAYS = (FIRST, LAST)


def raw_lines(raw: Path) -> list[str]:
    """Every line of every log file."""
    files = sorted(raw.glob("events/day=*/*.json.gz"))
    return [line for f in files for line in gzip.decompress(f.read_bytes()).decode().splitlines()]


def test_every_record_is_accounted_for(lake: Lake, raw: Path) -> None:
    total = Counter[str]()
    for day in rows(lake, "ingest_metrics"):
        assert day["read"] == sum(day[k] for k in ("kept", "quarantined", "duplicates", "excluded"))
        total.update({k: v for k, v in day.items() if k != "day"})
    assert total["read"] == len(raw_lines(raw))
    assert min(total.values()) > 0
    assert len(rows(lake, "events")) == total["kept"]
    quarantined = [row for row in rows(lake, "quarantine") if row["log"] == "events"]
    assert len(quarantined) == total["quarantined"]
    assert len(rows(lake, "excluded_events")) == total["excluded"]


def test_the_first_copy_of_each_event_is_kept(lake: Lake, raw: Path) -> None:
    quarantined = {row["payload"] for row in rows(lake, "quarantine")}
    first_ingest_time: dict[str, int] = {}
    for line in raw_lines(raw):
        if line not in quarantined:
            event = json.loads(line)
            event_id, ingest_time = event["event_id"], event["ingest_time"]
            first = first_ingest_time.get(event_id, ingest_time)
            first_ingest_time[event_id] = min(ingest_time, first)
    valid = rows(lake, "events") + rows(lake, "excluded_events")
    assert {row["event_id"]: row["ingest_ts"] // 1000 for row in valid} == first_ingest_time


def test_quarantine_holds_payload_and_reasons(lake: Lake) -> None:
    quarantined = rows(lake, "quarantine")
    reasons = Counter(reason for row in quarantined for reason in row["reasons"])
    for reason in ("not a record", "no user", "no item", "unknown surface", "negative dwell",
                   "event time before 2000", "event time after its day", "no event time",
                   "wrong type: position"):  # fmt: skip
        assert reasons[reason] > 0, (reason, reasons)
    assert all(row["payload"] for row in quarantined)
    assert all(len(set(row["reasons"])) == len(row["reasons"]) for row in quarantined)


def remove_folder(raw: Path) -> None:
    shutil.rmtree(raw)


def remove_files(raw: Path) -> None:
    shutil.rmtree(raw / "events")


def corrupt_gzip_files(raw: Path) -> None:
    for file in raw.glob("events/day=2026-01-03/*"):
        file.write_bytes(b"no gzip")


def remove_events(raw: Path) -> None:
    for file in raw.glob("events/day=2026-01-04/*"):
        file.write_bytes(gzip.compress(b"{}\n"))


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_folder, "folder of raw logs not found; check --raw"),
        (remove_files, "no file, or only empty files"),
        (
            corrupt_gzip_files,
            r"no events of 2026-01-03 .*quarantined: file cannot be read to its end: 1",
        ),
        (remove_events, "no events of 2026-01-04"),
    ],
)
def test_invalid_input_is_refused_before_anything_is_written(
    spec_path: Path, raw: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damaged = tmp_path / "raw"
    shutil.copytree(raw, damaged)
    damage(damaged)
    lake = Lake(str(tmp_path / "lake"), load_spec(spec_path))
    with pytest.raises(UserError, match=message):
        ingest(lake, str(damaged), DAYS)
    assert not lake.exists("events") and not lake.exists("quarantine")


@pytest.mark.usefixtures("spark")
def test_a_column_that_the_logs_lack_is_named(raw: Path, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.read_text().replace("position: position", "position: positon"))
    lake = Lake(str(tmp_path / "lake"), load_spec(path))
    with pytest.raises(UserError, match="the spec names column positon, but no record"):
        ingest(lake, str(raw), (FIRST, FIRST))
    assert not lake.exists("events")


@pytest.mark.usefixtures("spark")
def test_an_optional_source_may_have_no_files(lake_spec: DataSpec, tmp_path: Path) -> None:
    log = next(iter(lake_spec.log_sources.values())).model_copy(update={"optional": True})
    assert read_raw_records(log, RawSelection(str(tmp_path), DAYS), ["user_id"]).collect() == []


def test_a_table_of_another_spec_is_refused(lake: Lake, raw: Path, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.read_text().replace("allowed_lateness: 2d", "allowed_lateness: 5d"))
    other = Lake(lake.root, load_spec(path))
    with pytest.raises(UserError, match=f"{lake.spec.hash}.*{other.spec.hash}.*another --lake"):
        ingest(other, str(raw), DAYS)
