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
from etl.tables import contracts
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from tests.pipeline import rows

pytestmark = pytest.mark.spark

ONE, TWO, THREE = (date(2026, 1, day) for day in (1, 2, 3))
DAY = (ONE, ONE)
COLUMNS = """{event_id: id, user: who, item: what, surface: page, type: action,
              event_time: ms, dwell: dwell}"""
SPEC = f"""
name: broken
buckets: 1
lateness: 2d
most_quarantined: 0.9
most_events_a_day: 40
surfaces: {{home: {{}}}}
events:
  shown: {{kind: ad, role: impression}}
  click: {{kind: ad, role: outcome}}
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
NAMED = "odd nämes/of {day} ü 100%+.json.gz"
MORE_LOGS = "".join(
    f"""
  {name}:
    kind: event_log
    format: {format_}
    path: "{path}"
    sparse: true
    columns: {COLUMNS}
"""
    for name, format_, path in (
        ("named", "json", NAMED),
        ("csv", "csv", "csv/{day}/*"),
        ("parquet", "parquet", "parquet/{day}/*"),
    )
)
DAY_MS = 86_400_000
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
    line("b14", note="x" * 21_000_000): "longer than a record can be",
}


def lake_of(folder: Path, spec: str) -> Lake:
    (folder / "spec.yaml").write_text(spec)
    return Lake(str(folder / "lake"), load_spec(folder / "spec.yaml"))


@pytest.fixture
def own(spark: object, tmp_path: Path) -> Lake:
    return lake_of(tmp_path, SPEC)


def put(root: Path, name: str, content: bytes, day: date = ONE, log: str = "log") -> Path:
    path = root / "raw" / log / f"{day}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


HALVES = [text for i, bad in enumerate(BAD) for text in (line(f"g{i}"), bad)]


def put_bad_records(root: Path) -> None:
    """On the first day: each kind of bad record after a good one."""
    put(root, "all.json.gz", gzip.compress("\n".join(HALVES).encode(), 1))
    put(root, "more.json", "\n".join([line("h1"), "nonsense", line("h2")]).encode())


def put_broken_files(root: Path) -> None:
    """On the second day: files that cannot be read to their end."""
    whole = "".join(line(f"t{i}", who=f"u{i}", ms=NOON + DAY_MS) + "\n" for i in range(5000))
    put(root, "cut.json.gz", gzip.compress(whole.encode())[:-2000], TWO)
    put(root, "empty.json", b"", TWO)
    put(root, "good.json", line("good", ms=NOON + DAY_MS).encode(), TWO)


def put_busy_user(root: Path) -> None:
    """On the third day: a user with 100 events, three late ones and a copy."""
    now = NOON + 2 * DAY_MS
    busy = [line(f"m{i:03}", who="robot", ms=now + i) for i in range(100)]
    late = [line(f"l{i}", ms=now - 4 * DAY_MS) for i in range(3)]
    once = line("once", ms=now)
    put(root, "log.json", "\n".join([*busy, *late, once, once]).encode(), THREE)


def put_named_by_day(root: Path) -> None:
    """A file a day whose name means something in a pattern or in an address; the second is cut."""
    for number, day in enumerate((ONE, TWO, THREE)):
        ms = NOON + number * DAY_MS
        events = [line(f"{day}-{i}", who=f"v{i}", ms=ms) for i in range(3000)]
        content = gzip.compress("\n".join([f"nonsense of {day}", *events]).encode())
        path = root / "raw" / NAMED.replace("{day}", f"{day}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[: len(content) - 2000 * (day == TWO)])


def put_drifting_files(root: Path, format_: str) -> None:
    """On the first day: files of a log whose columns and types change by the hour."""
    folder = root / "raw" / format_ / f"{ONE}"
    folder.mkdir(parents=True)
    hours = {
        "h00": {"dwell": [None, 5.0]},
        "h01": {"dwell": [1.5, 2.5], "device": ["ios", "android"]},  # a new column
        "h02": {"ms": [str(NOON), str(NOON)], "dwell": ["7", "8"]},  # other types
        "h03": {"who": None, "user": ["u", "v"], "dwell": [1.0, 2.0]},  # a renamed column
    }
    for hour, other in hours.items():
        own_ids = [f"{format_}-{hour}-{i}" for i in range(2)]
        columns = {k: [v, v] for k, v in GOOD.items()} | {"id": own_ids} | other
        table = pa.table({k: v for k, v in columns.items() if v is not None})
        write = pc.write_csv if format_ == "csv" else pq.write_table
        write(table, folder / f"{hour}.{format_}")


@pytest.fixture(scope="module")
def three_days(spark: object, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Three days of four logs in which much is wrong, ingested at once."""
    root = tmp_path_factory.mktemp("three")
    lake = lake_of(root, SPEC + MORE_LOGS)
    for put_files in (put_bad_records, put_broken_files, put_busy_user, put_named_by_day):
        put_files(root)
    for format_ in ("csv", "parquet"):
        put_drifting_files(root, format_)
    ingest(lake, str(root / "raw"), (ONE, THREE))
    return lake


