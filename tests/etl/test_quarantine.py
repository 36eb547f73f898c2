"""Whatever is wrong with a record or a file: it lands with payload, file, line and reasons."""

import gzip
import json
from datetime import UTC, date, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from rich.console import Console

from etl.errors import UserError
from etl.ingest import ingest
from etl.replay import replay
from etl.show import show
from etl.sources import storage
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.pipeline import rows

ONE = date(2026, 1, 1)
DAY = (ONE, ONE)
SPEC = """
name: broken
buckets: 1
lateness: 2d
most_quarantined: 0.9
most_events_a_day: 40
surfaces: {home: {}}
events:
  shown: {kind: ad, role: impression}
  click: {kind: ad, role: outcome}
objectives: {click: {event: click, window: 1h}}
sequences: {behaviour: {}}
counters: {windows: [1d], events: [shown], keys: [[user]]}
sources:
  log:
    kind: event_log
    format: json
    path: log/{day}/*
    columns: {event_id: id, user: who, item: what, surface: page, type: action, event_time: ms,
              dwell: dwell}
"""
NOON = int(datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp() * 1000)
GOOD = {"who": "u", "what": "hat", "page": "home", "action": "shown", "ms": NOON}


def line(id_: str, **other: object) -> str:
    return json.dumps({k: v for k, v in (GOOD | {"id": id_} | other).items() if v is not None})


BAD = {
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
    line("b14", note="x" * 50_000_000): "longer than a record can be",
}


@pytest.fixture
def own(spark: object, tmp_path: Path) -> Lake:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))


def put(root: Path, name: str, content: bytes) -> Path:
    path = root / "raw/log/2026-01-01" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_every_kind_of_bad_record_lands_with_its_line(own: Lake, tmp_path: Path) -> None:
    lines = [text for i, bad in enumerate(BAD) for text in (line(f"g{i}"), bad)]
    put(tmp_path, "all.json.gz", gzip.compress("\n".join(lines).encode(), 1))
    put(tmp_path, "more.json", "\n".join([line("h1"), "nonsense", line("h2")]).encode())
    flow = ingest(own, str(tmp_path / "raw"), DAY)
    assert flow["read"] == len(lines) + 3
    assert flow["quarantined"] == len(BAD) + 1
    assert flow["kept"] == len(BAD) + 2
    held = snapshot_rows(own)
    found = {row["payload"]: row for row in held if row["source_file"].endswith("all.json.gz")}
    for number, bad in enumerate(BAD):
        assert BAD[bad] in found[bad]["reasons"], bad[:80]
        assert found[bad]["line"] == 2 * number + 2
    (other,) = (row for row in held if row["source_file"].endswith("more.json"))
    assert (other["payload"], other["line"]) == ("nonsense", 2)
    console = Console(record=True, width=200)
    show(own, DAY, 5, console)
    told = console.export_text()
    assert all(reason in told for reason in BAD.values()) and "more.json:2" in told


def snapshot_rows(lake: Lake) -> list[dict]:
    from etl.tables import contracts
    from etl.tables.arrow import snapshot

    return snapshot(lake, contracts.quarantine(lake.spec)).read().to_pylist()


def test_files_that_cannot_be_read_cost_no_day(own: Lake, tmp_path: Path) -> None:
    whole = "".join(line(f"t{i}") + "\n" for i in range(5000)).encode()
    put(tmp_path, "cut.json.gz", gzip.compress(whole)[:-2000])
    put(tmp_path, "empty.json", b"")
    put(tmp_path, "good.json", line("g").encode())
    own.spec.__dict__["most_events_a_day"] = 10**9
    flow = ingest(own, str(tmp_path / "raw"), DAY)
    reasons = {row["source_file"].rsplit("/", 1)[1]: row["reasons"] for row in snapshot_rows(own)}
    assert reasons["cut.json.gz"] == ["file cannot be read to its end"]
    assert reasons["empty.json"] == ["empty file"]
    assert 100 < flow["kept"] < 5001 and flow["quarantined"] == 2


def test_each_file_has_its_own_day_whatever_its_name(spark: object, tmp_path: Path) -> None:
    """Files of all days are read at once, by names without a pattern's help."""
    named = "of {day} ü 100%+.json.gz"
    (tmp_path / "spec.yaml").write_text(SPEC.replace("log/{day}/*", named))
    own = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    own.spec.__dict__["most_events_a_day"] = 10**9
    days = [date(2026, 1, day) for day in (1, 2, 3)]
    logs = tmp_path / "odd nämes"
    logs.mkdir()
    for number, day in enumerate(days):
        ms = NOON + number * 86_400_000
        events = [line(f"{day}-{i}", ms=ms) for i in range(3000)]
        content = gzip.compress("\n".join([f"nonsense of {day}", *events]).encode())
        cut = len(content) - 2000 * (number == 1)
        (logs / named.replace("{day}", str(day))).write_bytes(content[:cut])
    flow = ingest(own, str(logs), (days[0], days[-1]))
    assert 6000 < flow["kept"] < 9000 and flow["quarantined"] == 4
    for row in snapshot_rows(own):
        assert str(row["day"]) in row["source_file"]
        assert row["payload"] in {None, f"nonsense of {row['day']}"}


