"""Formats of raw files: units of times, days in paths, nested fields, CSV options; `spec check`."""

import csv
import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.ingest.file_discovery import RawSelection
from etl.ingest.normalize import read_log
from etl.ingest.preview import columns_without_values, preview_sources
from etl.ingest.reprocess import reprocess_quarantine
from etl.ingest.run import ingest
from etl.ingest.timestamps import duration_micros, parse_time
from etl.spec import DataSpec, load_spec
from etl.spec.file_source import TimeUnit
from etl.spec.sources import AttributeSource
from etl.tables.lake import Lake
from gemline import main
from tests.etl.shop import SPEC
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAY = date(2026, 1, 2)
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
EPOCH_SECONDS = int(NOON.timestamp())


def shop_spec(folder: Path, app: Mapping[str, Any], **changes: object) -> DataSpec:
    """The shop's spec with other keys of the source `app`, and of the spec."""
    spec = yaml.safe_load(SPEC) | changes
    spec["sources"]["app"] |= app
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return load_spec(folder / "spec.yaml")


def event(at: object, **others: object) -> dict[str, object]:
    return {
        "id": "e1",
        "who": "u",
        "what": "i",
        "page": "home",
        "action": "shown",
        "at": at,
    } | others


def write_lines(file: Path, *records: Mapping[str, object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_events(spec: DataSpec, folder: Path) -> list[dict[str, Any]]:
    """The rows that ingest reads from the log `app`."""
    records = read_log(spec, "app", RawSelection(str(folder / "raw"), (DAY, DAY)))
    events = [row.asDict() for row in records.collect()]
    assert not any(event["reasons"] for event in events)
    return events


TIMES = [
    ("s", EPOCH_SECONDS), ("s", f"{EPOCH_SECONDS}.000"), ("ms", EPOCH_SECONDS * 1000),
    ("us", EPOCH_SECONDS * 10**6), ("ns", EPOCH_SECONDS * 10**9 + 999),
    ("iso", "2026-01-02T12:00:00Z"), ("iso", "2026-01-02T13:00:00.000+01:00"),
    ("iso", "2026-01-02 12:00:00"),
]  # fmt: skip


@pytest.mark.parametrize(("unit", "value"), TIMES, ids=str)
def test_every_unit_gives_the_same_time(
    spark: object, tmp_path: Path, unit: str, value: object
) -> None:
    spec = shop_spec(tmp_path, {"time_unit": unit})
    write_lines(tmp_path / "raw/app" / f"{DAY}.json", event(value))
    (stored,) = read_events(spec, tmp_path)
    assert stored["event_ts"] == EPOCH_SECONDS * 10**6


def test_iso_times_without_a_zone_are_local_times_of_the_spec(
    spark: object, tmp_path: Path
) -> None:
    spec = shop_spec(tmp_path, {"time_unit": "iso"}, time_zone="Europe/Berlin")
    local = NOON.astimezone(ZoneInfo("Europe/Berlin")).replace(tzinfo=None)
    write_lines(tmp_path / "raw/app" / f"{DAY}.json", event(local.isoformat()))
    (stored,) = read_events(spec, tmp_path)
    assert stored["event_ts"] == EPOCH_SECONDS * 10**6


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Shanghai"])
def test_timestamps_of_parquet_are_instants(
    spark: object, tmp_path: Path, zone: str | None
) -> None:
    spec = shop_spec(
        tmp_path,
        {"time_unit": "iso", "format": "parquet", "path": "app/{day}.parquet"},
        attributes={},
    )
    table = pa.table({name: [value] for name, value in event(0).items() if name != "at"})
    naive = NOON.replace(tzinfo=None)
    at = pa.array([NOON if zone else naive], pa.timestamp("us", tz=zone))
    (tmp_path / "raw/app").mkdir(parents=True)
    pq.write_table(table.append_column("at", at), tmp_path / "raw/app" / f"{DAY}.parquet")
    (stored,) = read_events(spec, tmp_path)
    assert stored["event_ts"] == EPOCH_SECONDS * 10**6


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_a_quarantined_record_of_parquet_keeps_its_time(
    spark: object, tmp_path: Path, zone: str | None
) -> None:
    """To the microsecond, so that a released record is the one of a corrected ingest."""
    columns = {"user": "who", "item": "what", "surface": "page", "type": "action"}
    keys = {"time_unit": "iso", "format": "parquet", "path": "app/{day}.parquet",
            "columns": columns | {"event_time": "at"}}  # fmt: skip
    spec = shop_spec(tmp_path, keys, attributes={}, max_bad_record_rate=0.6)
    at = [NOON.replace(tzinfo=None, microsecond=micros) for micros in (1, 123_450)]
    table = pa.table({name: [event(0)[name]] * 2 for name in ("who", "what", "page")})
    table = table.append_column("at", pa.array(at, pa.timestamp("us", tz=zone)))
    table = table.append_column("action", pa.array(["shown", "klick"]))
    (tmp_path / "raw/app").mkdir(parents=True)
    pq.write_table(table, tmp_path / "raw/app" / f"{DAY}.parquet")
    lake, raw = Lake(str(tmp_path / "lake"), spec), str(tmp_path / "raw")
    ingest(lake, raw, (DAY, DAY))
    types = {"types": {"shown": "shown", "klick": "click"}}
    corrected = Lake(lake.root, shop_spec(tmp_path, keys | types, attributes={}))
    assert reprocess_quarantine(corrected, (DAY, DAY))["released"] == 1
    released = rows(corrected, "events")
    ingest(corrected, raw, (DAY, DAY))
    assert rows(corrected, "events") == released and len(released) == 2


def test_invalid_times_are_null(spark: SparkSession) -> None:
    texts = ["soon", "", None, "2026-13-01T00:00:00Z", "99999999999999999999"]
    texts += ["12:30:00", "T12:30:00Z", "12:30"]  # without a date
    frame = spark.createDataFrame([(text,) for text in texts], "t string")
    spec = load_spec(Path("conf/specs/simulator.yaml"))
    units: list[TimeUnit] = ["s", "ms", "us", "ns", "iso"]
    columns = [parse_time(spec, unit, F.col("t")).alias(unit) for unit in units]
    for row in frame.select(*columns).collect():
        assert all(value is None for value in row), row


def test_integers_out_of_the_range_of_times_are_null(spark: SparkSession) -> None:
    """They may be in place of a missing value; a sum with them would stop the ingest of a day."""
    texts = [str(-(2**63)), str(2**63 - 1), "294247-01-10T04:00:54Z"]
    frame = spark.createDataFrame([(text,) for text in texts], "t string")
    spec, duration = load_spec(Path("conf/specs/simulator.yaml")), duration_micros("us", F.col("t"))
    times = [parse_time(spec, unit, F.col("t")) + duration for unit in ("us", "iso")]
    for row in frame.select(*times, duration).collect():
        assert all(value is None for value in row), row


def test_durations_are_rounded_down_to_microseconds(spark: SparkSession) -> None:
    micros = [0, 1, 999_999, 1_000_000, 123_456_789_012]
    texts = [f"{value // 10**6}.{value % 10**6:06}" for value in micros]
    frame = spark.createDataFrame([(text,) for text in texts], "t string")
    assert [row[0] for row in frame.select(duration_micros("s", F.col("t"))).collect()] == micros


@pytest.mark.parametrize(
    ("path", "file"),
    [("app/{day:%Y%m%d}/*.json", "app/20260102/a.json"),
     ("app/y={day:%Y}/m={day:%m}/d={day:%d}/*.json", "app/y=2026/m=01/d=02/a.json"),
     ("app/y={day:%Y}/m={day:%-m}/d={day:%-d}/*.json", "app/y=2026/m=1/d=2/a.json"),
     ("app/{day}/*/*.json", f"app/{DAY}/07/a.json")],
)  # fmt: skip
def test_days_in_paths_are_parsed_by_their_format(
    spark: object, tmp_path: Path, path: str, file: str
) -> None:
    spec = shop_spec(tmp_path, {"path": path})
    write_lines(tmp_path / "raw" / file, event(EPOCH_SECONDS))
    write_lines(tmp_path / "raw" / file.replace("02", "03").replace("d=2", "d=3"), event(1))
    (stored,) = read_events(spec, tmp_path)
    assert stored["day"] == DAY


def test_a_record_lands_on_the_day_in_its_path(spark: object, tmp_path: Path) -> None:
    """Also with another day of its own: no other run reads its file."""
    spec = shop_spec(tmp_path, {"day": {"column": "date"}})
    write_lines(tmp_path / f"raw/app/{DAY}.json", event(EPOCH_SECONDS, date="2026-01-03"))
    assert [stored["day"] for stored in read_events(spec, tmp_path)] == [DAY]


@given(day=st.dates(date(2000, 1, 1), date(2099, 12, 31)))
def test_the_day_is_parsed_back_from_a_path(day: date) -> None:
    for path in (
        "a/{day}/*.json",
        "a/{day:%Y%m%d}-*.csv",
        "y={day:%Y}/m={day:%-m}/d={day:%-d}/x.gz",
    ):
        source = AttributeSource(
            kind="attributes", entity="user", format="json", path=path, key="k"
        )
        assert source.day_of(source.path_on(day).replace("*", "part-7")) == day
        assert source.day_of("elsewhere/" + source.path_on(day)) is None


@pytest.mark.parametrize(
    "path", ["a/{day:%Y}/x.json", "a/{day:%Y%m%d%H}/x.json", "a/{day:x}/y.json"]
)
def test_a_path_with_an_incomplete_day_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match=r"\{day\} in a path"):
        AttributeSource(kind="attributes", entity="user", format="json", path=path, key="k")


@pytest.mark.parametrize("path", ["a/{day}/{part,chunk}-*.json", "a/{dya}.json"])
def test_braces_that_are_no_day_are_refused(path: str) -> None:
    """Spark would read them as alternatives, and the check of arrival as they are."""
    with pytest.raises(ValidationError, match=r"no braces but those of \{day\}: write \*"):
        AttributeSource(kind="attributes", entity="user", format="json", path=path, key="k")


NESTED = {"event": {"id": "e1", "user": {"id": "u"}, "at": EPOCH_SECONDS}, "what": "i",
          "page": "home", "actions": [{"name": "shown"}]}  # fmt: skip
PATHS = {"event_id": "event.id", "user": "event.user.id", "item": "what", "surface": "page",
         "event_time": "event.at"}  # fmt: skip


def test_nested_fields_of_json_are_read_by_their_path(spark: object, tmp_path: Path) -> None:
    spec = shop_spec(tmp_path, {"columns": PATHS | {"type": "actions[0].name"}})
    write_lines(tmp_path / "raw/app" / f"{DAY}.json", NESTED)
    (stored,) = read_events(spec, tmp_path)
    assert (stored["event_id"], stored["user_id"]) == ("e1", "u")
    assert stored["event_ts"] == EPOCH_SECONDS * 10**6


def test_nested_fields_of_parquet_are_read_by_their_path(spark: object, tmp_path: Path) -> None:
    changes = {"columns": PATHS, "types": {}, "format": "parquet", "path": "app/{day}.parquet"}
    spec = shop_spec(tmp_path, changes, attributes={})
    (tmp_path / "raw/app").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([NESTED]), tmp_path / "raw/app" / f"{DAY}.parquet")
    (stored,) = read_events(spec, tmp_path)
    assert (stored["event_id"], stored["user_id"]) == ("e1", "u")