def quarantined(lake: Lake, log: str, day: date) -> list[dict]:
    return [row for row in snapshot_rows(lake) if (row["log"], row["day"]) == (log, day)]


def kept(lake: Lake, prefix: str) -> list[str]:
    return [row["event_id"] for row in rows(lake, "events") if row["event_id"].startswith(prefix)]


def test_everything_read_is_accounted_for(three_days: Lake) -> None:
    for day in rows(three_days, "flow"):
        parts = (day[name] for name in ("kept", "quarantined", "duplicates", "parked"))
        assert day["read"] == sum(parts), day


def test_every_kind_of_bad_record_lands_with_its_line(three_days: Lake) -> None:
    held = quarantined(three_days, "log", ONE)
    assert len(held) == len(BAD) + 1
    assert len(kept(three_days, "g")) == len(BAD) + 1  # with the good record of the second day
    found = {row["payload"]: row for row in held if row["source_file"].endswith("all.json.gz")}
    for number, bad in enumerate(BAD):
        assert BAD[bad] in found[bad]["reasons"], bad[:80]
        assert found[bad]["line"] == 2 * number + 2
    (other,) = (row for row in held if row["source_file"].endswith("more.json"))
    assert (other["payload"], other["line"]) == ("nonsense", 2)
    console = Console(record=True, width=200)
    show(three_days, DAY, 5, console)
    printed = console.export_text()
    assert all(reason in printed for reason in BAD.values()) and "more.json:2" in printed


def snapshot_rows(lake: Lake) -> list[dict]:
    return snapshot(lake, contracts.quarantine(lake.spec)).read().to_pylist()


def test_files_that_cannot_be_read_cost_no_day(three_days: Lake) -> None:
    held = quarantined(three_days, "log", TWO)
    reasons = {row["source_file"].rsplit("/", 1)[1]: row["reasons"] for row in held}
    assert reasons["cut.json.gz"] == ["file cannot be read to its end"]
    assert reasons["empty.json"] == ["empty file"]
    assert len(held) == 2
    assert 100 < len(kept(three_days, "t")) < 5000 and kept(three_days, "good") == ["good"]


def test_each_file_has_its_own_day_whatever_its_name(three_days: Lake) -> None:
    """Files of all days are read at once, by names without a pattern's help."""
    held = [row for row in snapshot_rows(three_days) if row["log"] == "named"]
    assert len(held) == 4  # the first line of each, and that one is cut
    for row in held:
        assert str(row["day"]) in row["source_file"]
        assert row["payload"] in {None, f"nonsense of {row['day']}"}
    assert [len(kept(three_days, f"{day}-")) for day in (ONE, THREE)] == [3000, 3000]
    assert 0 < len(kept(three_days, f"{TWO}-")) < 3000


@pytest.mark.parametrize("format_", ["csv", "parquet"])
def test_a_file_that_drifted_is_named_and_costs_no_day(three_days: Lake, format_: str) -> None:
    assert {id_.rsplit("-", 1)[0] for id_ in kept(three_days, format_)} == {
        f"{format_}-{hour}" for hour in ("h00", "h01", "h02")
    }
    assert len(kept(three_days, format_)) == 6
    held = quarantined(three_days, format_, ONE)
    assert len(held) == 2
    for row in held:
        assert row["source_file"].endswith(f"h03.{format_}")
        assert row["reasons"] == ["file lacks who"]
        assert json.loads(row["payload"])["user"] in {"u", "v"}


