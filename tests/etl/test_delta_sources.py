"""Delta tables as sources: the same rows as files, their days, and what is refused."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from dags.runner import raw_file_states
from etl.attributes import load_attributes
from etl.errors import UserError
from etl.ingest.arrival import day_file_states, has_arrived
from etl.ingest.preview import preview_sources
from etl.ingest.run import ingest
from etl.spec import DataSpec, load_spec
from etl.tables.lake import Lake
from tests.etl.shop import SPEC
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAYS = [date(2026, 1, 2) + timedelta(days=number) for number in range(3)]
NOON = 1767355200
DAY_SECONDS = 86_400


def write_spec(folder: Path, app: Mapping[str, Any], **others: object) -> DataSpec:
    """The shop's spec with other keys of the source `app`; None removes a key."""
    spec = yaml.safe_load(SPEC) | others
    keys = spec["sources"]["app"] | app
    spec["sources"]["app"] = {name: value for name, value in keys.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return load_spec(folder / "spec.yaml")


def events(day: date, number: int = 6) -> pa.Table:
    """Events of a day: some with a phone, one without a user."""
    at = NOON + DAY_SECONDS * (day - DAYS[0]).days
    return pa.table(
        {
            "id": [f"{day}-{i}" for i in range(number)],
            "who": [None, *(f"u{i}" for i in range(1, number))],
            "what": ["i"] * number,
            "page": ["home"] * number,
            "action": ["shown"] * number,
            "at": [at + i for i in range(number)],
            "phone": [("ios", None)[i % 2] for i in range(number)],
        }
    )


def rows_on(day: date, as_text: bool = False) -> pa.Table:
    """Events of a day with the column `landed`."""
    table = events(day)
    return table.append_column("landed", pa.array([str(day) if as_text else day] * len(table)))


def write_delta(folder: Path, days: Sequence[date], as_text: bool = False) -> None:
    """Append events of some days to a Delta table that is partitioned by their day."""
    for day in days:
        write_deltalake(folder, rows_on(day, as_text), partition_by=["landed"], mode="append")


def stored(lake: Lake) -> list[list[dict[str, Any]]]:
    """Events, quarantine without files, and metrics of a lake."""
    ignored = {"source_file", "line", "payload"}
    return [
        sorted(
            ({k: v for k, v in row.items() if k not in ignored} for row in rows(lake, name)),
            key=str,
        )
        for name in ("events", "quarantine", "ingest_metrics")
    ]


def ingested(folder: Path, spec: DataSpec, raw: Path, days: Sequence[date]) -> Lake:
    lake = Lake(str(folder / "lake"), spec)
    ingest(lake, str(raw), (days[0], days[-1]))
    return lake


DELTA = {"format": "delta", "path": "app", "partition_column": "landed"}
LENIENT: dict[str, object] = {"max_bad_record_rate": 0.5}


@pytest.fixture(scope="module")
def from_files(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> list[list[dict[str, Any]]]:
    """What an ingest of JSON files of the first two days stores."""
    folder = tmp_path_factory.mktemp("files")
    spec = write_spec(folder, {}, **LENIENT)
    (folder / "raw/app").mkdir(parents=True)
    for day in DAYS[:2]:
        lines = events(day).to_pandas().to_json(orient="records", lines=True)
        (folder / "raw/app" / f"{day}.json").write_text(lines)
    return stored(ingested(folder, spec, folder / "raw", DAYS[:2]))


@pytest.mark.parametrize("as_text", [False, True], ids=["date", "text"])
def test_a_delta_table_is_read_like_files_of_the_same_days(
    spark: SparkSession, tmp_path: Path, from_files: list[list[dict[str, Any]]], as_text: bool
) -> None:
    spec = write_spec(tmp_path, DELTA, **LENIENT)
    write_delta(tmp_path / "my logs" / "app", DAYS, as_text)
    assert stored(ingested(tmp_path, spec, tmp_path / "my logs", DAYS[:2])) == from_files


@pytest.fixture
def delta_defaults(spark: SparkSession) -> Iterator[SparkSession]:
    """A session that can read deletion vectors: without data skipping, Delta refuses them."""
    spark.conf.set("spark.databricks.delta.stats.skipping", "true")
    yield spark
    spark.conf.set("spark.databricks.delta.stats.skipping", "false")


def test_deleted_rows_are_not_read(
    delta_defaults: SparkSession, tmp_path: Path, from_files: list[list[dict[str, Any]]]
) -> None:
    spark = delta_defaults
    table = tmp_path / "raw/app"
    write_delta(table, DAYS[1:])
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES (delta.enableDeletionVectors = true)")
    kept = rows_on(DAYS[0]).to_pandas()
    both = pd.concat([kept, kept.assign(id="removed")]).sort_values("at")
    rows_of_one_file = spark.createDataFrame(
        both, spark.read.format("delta").load(str(table)).schema
    )
    rows_of_one_file.coalesce(1).write.format("delta").mode("append").save(str(table))
    spark.sql(f"DELETE FROM delta.`{table}` WHERE id = 'removed'")
    assert any("deletionVector" in log.read_text() for log in table.glob("_delta_log/*.json"))
    spec = write_spec(tmp_path, DELTA, **LENIENT)
    assert stored(ingested(tmp_path, spec, tmp_path / "raw", DAYS[:2])) == from_files


@pytest.fixture
def catalog_table(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    write_delta(tmp_path / "elsewhere", DAYS)
    spark.sql(f"CREATE TABLE shop_events USING delta LOCATION '{tmp_path}/elsewhere'")
    yield "shop_events"
    spark.sql("DROP TABLE shop_events")


def test_a_table_of_the_catalog_is_read_by_its_name(
    tmp_path: Path, from_files: list[list[dict[str, Any]]], catalog_table: str
) -> None:
    by_name = DELTA | {"path": None, "table": catalog_table, "unchanged_for": "0s"}
    spec = write_spec(tmp_path, by_name, **LENIENT)
    (tmp_path / "raw").mkdir()
    assert stored(ingested(tmp_path, spec, tmp_path / "raw", DAYS[:2])) == from_files
    assert has_arrived(spec, str(tmp_path / "raw"), "app", DAYS[0])


def test_a_day_has_arrived_when_its_files_have_not_changed_for_a_while(tmp_path: Path) -> None:
    raw, table = str(tmp_path / "raw"), tmp_path / "raw/app"
    write_delta(table, DAYS[:2])
    at_once, later = (write_spec(tmp_path, DELTA | {"unchanged_for": s}) for s in ("0s", "10m"))
    assert has_arrived(at_once, raw, "app", DAYS[0])
    assert not has_arrived(later, raw, "app", DAYS[0]), "rows may still be added"
    assert not has_arrived(at_once, raw, "app", DAYS[2])
    assert not has_arrived(at_once, str(tmp_path), "app", DAYS[0]), "there is no table yet"
    before = {day: day_file_states(at_once, raw, day) for day in DAYS}
    logs = ("event_log",)
    stats = raw_file_states(at_once, raw, logs, (DAYS[0], DAYS[0]))
    write_delta(table, [DAYS[1]])
    changed = [day for day in DAYS if day_file_states(at_once, raw, day) != before[day]]
    assert changed == [DAYS[1]]
    assert raw_file_states(at_once, raw, logs, (DAYS[0], DAYS[0])) == stats
    assert raw_file_states(at_once, raw, logs, (DAYS[0], DAYS[1])) != stats


def test_a_check_samples_the_latest_day_of_a_table(spark: SparkSession, tmp_path: Path) -> None:
    write_delta(tmp_path / "raw/app", DAYS)
    app, _ = preview_sources(write_spec(tmp_path, DELTA), str(tmp_path / "raw"), 100)
    assert (app.day, app.records, app.quarantined) == (DAYS[2], 6, 1)


def test_a_table_without_days_is_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    users = {"kind": "attributes", "entity": "user", "format": "delta", "path": "users",
             "key": "who", "select": {"plan": "upper(tier)"}, "where": "NOT test"}  # fmt: skip
    base = yaml.safe_load(SPEC)
    sources = base["sources"] | {"users": users}
    attributes = base["attributes"] | {"user": {"plan": {"type": "categorical"}}}
    spec = write_spec(tmp_path, {}, attributes=attributes, sources=sources)
    table = {"who": ["u1", "u2", "u3"], "tier": ["a", "b", "c"], "test": [False, True, False]}
    write_deltalake(tmp_path / "raw/users", pa.table(table))
    lake = Lake(str(tmp_path / "lake"), spec)
    load_attributes(lake, str(tmp_path / "raw"), (DAYS[0], DAYS[0]))
    versions = {row["user_id"]: row["attr_plan"] for row in rows(lake, "attributes_user")}
    assert versions == {"u1": "A", "u3": "C"}


@pytest.mark.parametrize("table", [{"path": "sales"}, {"path": None, "table": "ads.nothing"}])
def test_an_optional_table_may_be_missing(
    spark: SparkSession, tmp_path: Path, table: dict[str, str | None]
) -> None:
    base = yaml.safe_load(SPEC)
    sales = base["sources"]["sales"] | {"format": "delta", "partition_column": "landed"} | table
    sources = base["sources"] | {"sales": sales}
    spec = write_spec(tmp_path, DELTA, sources=sources, **LENIENT)
    assert spec.sources["sales"].optional
    write_delta(tmp_path / "raw/app", DAYS[:1])
    lake = ingested(tmp_path, spec, tmp_path / "raw", DAYS[:1])
    assert len(rows(lake, "events")) == 5
    raw = str(tmp_path / "raw")
    assert [preview.error for preview in preview_sources(spec, raw, 9)] == [None, None]


def refused(folder: Path, days: Sequence[date] = DAYS[:1], **app: object) -> str:
    spec = write_spec(folder, DELTA | app, **LENIENT)
    with pytest.raises(UserError) as error:
        ingested(folder, spec, folder / "raw", days)
    assert not (folder / "lake" / "events").exists()
    return str(error.value)


def test_what_cannot_be_read_is_refused_by_name(spark: SparkSession, tmp_path: Path) -> None:
    write_delta(tmp_path / "raw/app", DAYS[:2])
    assert "has no rows of 2026-01-04" in refused(tmp_path, DAYS)
    message = refused(tmp_path, partition_column="day")
    assert "day is no partition column of app; it is partitioned by landed" in message
    assert "cannot be read as a Delta table" in refused(tmp_path, path="sales")
    assert "ads.nothing is no Delta table" in refused(tmp_path, path=None, table="ads.nothing")
    weekly = rows_on(DAYS[0], as_text=True).set_column(7, "landed", pa.array(["2026-W01"] * 6))
    write_deltalake(tmp_path / "raw/weekly", weekly, partition_by=["landed"])
    assert "has the partition landed=2026-W01" in refused(tmp_path, path="weekly")
    dayless = rows_on(DAYS[0]).set_column(7, "landed", pa.array([DAYS[0]] * 5 + [None]))
    write_deltalake(tmp_path / "raw/dayless", dayless, partition_by=["landed"])
    message = refused(tmp_path, path="dayless")
    assert "has rows without a value of its partition column landed" in message
    columns = yaml.safe_load(SPEC)["sources"]["app"]["columns"] | {"user": "visitor"}
    assert "the spec names visitor" in refused(tmp_path, columns=columns)
    assert DeltaTable(tmp_path / "raw/app").version() == 1, "it is only read"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "json", "path": "a/{day}"}, "are for Delta, not json"),
        ({"path": None}, "a Delta table has a `path` or is a `table`"),
        ({"table": "ads.events"}, "give one"),
        ({"table": "x; DROP TABLE y", "path": None}, "pattern"),
        ({"path": "app/{day}"}, "the path of a Delta table is its folder"),
        ({"success_file": "_SUCCESS"}, "needs no `success_file`"),
        ({"format": "json", "path": None, "partition_column": None}, "`path` is missing"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    tmp_path: Path, change: Mapping[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write_spec(tmp_path, {**DELTA, **change})