def test_a_file_of_an_address_that_was_not_listed_is_not_taken_as_undated(
    own: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "some.json", line("g").encode())
    monkeypatch.setattr(storage, "one_form", lambda address: address.replace("some", "other"))
    with pytest.raises(PySparkException, match="was not listed under this address"):
        ingest(own, str(tmp_path / "raw"), DAY)


@pytest.mark.parametrize("format_", ["csv", "parquet"])
def test_a_file_that_drifted_is_named_and_costs_no_day(
    spark: object, tmp_path: Path, format_: str
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("format: json", f"format: {format_}"))
    own = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    folder = tmp_path / "raw/log/2026-01-01"
    folder.mkdir(parents=True)
    hours = {
        "h00": {"dwell": [None, 5.0]},
        "h01": {"dwell": [1.5, 2.5], "device": ["ios", "android"]},  # a new column
        "h02": {"ms": [str(NOON), str(NOON)], "dwell": ["7", "8"]},  # other types
        "h03": {"who": None, "user": ["u", "v"], "dwell": [1.0, 2.0]},  # a renamed column
    }
    for hour, other in hours.items():
        own_ids = [f"{hour}-{i}" for i in range(2)]
        columns = {k: [v, v] for k, v in GOOD.items()} | {"id": own_ids} | other
        table = pa.table({k: v for k, v in columns.items() if v is not None})
        write = pc.write_csv if format_ == "csv" else pq.write_table
        write(table, folder / f"{hour}.{format_}")
    flow = ingest(own, str(tmp_path / "raw"), DAY)
    assert (flow["kept"], flow["quarantined"]) == (6, 2)
    assert {row["event_id"][:3] for row in rows(own, "events")} == {"h00", "h01", "h02"}
    for row in snapshot_rows(own):
        assert row["source_file"].endswith(f"h03.{format_}")
        assert row["reasons"] == ["file lacks who"]
        assert json.loads(row["payload"])["user"] in {"u", "v"}


def test_a_day_with_too_many_bad_records_is_refused(own: Lake, tmp_path: Path) -> None:
    put(tmp_path, "log.json", "\n".join([line("g"), *["bad"] * 19]).encode())
    with pytest.raises(
        UserError, match=r"19 of 20 records of 2026-01-01 are bad \(not a record: 19"
    ):
        ingest(own, str(tmp_path / "raw"), DAY)
    assert not own.exists("events") and not own.exists("quarantine")


def test_a_machine_is_capped_and_late_events_are_parked(own: Lake, tmp_path: Path) -> None:
    busy = [line(f"m{i:03}", who="robot", ms=NOON + i) for i in range(100)]
    late = [line(f"l{i}", ms=NOON - 4 * 86_400_000) for i in range(3)]
    put(tmp_path, "log.json", "\n".join([*busy, *late, line("g"), line("g")]).encode())
    flow = ingest(own, str(tmp_path / "raw"), DAY)
    assert flow == {"read": 105, "kept": 41, "quarantined": 0, "duplicates": 1, "parked": 63}
    kept = sorted(row["event_id"] for row in rows(own, "events"))
    assert kept == sorted(["g", *(f"m{i:03}" for i in range(40))]), "the first of the day"
    reasons = sorted(row["reason"] for row in rows(own, "parked"))
    assert set(reasons) == {"more than 40 events of a user and day", "too late"}
    assert reasons.count("too late") == 3


def test_replay_lets_in_what_a_mended_spec_reads(own: Lake, tmp_path: Path) -> None:
    lines = [line("g"), line("k", action="klick"), line("k", action="klick"), "bad", line("g2")]
    put(tmp_path, "log.json", "\n".join(lines).encode())
    ingest(own, str(tmp_path / "raw"), DAY)
    mended = (tmp_path / "spec.yaml").read_text()
    mended += "    types: {shown: shown, click: click, klick: click}\n"
    (tmp_path / "spec.yaml").write_text(mended)
    again = Lake(own.root, load_spec(tmp_path / "spec.yaml"))
    assert replay(again, DAY) == {"let in": 2, "still bad": 1}
    assert {row["event_id"]: row["type"] for row in rows(again, "events")}["k"] == 2
    (held,) = snapshot_rows(again)
    assert (held["payload"], held["line"], held["reasons"]) == ("bad", 4, ["not a record"])
    (flow,) = rows(again, "flow")
    assert (flow["read"], flow["kept"], flow["quarantined"], flow["duplicates"]) == (5, 3, 1, 1)
    ingest(again, str(tmp_path / "raw"), DAY)
    assert rows(again, "flow") == [flow], "a replay gives what an ingest gives"
