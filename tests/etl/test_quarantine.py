"""Invalid records and files are quarantined with payload, file, line and reasons."""

import gzip
import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from rich.console import Console

from etl.errors import UserError
from etl.ingest import file_discovery
from etl.ingest.quarantine import quarantine_report, read_quarantined_reasons
from etl.ingest.reprocess import reprocess_quarantine
from etl.ingest.run import ingest
from etl.spec import load_spec
from etl.tables import schemas, step_state
from etl.tables.arrow import Snapshot, snapshot
from etl.tables.day_order import days_in_order, last_finished_day
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAY_1, DAY_2, DAY_3 = (date(2026, 1, day) for day in (1, 2, 3))
FIRST_DAY_ONLY = (DAY_1, DAY_1)
METRICS = ("read", "kept", "quarantined", "duplicates")
COLUMNS = """{event_id: id, user: who, item: what, surface: page, type: action,
              event_time: ms, dwell: dwell}"""
SPEC = f"""
name: broken
buckets: 1
allowed_lateness: 2d
max_bad_record_rate: 0.9
max_events_per_user_day: 40
surfaces: {{home: {{}}}}
events:
  shown: {{role: impression}}
  click: {{role: outcome}}
objectives: {{click: {{event: click, window: 1h}}}}
sequences: {{behaviour: {{}}}}
counters: {{windows: [1d], events: [shown], keys: [[user]]}}
sources:
  log:
    kind: event_log
    format: json
    path: log/{{day}}/*
    columns: {COLUMNS}
"""
ODD_PATH = "odd nämes/of {day} ü 100%+.json.gz"
MORE_LOGS = "".join(
    f"""
  {name}:
    kind: event_log
    format: {format_}
    path: "{path}"
    optional: true
    columns: {COLUMNS}
"""
    for name, format_, path in (
        ("named", "json", ODD_PATH),
        ("csv", "csv", "csv/{day}/*"),
        ("parquet", "parquet", "parquet/{day}/*"),
    )
)
DAY_MS = 86_400_000
NOON_MS = int(datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp() * 1000)
GOOD: dict[str, Any] = {"who": "u", "what": "hat", "page": "home", "action": "shown", "ms": NOON_MS}


def line(id_: str, **changes: object) -> str:
    """A good record with some changes, as a line of JSON; None removes a key."""
    record = GOOD | {"id": id_} | changes
    return json.dumps({name: value for name, value in record.items() if value is not None})


REASON_BY_LINE = {
    '{"id": "b1", "who": ': "not a record",
    "not json at all": "not a record",
    line("b3", ms="noon"): "no event time",
    line("b4", dwell=float("nan")): "wrong type: dwell",  # JSON has no NaN
    line("b4s", dwell="NaN"): "not a number",
    line("b5", dwell=-3): "negative dwell",
    line("b6", dwell="long"): "wrong type: dwell",
    line("b7", ms=1000): "event time before 2000",
    line("b8", ms=4_291_747_200_000): "event time after its day",  # 2106
    line("b9", page="cellar"): "unknown surface",
    line("b10", action="wave"): "unknown type",
    line("b11", who=None): "no user",
    line("b12", what=""): "no item",
    line("b13").replace('"b13"', "null"): "no event id",
    line("b14", note="x" * 21_000_000): "longer than a record can be",
}


def lake_of(folder: Path, spec: str) -> Lake:
    (folder / "spec.yaml").write_text(spec)
    return Lake(str(folder / "lake"), load_spec(folder / "spec.yaml"))


@pytest.fixture
def empty_lake(spark: object, tmp_path: Path) -> Lake:
    return lake_of(tmp_path, SPEC)


def put(root: Path, name: str, content: bytes, day: date = DAY_1, log: str = "log") -> Path:
    path = root / "raw" / log / f"{day}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


GOOD_AND_BAD = [text for i, bad in enumerate(REASON_BY_LINE) for text in (line(f"g{i}"), bad)]