TAGS = ("red", "a b", 'say "hi"')


@pytest.mark.parametrize("format_", ["json", "parquet", "csv", "separated"])
def test_lists_of_values_are_read_from_every_format(
    spark: object, tmp_path: Path, format_: str
) -> None:
    """In ascending order, without repetitions, empty values and null."""
    tags = {"type": "multi_categorical"} | ({"separator": "|."} if format_ == "separated" else {})
    attributes = {"context": {"tags": tags, "view": {"type": "vector", "width": 2}}}
    kind = "csv" if format_ == "separated" else format_
    app: dict[str, Any] = {"format": kind, "path": f"app/{{day}}.{kind}"}
    app |= {"csv": {"escape": '"'}} if kind == "csv" else {}
    spec = shop_spec(tmp_path, app, attributes=attributes)
    values: Any = [*TAGS, "", None, "red"]
    record = event(EPOCH_SECONDS, tags=values, view=[0.5, -1e-7])
    file = tmp_path / "raw/app" / f"{DAY}.{kind}"
    file.parent.mkdir(parents=True)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), file)
    elif kind == "json":
        write_lines(file, record)
    else:
        separated = " |. ".join([*TAGS, "", "red"])
        record |= {"tags": separated if format_ == "separated" else json.dumps(values)}
        with file.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, list(record))
            writer.writeheader()
            writer.writerow(record)
    (stored,) = read_events(spec, tmp_path)
    assert stored["ctx_tags"] == sorted(TAGS)
    assert stored["ctx_view"] == pytest.approx([0.5, -1e-7])
    assert stored["reasons"] == ""


