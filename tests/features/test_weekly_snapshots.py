"""State that is carried forward equals that of all earlier days, which are not read again."""

import json
import random
import shutil
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.attribute_versions import build_version_snapshots, first_item_values, versions_from
from etl.attributes import load_attributes
from etl.errors import UserError
from etl.ingest.run import ingest
from etl.spec import load_spec
from etl.spec.attributes import CategoricalAttribute
from etl.spec.units import DAY, MICROS, date_range
from etl.tables import arrow, schemas, spark_io, user_schemas
from etl.tables.lake import Lake
from etl.tables.weekly_snapshots import remove_snapshots_from, snapshot_days
from features.encoding.scalar import encode_categorical
from features.history.build import build_history
from features.history.event_counts import event_counts_before
from features.items import index_items
from ranking.feature_store.store import STORE_TABLES, StoreMetadata, create_store
from ranking.feature_store.table_source import TableSource
from ranking.inputs.attribute_versions import readable_versions
from tests.oracle.disorder import FIRST, build_lake, generate_records
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAYS = 5
(SNAPSHOT_DAY,) = snapshot_days(FIRST, FIRST + timedelta(days=DAYS - 1))
LATER = SNAPSHOT_DAY + timedelta(days=2)
PERIOD = date(2026, 3, 3), date(2026, 3, 12)
SPEC = """
name: versions
surfaces: {home: {}}
allowed_lateness: 1d
events: {shown: {role: impression}, click: {role: outcome}}
objectives: {click: {event: click, window: 1h}}
attributes:
  user: {plan: {type: categorical}}
  item: {brand: {type: categorical}}
sequences: {behaviour: {}}
counters: {windows: [1d], events: [shown], keys: [[user]]}
sources:
  log:
    kind: event_log
    format: json
    path: log/{day}.json
    columns: {event_id: id, user: who, item: what, surface: page, type: action, event_time: at,
              ingest_time: logged}
  users: {kind: attributes, entity: user, format: json, path: "user/{day}.json", key: id,
          valid_from: since, time_unit: s, delay: 10m}
  items: {kind: attributes, entity: item, format: json, path: "item/{day}.json", key: id,
          valid_from: since, time_unit: s}
"""
ATTRIBUTES = {"user": "plan", "item": "brand"}


def remove_files_until(lake: Lake, name: str, day: date) -> None:
    """Remove the data files of a table up to a day: reading them raises an error from then on."""
    for path in Path(lake.root, name).rglob("*.parquet"):
        if "_delta_log" not in path.parts and f"day={day}" >= path.relative_to(lake.root).parts[1]:
            path.unlink()


def counts(frame: DataFrame) -> dict[str, int]:
    return {row["user_id"]: row["events"] for row in frame.collect()}


def test_events_of_users_are_counted_from_the_latest_snapshot_on(
    spark: object, tmp_path: Path
) -> None:
    lake = build_lake(tmp_path, generate_records(3, 6, DAYS), [(0, 1), (2, DAYS - 1)])
    expected: dict[str, int] = {}
    for row in rows(lake, "events"):
        if row["visible_ts"] < lake.spec.day_start(LATER):
            expected[row["user_id"]] = expected.get(row["user_id"], 0) + 1
    schema, snapshots = user_schemas.user_event_counts(lake.spec), rows(lake, "user_event_counts")
    assert {row["day"] for row in snapshots} == {SNAPSHOT_DAY}
    wrong = spark_io.read_table(lake, schema).withColumn("events", F.col("events") + 1)
    spark_io.replace_partitions(lake, schema, wrong, f"day = '{SNAPSHOT_DAY}'", {})
    build_history(lake, (FIRST, FIRST))
    assert rows(lake, "user_event_counts") == snapshots, "an earlier day was built again"
    version = lake.version("history")
    assert counts(event_counts_before(lake, version, LATER)) == expected
    remove_files_until(lake, "history", SNAPSHOT_DAY)
    assert counts(event_counts_before(lake, version, LATER)) == expected


def write_versions(raw: Path, lake: Lake, entity: str, rng: random.Random) -> list[dict[str, Any]]:
    """Files of all days; returns their rows with `landing_day` and `valid_from` (seconds)."""
    written = []
    (raw / entity).mkdir(parents=True)
    for day in date_range(*PERIOD):
        start, lines = lake.spec.day_start(day), []
        for key in rng.sample("abcdefgh", rng.randint(1, 8)):
            since = start + rng.choice((-DAY, 0, rng.randrange(DAY), rng.randrange(6 * DAY)))
            lines.append({"id": key, "since": since, ATTRIBUTES[entity]: rng.choice("xyz")})
            written.append(lines[-1] | {"day": day, "valid_from": max(since, start)})
        (raw / entity / f"{day}.json").write_text("\n".join(map(json.dumps, lines)))
    return written


def values_as_of(versions: list[dict[str, Any]], second: int) -> dict[str, str]:
    """The value of each key at a second, from dictionaries with `id`, `valid_from` and `value`."""
    known = [version for version in versions if version["valid_from"] < second]
    known.sort(key=lambda version: (version["valid_from"], version["day"]))
    return {version["id"]: version["value"] for version in known}