def put_bad_records(root: Path) -> None:
    """Write each kind of bad record after a good one, on the first day."""
    put(root, "all.json.gz", gzip.compress("\n".join(GOOD_AND_BAD).encode(), 1))
    put(root, "more.json", "\n".join([line("h1"), "nonsense", line("h2")]).encode())


def put_unreadable_files(root: Path) -> None:
    """Write files that cannot be read to their end, on the second day."""
    text = "".join(line(f"t{i}", who=f"u{i}", ms=NOON_MS + DAY_MS) + "\n" for i in range(5000))
    put(root, "cut.json.gz", gzip.compress(text.encode())[:-2000], DAY_2)
    put(root, "empty.json", b"", DAY_2)
    put(root, "good.json", line("good", ms=NOON_MS + DAY_MS).encode(), DAY_2)


def put_busy_user(root: Path) -> None:
    """Write 100 events of a user, three late events and a duplicate, on the third day."""
    now = NOON_MS + 2 * DAY_MS
    busy = [line(f"m{i:03}", who="robot", ms=now + i) for i in range(100)]
    late = [line(f"l{i}", ms=now - 4 * DAY_MS) for i in range(3)]
    duplicate = line("dup", ms=now)
    put(root, "log.json", "\n".join([*busy, *late, duplicate, duplicate]).encode(), DAY_3)