def test_a_machine_is_capped_and_late_events_are_parked(three_days: Lake) -> None:
    flow = next(row for row in rows(three_days, "flow") if row["day"] == THREE)
    assert (flow["duplicates"], flow["parked"]) == (1, 63)
    assert kept(three_days, "once") == ["once"]
    assert sorted(kept(three_days, "m")) == [f"m{i:03}" for i in range(40)], "the first of the day"
    reasons = sorted(row["reason"] for row in rows(three_days, "parked"))
    assert set(reasons) == {"more than 40 events of a user and day", "too late"}
    assert reasons.count("too late") == 3


def test_a_file_of_an_address_that_was_not_listed_is_not_taken_as_undated(
    own: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "some.json", line("g").encode())
    monkeypatch.setattr(storage, "one_form", lambda address: address.replace("some", "other"))
    with pytest.raises(PySparkException, match="was not listed under this address"):
        ingest(own, str(tmp_path / "raw"), DAY)


def test_a_day_with_too_many_bad_records_is_refused(own: Lake, tmp_path: Path) -> None:
    put(tmp_path, "log.json", "\n".join([line("g"), *["bad"] * 19]).encode())
    with pytest.raises(
        UserError, match=r"19 of 20 records of 2026-01-01 are bad \(not a record: 19"
    ):
        ingest(own, str(tmp_path / "raw"), DAY)
    assert not own.exists("events") and not own.exists("quarantine")


def test_replay_lets_in_what_a_mended_spec_reads(own: Lake, tmp_path: Path) -> None:
    lines = [line("g"), line("k", action="klick"), line("k", action="klick"), "bad", line("g2")]
    put(tmp_path, "log.json", "\n".join(lines).encode())
    ingest(own, str(tmp_path / "raw"), DAY)
    mended = (tmp_path / "spec.yaml").read_text()
    mended += "    types: {shown: shown, click: click, klick: click}\n"
    (tmp_path / "spec.yaml").write_text(mended)
    again = Lake(own.root, load_spec(tmp_path / "spec.yaml"))
    assert replay(again, DAY) == {"let in": 2, "still bad": 1}
    types = {row["event_id"]: row["type"] for row in rows(again, "events")}
    assert types["k"] == again.spec.event_codes["click"]
    (held,) = snapshot_rows(again)
    assert (held["payload"], held["line"], held["reasons"]) == ("bad", 4, ["not a record"])
    (flow,) = rows(again, "flow")
    assert (flow["read"], flow["kept"], flow["quarantined"], flow["duplicates"]) == (5, 3, 1, 1)
    ingest(again, str(tmp_path / "raw"), DAY)
    assert rows(again, "flow") == [flow], "a replay gives what an ingest gives"


def test_days_before_others_are_not_replayed(lake: Lake) -> None:
    """Later days were made from what these days held."""
    with pytest.raises(UserError, match=rf"{LAST} has been ingested.*--days {FIRST}:{LAST}"):
        replay(lake, (FIRST, FIRST))


def test_an_interrupted_replay_loses_nothing_and_can_be_run_again(
    own: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "log.json", "\n".join([line("g"), line("k", action="klick"), line("h")]).encode())
    ingest(own, str(tmp_path / "raw"), DAY)
    mended = (tmp_path / "spec.yaml").read_text()
    (tmp_path / "spec.yaml").write_text(
        mended + "    types: {shown: shown, click: click, klick: click}\n"
    )
    again = Lake(own.root, load_spec(tmp_path / "spec.yaml"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for broken in ("write_events", "quarantine", "write_flow"):
        with monkeypatch.context() as patch:
            patch.setattr(f"etl.replay.{broken}", killed)
            with pytest.raises(KeyboardInterrupt):
                replay(again, DAY)
        held = [row["payload"] for row in snapshot_rows(again)]
        assert any("klick" in payload for payload in held) or kept(again, "k") == ["k"], broken
    with pytest.raises(UserError, match="is in quarantine"):  # it was let in by the third
        replay(again, DAY)
    assert sorted(row["event_id"] for row in rows(again, "events")) == ["g", "h", "k"]
    (flow,) = rows(again, "flow")
    assert (flow["read"], flow["kept"], flow["quarantined"], flow["duplicates"]) == (3, 3, 0, 0)