def write_table(path: Path, format_: str, record: Mapping[str, object]) -> None:
    """Write one record that landed on DAY to the source in a folder."""
    table = pa.Table.from_pylist([dict(record)])
    if format_ == "delta":
        table = table.append_column("landed", pa.array([str(DAY)]))
        write_deltalake(path, table, partition_by=["landed"])
        return
    path.mkdir(parents=True)
    writer = {"csv": pa.csv.write_csv, "parquet": pq.write_table}[format_]
    writer(table, path / f"{DAY}.{format_}")


@pytest.mark.parametrize("format_", ["csv", "parquet", "delta"])
@pytest.mark.parametrize("log", ["app", "sales"])
def test_only_a_log_without_impressions_may_lack_columns_of_attributes(
    spark: object, tmp_path: Path, log: str, format_: str
) -> None:
    """Its events then have no value; columns that the source names may not be missing."""
    spec = yaml.safe_load(SPEC)
    path = {"path": log, "partition_column": "landed"}
    path = path if format_ == "delta" else {"path": f"{log}/{{day}}.{format_}"}
    spec["sources"][log] |= {"format": format_} | path
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    record = event(EPOCH_SECONDS) | ({"imp": "i1"} if log == "sales" else {})
    write_table(tmp_path / "raw" / log, format_, record)
    write_table(tmp_path / "short" / log, format_, {k: v for k, v in record.items() if k != "what"})

    def read(root: str) -> list[dict[str, Any]]:
        selection = RawSelection(str(tmp_path / root), (DAY, DAY))
        rows = read_log(load_spec(tmp_path / "spec.yaml"), log, selection).collect()
        return [row.asDict() for row in rows]

    if log == "sales":
        (stored,) = read("raw")
        assert (stored["item_id"], stored["ctx_phone"], stored["reasons"]) == ("i", None, "")
    else:
        with pytest.raises(UserError, match="names phone, which the files lack"):
            read("raw")
    with pytest.raises(UserError, match="what"):
        read("short")