def put_odd_file_names(root: Path) -> None:
    """Write a file per day with special characters of globs and URIs; the second is truncated."""
    for number, day in enumerate((DAY_1, DAY_2, DAY_3)):
        ms = NOON_MS + number * DAY_MS
        events = [line(f"{day}-{i}", who=f"v{i}", ms=ms) for i in range(3000)]
        content = gzip.compress("\n".join([f"nonsense of {day}", *events]).encode())
        path = root / "raw" / ODD_PATH.replace("{day}", f"{day}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[: len(content) - 2000 * (day == DAY_2)])


def put_drifting_files(root: Path, format_: str) -> None:
    """Write hourly files whose columns and types change (schema drift), on the first day."""
    folder = root / "raw" / format_ / f"{DAY_1}"
    folder.mkdir(parents=True)
    changes_by_hour: dict[str, dict[str, Any]] = {
        "h00": {"dwell": [None, 5.0]},
        "h01": {"dwell": [1.5, 2.5], "device": ["ios", "android"]},  # a new column
        "h02": {"ms": [str(NOON_MS), str(NOON_MS)], "dwell": ["7", "8"]},  # other types
        "h03": {"who": None, "user": ["u", "v"], "dwell": [1.0, 2.0]},  # a renamed column
    }
    for hour, changes in changes_by_hour.items():
        ids = [f"{format_}-{hour}-{i}" for i in range(2)]
        columns = {k: [v, v] for k, v in GOOD.items()} | {"id": ids} | changes
        table = pa.table({k: v for k, v in columns.items() if v is not None})
        write = pc.write_csv if format_ == "csv" else pq.write_table
        write(table, folder / f"{hour}.{format_}")


@pytest.fixture(scope="module")
def three_days(spark: object, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Three days of four logs with many faults, ingested at once."""
    root = tmp_path_factory.mktemp("three")
    lake = lake_of(root, SPEC + MORE_LOGS)
    for put_files in (put_bad_records, put_unreadable_files, put_busy_user, put_odd_file_names):
        put_files(root)
    for format_ in ("csv", "parquet"):
        put_drifting_files(root, format_)
    ingest(lake, str(root / "raw"), (DAY_1, DAY_3))
    return lake


def quarantine_rows(lake: Lake) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = snapshot(lake, schemas.quarantine(lake.spec)).read().to_pylist()
    return table


def quarantined(lake: Lake, log: str, day: date) -> list[dict[str, Any]]:
    return [row for row in quarantine_rows(lake) if (row["log"], row["day"]) == (log, day)]


def stored_ids(lake: Lake, prefix: str) -> list[str]:
    return [row["event_id"] for row in rows(lake, "events") if row["event_id"].startswith(prefix)]


def test_every_kind_of_bad_record_is_quarantined_with_its_line(three_days: Lake) -> None:
    found = quarantined(three_days, "log", DAY_1)
    assert len(found) == len(REASON_BY_LINE) + 1
    good = stored_ids(three_days, "g")
    assert len(good) == len(REASON_BY_LINE) + 1, "one per bad record, and one of the second day"
    by_payload = {r["payload"]: r for r in found if r["source_file"].endswith("all.json.gz")}
    for number, (bad, reason) in enumerate(REASON_BY_LINE.items()):
        assert reason in by_payload[bad]["reasons"], bad[:80]
        assert by_payload[bad]["line"] == 2 * number + 2
    (other,) = (row for row in found if row["source_file"].endswith("more.json"))
    assert (other["payload"], other["line"]) == ("nonsense", 2)
    console = Console(record=True, width=200)
    quarantine_report(three_days, FIRST_DAY_ONLY, 5, console)
    printed = console.export_text()
    assert all(reason in printed for reason in REASON_BY_LINE.values()) and "more.json:2" in printed


def test_an_unreadable_file_does_not_stop_the_ingest_of_its_day(three_days: Lake) -> None:
    found = quarantined(three_days, "log", DAY_2)
    reasons = {row["source_file"].rsplit("/", 1)[1]: row["reasons"] for row in found}
    assert reasons["cut.json.gz"] == ["file cannot be read to its end"]
    assert reasons["empty.json"] == ["empty file"]
    assert len(found) == 2
    assert 100 < len(stored_ids(three_days, "t")) < 5000
    assert stored_ids(three_days, "good") == ["good"]


def test_each_file_has_the_day_of_its_path_for_any_file_name(three_days: Lake) -> None:
    """Files of all days are read at once, and special characters in names are literal."""
    found = [row for row in quarantine_rows(three_days) if row["log"] == "named"]
    assert len(found) == 4  # the first line of each file, and the truncated file
    for row in found:
        assert str(row["day"]) in row["source_file"]
        assert row["payload"] in {None, f"nonsense of {row['day']}"}
    assert [len(stored_ids(three_days, f"{day}-")) for day in (DAY_1, DAY_3)] == [3000, 3000]
    assert 0 < len(stored_ids(three_days, f"{DAY_2}-")) < 3000


@pytest.mark.parametrize("format_", ["csv", "parquet"])
def test_a_file_with_a_renamed_column_is_quarantined_and_the_rest_of_its_day_is_kept(
    three_days: Lake, format_: str
) -> None:
    assert {id_.rsplit("-", 1)[0] for id_ in stored_ids(three_days, format_)} == {
        f"{format_}-{hour}" for hour in ("h00", "h01", "h02")
    }
    assert len(stored_ids(three_days, format_)) == 6
    found = quarantined(three_days, format_, DAY_1)
    assert len(found) == 2
    for row in found:
        assert row["source_file"].endswith(f"h03.{format_}")
        assert row["reasons"] == ["file lacks who"]
        assert json.loads(row["payload"])["user"] in {"u", "v"}


def test_events_above_the_cap_and_late_events_are_excluded(three_days: Lake) -> None:
    metrics = next(row for row in rows(three_days, "ingest_metrics") if row["day"] == DAY_3)
    assert (metrics["duplicates"], metrics["excluded"]) == (1, 63)
    assert stored_ids(three_days, "dup") == ["dup"]
    first_of_day = [f"m{i:03}" for i in range(40)]
    assert sorted(stored_ids(three_days, "m")) == first_of_day
    reasons = sorted(row["reason"] for row in rows(three_days, "excluded_events"))
    assert set(reasons) == {"more than 40 events of a user and day", "too late"}
    assert reasons.count("too late") == 3


def test_a_file_with_an_unlisted_uri_is_not_read_as_one_without_a_day(
    empty_lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "some.json", line("g").encode())
    monkeypatch.setattr(file_discovery, "normalize_uri", lambda uri: uri.replace("some", "other"))
    with pytest.raises(PySparkException, match="was not listed under this URI"):
        ingest(empty_lake, str(tmp_path / "raw"), FIRST_DAY_ONLY)


def test_a_day_with_too_many_bad_records_is_refused(empty_lake: Lake, tmp_path: Path) -> None:
    put(tmp_path, "log.json", "\n".join([line("g"), *["bad"] * 19]).encode())
    with pytest.raises(
        UserError, match=r"19 of 20 records of 2026-01-01 are bad \(not a record: 19"
    ):
        ingest(empty_lake, str(tmp_path / "raw"), FIRST_DAY_ONLY)
    assert not empty_lake.exists("events") and not empty_lake.exists("quarantine")


def lake_with_klick(lake: Lake) -> Lake:
    """The same lake under a spec that accepts the event type `klick`."""
    spec_file = Path(lake.root).with_name("spec.yaml")
    types = "    types: {shown: shown, click: click, klick: click}\n"
    spec_file.write_text(spec_file.read_text() + types)
    return Lake(lake.root, load_spec(spec_file))


def test_reprocessing_releases_records_that_a_corrected_spec_accepts(
    empty_lake: Lake, tmp_path: Path
) -> None:
    lines = [line("g"), line("k", action="klick"), line("k", action="klick"), "bad", line("g2")]
    put(tmp_path, "log.json", "\n".join(lines).encode())
    ingest(empty_lake, str(tmp_path / "raw"), FIRST_DAY_ONLY)
    corrected = lake_with_klick(empty_lake)
    assert reprocess_quarantine(corrected, FIRST_DAY_ONLY) == {
        "released": 2,
        "still quarantined": 1,
    }
    types = {row["event_id"]: row["type"] for row in rows(corrected, "events")}
    assert types["k"] == corrected.spec.event_codes["click"]
    (found,) = quarantine_rows(corrected)
    assert (found["payload"], found["line"], found["reasons"]) == ("bad", 4, ["not a record"])
    (metrics,) = rows(corrected, "ingest_metrics")
    assert [metrics[name] for name in METRICS] == [5, 3, 1, 1]
    ingest(corrected, str(tmp_path / "raw"), FIRST_DAY_ONLY)
    assert rows(corrected, "ingest_metrics") == [metrics], "the same as after an ingest"


def test_a_reprocessing_that_releases_nothing_leaves_events_and_later_steps_as_they_are(
    empty_lake: Lake, tmp_path: Path
) -> None:
    put(tmp_path, "log.json", "\n".join([line("g"), line("k", action="klick")]).encode())
    ingest(empty_lake, str(tmp_path / "raw"), FIRST_DAY_ONLY)
    with days_in_order(empty_lake, "history", FIRST_DAY_ONLY):
        pass
    version = empty_lake.version("events")
    assert reprocess_quarantine(empty_lake, FIRST_DAY_ONLY)["released"] == 0
    assert empty_lake.version("events") == version
    assert last_finished_day(empty_lake.root, "history") == DAY_1


WIDE_LOG = """
  log:
    kind: impression_log
    format: json
    path: log/{day}/*
    columns: {event_id: id, user: who, item: what, surface: page, event_time: ms, dwell: dwell}
    outcomes:
      - {event: click, indicator: clicked, delay: click_after}
      - {event: look, indicator: looked, delay: look_after}
"""


def test_reprocessing_a_wide_record_leaves_its_stored_events_and_its_other_outcomes_as_they_are(
    spark: object, tmp_path: Path
) -> None:
    """Quarantine has the record once for each invalid outcome: here, those of five days later."""
    declarations = SPEC.partition("  log:\n")[0].replace("objectives:", "  look: {}\nobjectives:")
    lake = lake_of(tmp_path, declarations + WIDE_LOG.removeprefix("\n"))
    later = {"clicked": 1, "looked": 1, "click_after": 5 * DAY_MS, "look_after": 5 * DAY_MS}
    put(tmp_path, "log.json", "\n".join([line("g"), line("b", **later)]).encode())
    ingest(lake, str(tmp_path / "raw"), FIRST_DAY_ONLY)
    before = {name: rows(lake, name) for name in ("events", "quarantine", "ingest_metrics")}
    assert {row["event_id"] for row in before["events"]} == {"g", "b"}
    assert len(before["quarantine"]) == 2
    version = lake.version("events")
    for _ in range(2):
        counts = reprocess_quarantine(lake, FIRST_DAY_ONLY)
        assert counts == {"released": 0, "still quarantined": 2}
        assert {name: rows(lake, name) for name in before} == before
    assert lake.version("events") == version


def test_a_report_reads_the_quarantined_records_of_one_day_at_a_time(
    three_days: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same as one of all rows."""
    days = snapshot(three_days, schemas.quarantine(three_days.spec)).days()
    found = quarantine_rows(three_days)
    read, read_days = Snapshot.read, list[object]()

    def read_day(self: Snapshot, day: date) -> pa.Table:
        read_days.append(day)
        return read(self, day=day)

    monkeypatch.setattr(Snapshot, "read", read_day)
    by_reason = read_quarantined_reasons(three_days, (DAY_1, DAY_3), 2)
    assert read_days == days and len(days) > 2
    for reason, of_reason in by_reason.items():
        matching = [row for row in found if reason in row["reasons"]]
        assert of_reason.num_records == len(matching)
        assert of_reason.days == sorted({row["day"] for row in matching})
        assert of_reason.files == {row["source_file"] for row in matching}
        assert len(of_reason.examples) == min(2, len(matching))
        assert all(row in matching for row in of_reason.examples)
    assert set(by_reason) == {reason for row in found for reason in row["reasons"]}


def test_days_before_ingested_days_are_not_reprocessed(lake: Lake) -> None:
    """The tables of later days depend on these days."""
    with pytest.raises(UserError, match=rf"{LAST} has been ingested.*--days {FIRST}:{LAST}"):
        reprocess_quarantine(lake, (FIRST, FIRST))


def test_an_interrupted_reprocessing_loses_nothing_and_can_be_repeated(
    empty_lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "log.json", "\n".join([line("g"), line("k", action="klick"), line("h")]).encode())
    ingest(empty_lake, str(tmp_path / "raw"), FIRST_DAY_ONLY)
    corrected = lake_with_klick(empty_lake)
    step_state.write_step_state(corrected.root, "ingest", "inputs", 1.0)
    before = step_state.read_step_state(corrected.root, "ingest")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for function in ("write_events", "write_quarantine", "write_ingest_metrics"):
        with monkeypatch.context() as patch:
            patch.setattr(f"etl.ingest.reprocess.{function}", killed)
            with pytest.raises(KeyboardInterrupt):
                reprocess_quarantine(corrected, FIRST_DAY_ONLY)
        payloads = [row["payload"] for row in quarantine_rows(corrected)]
        is_quarantined = any("klick" in payload for payload in payloads)
        assert is_quarantined or stored_ids(corrected, "k") == ["k"], function
    after = step_state.read_step_state(corrected.root, "ingest")
    assert before and after and before.run_id != after.run_id, "so that later steps run again"
    with pytest.raises(UserError, match="is in quarantine"):  # the third run released it
        reprocess_quarantine(corrected, FIRST_DAY_ONLY)
    assert sorted(row["event_id"] for row in rows(corrected, "events")) == ["g", "h", "k"]
    (metrics,) = rows(corrected, "ingest_metrics")
    assert [metrics[name] for name in METRICS] == [3, 3, 0, 0]