@pytest.fixture(scope="module")
def loaded_once(
    spark: object, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Lake, dict[str, list[dict[str, Any]]]]:
    """A lake with the attributes of a period, loaded in three runs, and what was in the files."""
    tmp_path = tmp_path_factory.mktemp("versions")
    (tmp_path / "spec.yaml").write_text(SPEC)
    lake, rng = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml")), random.Random(1)
    written = {}
    for entity, name in ATTRIBUTES.items():
        delay = 600 if entity == "user" else 0
        written[entity] = [
            row | {"valid_from": row["valid_from"] + delay, "value": row[name]}
            for row in write_versions(tmp_path / "raw", lake, entity, rng)
        ]
    first, last = PERIOD
    for start, stop in ((0, 4), (5, 5), (6, (last - first).days)):
        days = first + timedelta(days=start), first + timedelta(days=stop)
        load_attributes(lake, str(tmp_path / "raw"), days)
    return lake, written


@pytest.fixture
def loaded(
    loaded_once: tuple[Lake, dict[str, list[dict[str, Any]]]], tmp_path: Path
) -> tuple[Lake, dict[str, list[dict[str, Any]]]]:
    """The same, in a folder of the test."""
    lake, written = loaded_once
    shutil.copytree(Path(lake.root).parent, tmp_path, dirs_exist_ok=True)
    return Lake(str(tmp_path / "lake"), lake.spec), written


