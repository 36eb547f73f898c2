import gzip
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from etl.errors import UserError
from etl.ingest import ingest
from etl.sources.raw import read_raw
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST, SPEC
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAYS = (FIRST, LAST)


def raw_lines(raw: Path) -> list[str]:
    """Every line of every log file."""
    files = sorted(raw.glob("events/day=*/*.json.gz"))
    return [line for f in files for line in gzip.decompress(f.read_bytes()).decode().splitlines()]


def test_nothing_is_lost(lake: Lake, raw: Path) -> None:
    flow = rows(lake, "flow")
    total = Counter()
    for day in flow:
        assert day["read"] == sum(day[k] for k in ("kept", "quarantined", "duplicates", "parked"))
        total.update({k: v for k, v in day.items() if k != "day"})
    assert total["read"] == len(raw_lines(raw))
    assert min(total.values()) > 0
    assert len(rows(lake, "events")) == total["kept"]
    of_events = [row for row in rows(lake, "quarantine") if row["log"] == "events"]
    assert len(of_events) == total["quarantined"]
    assert len(rows(lake, "parked")) == total["parked"]


def test_the_first_copy_of_each_event_is_kept(lake: Lake, raw: Path) -> None:
    bad = {row["payload"] for row in rows(lake, "quarantine")}
    first: dict[str, int] = {}
    for line in raw_lines(raw):
        if line not in bad:
            event = json.loads(line)
            at = event["ingest_time"]
            first[event["event_id"]] = min(at, first.get(event["event_id"], at))
    clean = rows(lake, "events") + rows(lake, "parked")
    kept = {row["event_id"]: row["ingest_ts"] // 1000 for row in clean}
    assert kept == first


def test_quarantine_holds_payload_and_reasons(lake: Lake) -> None:
    reasons = Counter(reason for row in rows(lake, "quarantine") for reason in row["reasons"])
    for reason in ("not a record", "no user", "no item", "unknown surface", "negative dwell",
                   "event time before 2000", "event time after its day", "no event time",
                   "wrong type: position"):  # fmt: skip
        assert reasons[reason] > 0, (reason, reasons)
    assert all(row["payload"] for row in rows(lake, "quarantine"))
    assert all(len(set(row["reasons"])) == len(row["reasons"]) for row in rows(lake, "quarantine"))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda raw: shutil.rmtree(raw), "no such folder of raw logs; name it with --raw"),
        (lambda raw: shutil.rmtree(raw / "events"), "no such file, or only empty ones"),
        (
            lambda raw: [f.write_bytes(b"no gzip") for f in raw.glob("events/day=2026-01-03/*")],
            r"no events of 2026-01-03 .*quarantined: file cannot be read to its end: 1",
        ),
        (
            lambda raw: [
                f.write_bytes(gzip.compress(b"{}\n")) for f in raw.glob("events/day=2026-01-04/*")
            ],
            "no events of 2026-01-04",
        ),
    ],
    ids=["no folder", "no files", "corrupt gzip", "no events"],
)
def test_bad_input_is_refused_before_anything_is_written(
    spark: object, spec_path: Path, raw: Path, tmp_path: Path, spoil, sentence: str
) -> None:
    copy = tmp_path / "raw"
    shutil.copytree(raw, copy)
    spoil(copy)
    lake = Lake(str(tmp_path / "lake"), load_spec(spec_path))
    with pytest.raises(UserError, match=sentence):
        ingest(lake, str(copy), DAYS)
    assert not lake.exists("events") and not lake.exists("quarantine")


def test_a_column_that_the_logs_lack_is_named(spark: object, raw: Path, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.read_text().replace("position: position", "position: positon"))
    lake = Lake(str(tmp_path / "lake"), load_spec(path))
    with pytest.raises(UserError, match="the spec names column positon, but no record"):
        ingest(lake, str(raw), (FIRST, FIRST))
    assert not lake.exists("events")


def test_a_sparse_source_may_have_no_files(spark: object, lake_spec, tmp_path: Path) -> None:
    log = next(iter(lake_spec.logs.values())).model_copy(update={"sparse": True})
    assert read_raw(str(tmp_path), log, ["user_id"], (FIRST, LAST)).collect() == []


def test_a_table_of_another_spec_is_refused(lake: Lake, raw: Path, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.read_text().replace("lateness: 2d", "lateness: 5d"))
    other = Lake(lake.root, load_spec(path))
    with pytest.raises(UserError, match=f"{lake.spec.hash}.*{other.spec.hash}.*another --lake"):
        ingest(other, str(raw), DAYS)