def test_csv_is_read_with_its_options(spark: object, tmp_path: Path) -> None:
    header = ["id", "who", "what", "page", "action", "at", "phone"]
    options = {"delimiter": "\t", "quote": "'", "null_value": "\\N", "header": header}
    spec = shop_spec(tmp_path, {"format": "csv", "path": "app/{day}.tsv", "csv": options})
    (tmp_path / "raw/app").mkdir(parents=True)
    lines = [
        f"e1\t'u\t1'\ti\thome\tshown\t{EPOCH_SECONDS}\t\\N",
        f"e2\tu2\ti\thome\tshown\t{EPOCH_SECONDS}\tios",
    ]
    (tmp_path / "raw/app" / f"{DAY}.tsv").write_text("\n".join(lines) + "\n")
    first, second = sorted(read_events(spec, tmp_path), key=lambda row: str(row["event_id"]))
    assert first["user_id"] == "u\t1" and first["ctx_phone"] is None
    assert second["ctx_phone"] == "ios"


def test_options_of_csv_are_refused_for_other_formats(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="`csv` has no meaning for files of the format json"):
        shop_spec(tmp_path, {"csv": {"delimiter": ";"}})


def test_a_check_predicts_the_result_of_ingest(spark: object, tmp_path: Path) -> None:
    spec = shop_spec(tmp_path, {})
    good = [event(EPOCH_SECONDS + i, id=f"e{i}") for i in range(30)]
    bad = [event("soon", id="b1"), event(EPOCH_SECONDS, id="b2", page="moon"), {}]
    write_lines(tmp_path / "raw/app" / f"{DAY}.json", *good, *bad)
    before = sorted(tmp_path.rglob("*"))
    app, sales = preview_sources(spec, str(tmp_path / "raw"), 1000)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written
    assert sales.records == 0 and sales.error is None
    lake = Lake(str(tmp_path / "lake"), spec)
    ingest(lake, str(tmp_path / "raw"), (DAY, DAY))
    quarantined = rows(lake, "quarantine")
    assert app.records == 33 and app.day == DAY
    assert sum(app.accepted.values()) == len(rows(lake, "events")) == 30
    assert app.quarantined == len(quarantined) == 3
    assert set(app.reasons) == {reason for row in quarantined for reason in row["reasons"]}


def test_a_check_names_columns_that_no_sampled_record_has(spark: object, tmp_path: Path) -> None:
    """JSON has no header, so that a misspelt column would only be null."""
    spec = shop_spec(tmp_path, {})
    file = tmp_path / "raw/app" / f"{DAY}.json"
    write_lines(file, event(EPOCH_SECONDS), event(EPOCH_SECONDS, id="e2", fone="ios"))
    assert columns_without_values(preview_sources(spec, str(tmp_path / "raw"), 9)) == ["phone"]
    write_lines(file, event(EPOCH_SECONDS), event(EPOCH_SECONDS, id="e2", phone="ios"))
    assert columns_without_values(preview_sources(spec, str(tmp_path / "raw"), 9)) == []


def test_a_check_fails_where_a_day_would_be_refused(
    spark: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop_spec(tmp_path, {})
    write_lines(
        tmp_path / "raw/app" / f"{DAY}.json", *[event("soon", id=f"e{i}") for i in range(9)]
    )
    command = ["spec", "check", str(tmp_path / "spec.yaml"), "--raw", str(tmp_path / "raw")]
    assert main(command) == 2
    assert "100% would be quarantined" in " ".join(capsys.readouterr().out.split())