@pytest.mark.parametrize("entity", ATTRIBUTES)
def test_versions_of_a_day_are_those_of_all_days_before_it(
    loaded: tuple[Lake, dict[str, list[dict[str, Any]]]], entity: str
) -> None:
    lake, written = loaded
    for day in (PERIOD[0] + timedelta(days=number) for number in (4, 6, 9)):
        stored = [
            {
                "id": row[f"{entity}_id"],
                "value": row[f"attr_{ATTRIBUTES[entity]}"],
                "valid_from": row["valid_from"] // MICROS["s"],
                "day": row["day"],
            }
            for row in versions_from(lake, entity, day).collect()
        ]
        arrived = [row for row in written[entity] if row["day"] < day]
        stored = [row for row in stored if row["day"] < day]
        start = lake.spec.day_start(day)
        for second in range(start + 1, start + 8 * DAY, DAY // 3):
            assert values_as_of(stored, second) == values_as_of(arrived, second), (day, second)


def test_versions_of_days_before_the_latest_snapshot_are_not_read(
    loaded: tuple[Lake, dict[str, list[dict[str, Any]]]],
) -> None:
    lake, _ = loaded
    snapshot_day = snapshot_days(*PERIOD)[-1]
    expected = versions_from(lake, "user", PERIOD[1]).toArrow()
    remove_files_until(lake, "attributes_user", snapshot_day)
    assert (
        versions_from(lake, "user", PERIOD[1])
        .toArrow()
        .sort_by("user_id")
        .equals(expected.sort_by("user_id"))
    )


@pytest.mark.parametrize("entity", ATTRIBUTES)
def test_a_feature_store_has_the_versions_of_all_days_from_a_snapshot(
    loaded: tuple[Lake, dict[str, list[dict[str, Any]]]], entity: str, tmp_path: Path
) -> None:
    """Counter keys of items are in their first version, also if no event has named them yet."""
    lake, _ = loaded
    data_until = lake.spec.day_end(PERIOD[1])
    metadata = StoreMetadata(
        spec=lake.spec, sequence="behaviour", history_length=1, data_until=data_until
    )

    def versions_of_store(name: str) -> list[dict[bytes, bytes]]:
        store = create_store(tmp_path / name, metadata)
        TableSource(lake, store, PERIOD[1], 0).write_attribute_versions(entity)
        with store.read_transaction() as txn:
            found = [dict(txn.iterate_from(table, b"\0")) for table in STORE_TABLES]
        store.close()
        return found

    remove_snapshots_from(lake, schemas.attribute_snapshots(lake.spec, entity), PERIOD[0])
    expected = versions_of_store("all days")
    build_version_snapshots(lake, entity, PERIOD[0])
    remove_files_until(lake, f"attributes_{entity}", snapshot_days(*PERIOD)[0])
    assert versions_of_store("from a snapshot") == expected


@pytest.mark.parametrize("entity", ATTRIBUTES)
def test_versions_are_the_same_without_spark(
    loaded: tuple[Lake, dict[str, list[dict[str, Any]]]], entity: str
) -> None:
    lake, _ = loaded
    for day in (PERIOD[0] + timedelta(days=number) for number in (0, 6, 9)):
        expected = versions_from(lake, entity, day).toArrow()
        order = [(name, "ascending") for name in expected.column_names]
        found = readable_versions(lake, entity, day).select(expected.column_names)
        assert found.sort_by(order).to_pylist() == expected.sort_by(order).to_pylist(), day


def ingest_impressions(lake: Lake, raw: Path, day: date, items: str) -> None:
    """Ingest a day with one impression of each item, at midnight."""
    start = lake.spec.day_start(day) * 1000
    event = {"who": "u", "page": "home", "action": "shown", "at": start, "logged": start}
    lines = [json.dumps(event | {"id": item, "what": item}) for item in items]
    (raw / "log").mkdir()
    (raw / "log" / f"{day}.json").write_text("\n".join(lines))
    ingest(lake, str(raw), (day, day))


def test_versions_of_a_new_item_are_those_that_requests_can_read(
    loaded: tuple[Lake, dict[str, list[dict[str, Any]]]], tmp_path: Path
) -> None:
    lake, written = loaded
    last = PERIOD[1]
    ingest_impressions(lake, tmp_path / "raw", last, "abcdefgh")

    shutil.copytree(lake.root, tmp_path / "intact")

    def indexed_versions() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        for name in ("items", "item_versions", "first_item_versions"):
            shutil.rmtree(Path(lake.root, name), ignore_errors=True)
        index_items(lake, (last, last))
        return rows(lake, "item_versions"), rows(lake, "first_item_versions")

    versions, first_versions = indexed_versions()
    ids = {row["item_index"]: row["item_id"] for row in rows(lake, "items")}
    brand = lake.spec.attributes.item["brand"]
    assert isinstance(brand, CategoricalAttribute)
    brands = {encode_categorical(brand, value): value for value in "xyz"}
    stored = [
        {
            "id": ids[row["item_index"]],
            "value": brands[row["item_brand"]],
            "valid_from": row["valid_from"] // MICROS["s"],
            "day": row["day"],
        }
        for row in versions
    ]
    start = lake.spec.day_start(last)
    for second in range(start - lake.spec.allowed_lateness, start + 8 * DAY, DAY // 4):
        assert values_as_of(stored, second) == values_as_of(written["item"], second), second
    assert len(stored) < len(rows(lake, "attributes_item")), "superseded ones are not stored"
    first: dict[str, int] = {}
    for row in written["item"]:
        first[row["id"]] = min(row["valid_from"], first.get(row["id"], row["valid_from"]))
    since = {ids[row["item_index"]]: row["valid_from"] // MICROS["s"] for row in first_versions}
    assert since == first

    remove_files_until(lake, "attributes_item", snapshot_days(*PERIOD)[0])
    assert indexed_versions() == (versions, first_versions), "earlier days were read"
    shutil.rmtree(lake.root)
    shutil.copytree(tmp_path / "intact", lake.root)
    remove_snapshots_from(lake, schemas.attribute_snapshots(lake.spec, "item"), PERIOD[0])
    assert indexed_versions() == (versions, first_versions), "they depend on snapshots"


def test_attribution_reads_the_first_version_of_each_item_from_a_snapshot(
    loaded: tuple[Lake, dict[str, list[dict[str, Any]]]],
) -> None:
    lake, written = loaded
    remove_files_until(lake, "attributes_item", snapshot_days(*PERIOD)[-1])
    first: dict[str, str] = {}
    for row in sorted(written["item"], key=lambda row: (row["valid_from"], row["day"])):
        first.setdefault(row["id"], row["value"])
    brands = first_item_values(lake, "brand").collect()
    assert {row["item_id"]: row["item_attribute"] for row in brands} == first


def test_versions_of_items_that_repeat_the_previous_one_are_not_stored(
    loaded: tuple[Lake, dict[str, list[dict[str, Any]]]], tmp_path: Path
) -> None:
    lake, written = loaded
    stored = len(arrow.snapshot(lake, schemas.attributes(lake.spec, "item")).read())
    assert stored < len(written["item"])
    assert lake.count_rows("attributes_user") == len(written["user"])
    at_once = Lake(str(tmp_path / "at_once"), lake.spec)
    load_attributes(at_once, str(tmp_path / "raw"), PERIOD)
    for name in ("attributes_item", "attributes_item_snapshots", "attributes_user_snapshots"):
        assert rows(at_once, name) == rows(lake, name), name


def test_an_earlier_day_of_items_is_not_loaded_alone(
    loaded: tuple[Lake, dict[str, list[dict[str, Any]]]], tmp_path: Path
) -> None:
    """Later days were compared with what it stored."""
    lake, _ = loaded
    first, last = PERIOD
    start, log = lake.spec.day_start(last), tmp_path / "raw" / "log" / f"{last}.json"
    event = {"id": "1", "who": "a", "what": "b", "page": "home", "action": "shown"}
    log.parent.mkdir()
    log.write_text(json.dumps(event | {"at": start * 1000, "logged": start * 1000}))
    ingest(lake, str(tmp_path / "raw"), (last, last))
    before = rows(lake, "attributes_item")
    with pytest.raises(UserError, match=f"--days {first}:{last}"):
        load_attributes(lake, str(tmp_path / "raw"), (first, first))
    load_attributes(lake, str(tmp_path / "raw"), PERIOD)
    assert rows(lake, "attributes_item") == before
