"""Users who are erased are in no table, and a rebuild from raw logs does not bring them back."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.attributes import load_attributes
from etl.erasure.erased_users import erased_until, payload_words, record_erased_users
from etl.erasure.hashes import SALT_PROPERTY, create_salt, read_salt
from etl.erasure.tables import ErasureScope, erase_from_tables
from etl.errors import UserError
from etl.ingest.reprocess import reprocess_quarantine
from etl.ingest.run import ingest
from etl.spec import DataSpec, load_spec
from etl.spec.units import DAY, MICROS
from etl.tables import label_schemas, step_state
from etl.tables.atomic_io import remove_folder
from etl.tables.lake import Lake
from etl.tables.maintenance import expire_days, vacuum_lake
from etl.tables.schemas import table_registry
from etl.tables.uri import resolve_uri
from features.examples import build_examples
from features.validation import validate_examples
from gemline import main
from tests.conftest import SPEC as SIMULATOR_SPEC
from tests.pipeline import TABLES, build_tables, rows

pytestmark = pytest.mark.spark

DAY_1, DAY_2 = date(2026, 1, 3), date(2026, 1, 4)  # the second has weekly snapshots
RAW_TABLES = ("events", "excluded_events", "quarantine", "ingest_metrics", "attributes_user")
ERASED = "user-1"
# One event is visible on the next day only, and the last one is too late.
SECONDS = (0, 60, 120, 180, 240, 300, 84_600, -10 * DAY)
SPEC = """
name: erasure
buckets: 1
max_bad_record_rate: 0.9
allowed_lateness: 1d
surfaces: {home: {}}
events:
  shown: {role: impression}
  click: {role: outcome}
objectives: {click: {event: click, window: 1h, label_grace_period: 1h}}
attributes: {user: {plan: {type: categorical}}}
sequences: {behaviour: {}}
counters: {windows: [1d], events: [shown], keys: [[user]]}
sources:
  log:
    kind: event_log
    format: json
    path: log/{day}.json
    time_unit: s
    delay: 1h
    columns: {event_id: id, user: who, item: what, surface: page, type: action, event_time: at,
              ingest_time: logged}
  users: {kind: attributes, entity: user, format: json, path: "users/{day}.json", key: who}
"""


def write_logs(raw: Path, spec: DataSpec, day: date, users: tuple[str, ...]) -> None:
    """Eight events of each user, two bad records, and a plan; all are logged on the day."""
    start = spec.day_start(day)
    lines = []
    for number, user in enumerate(users):
        for k, second in enumerate(SECONDS):
            event = {
                "id": f"{day} {number} {k}", "who": user, "what": f"item-{k}", "page": "home",
                "action": "click" if k % 3 == 2 else "shown", "at": start + second + number,
                "logged": start + max(second, 0) + number,
            }  # fmt: skip
            lines.append(json.dumps(event))
        lines.append(json.dumps(event | {"page": "elsewhere", "id": f"{number}"}))
        lines.append(f'{{"id": "cut off {number}", "who": "{user}", "what')
    plans = "\n".join(json.dumps({"who": user, "plan": "free"}) for user in users)
    for name, text in (("log", "\n".join(lines)), ("users", plans)):
        (raw / name).mkdir(parents=True, exist_ok=True)
        (raw / name / f"{day}.json").write_text(text + "\n")


@pytest.fixture
def logged(spark: SparkSession, tmp_path: Path) -> tuple[Lake, Path]:
    """A lake with a day of three users, and its raw logs."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    write_logs(tmp_path / "raw", lake.spec, DAY_1, (ERASED, "user-11", "user-2"))
    build_tables(lake, tmp_path / "raw", (DAY_1, DAY_1))
    return lake, tmp_path / "raw"


def stored(lake: Lake) -> dict[str, list[dict[str, Any]]]:
    return {name: rows(lake, name) for name in TABLES}


def mentions_user(row: dict[str, Any]) -> bool:
    return f"'{ERASED}'" in repr(row) or f'"{ERASED}"' in repr(row)


def known_second(lake: Lake, row: dict[str, Any]) -> int:
    """When a row became known: its event was visible, or its day began."""
    return int(row.get("visible_ts") or lake.spec.day_start(row["day"]))


def erase(lake: Lake, users: DataFrame) -> dict[str, int]:
    record_erased_users(lake, users, erased_until(lake, None, now=0) * MICROS["s"], DAY_2)
    return erase_from_tables(ErasureScope.of_users(lake, users, before=None))


def test_erased_users_are_in_no_table_and_do_not_return_with_their_logs(
    spark: SparkSession, logged: tuple[Lake, Path]
) -> None:
    lake, raw = logged
    users = spark.createDataFrame(pa.table({"user_id": [ERASED, "never seen"]}))
    before = stored(lake)
    erased = erase(lake, users)
    after = stored(lake)
    for name, remaining in after.items():
        if name == "ingest_metrics":
            continue
        assert remaining == [row for row in before[name] if not mentions_user(row)], name
        assert erased.get(name, 0) == len(before[name]) - len(remaining), name
    for name in ("events", "excluded_events", "quarantine", "history", "examples", "impressions"):
        assert erased[name] > 0, f"{name}: the test has nothing to erase there"
    (metrics,) = after["ingest_metrics"]
    assert metrics["read"] == 2 * 10, "as if the others alone had been logged"

    write_logs(raw, lake.spec, DAY_2, (ERASED, "user-2"))
    ingest(lake, str(raw), (DAY_1, DAY_2))
    load_attributes(lake, str(raw), (DAY_1, DAY_1))
    for name in RAW_TABLES:
        of_day = [row for row in rows(lake, name) if row["day"] == DAY_1]
        assert of_day == after[name], f"{name}: ingest does not bring users back"
    returned = {row["day"] for row in rows(lake, "events") if row["user_id"] == ERASED}
    assert returned == {DAY_2}, "what is logged after the erasure is of a new user"


def test_events_that_were_logged_before_the_erasure_do_not_return_if_they_are_ingested_after_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Neither with the log of the day of the erasure, nor if a later one delivers them again."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    start, now = lake.spec.day_start(DAY_1), 150
    users = spark.createDataFrame(pa.table({"user_id": [ERASED]}))
    until_ts = erased_until(lake, None, start + now) * MICROS["s"]
    record_erased_users(lake, users, until_ts, DAY_1)
    write_logs(tmp_path / "raw", lake.spec, DAY_1, (ERASED, "user-2"))
    deliver_again(tmp_path / "raw")
    for day in (DAY_1, DAY_2):
        ingest(lake, str(tmp_path / "raw"), (day, day))
    logged_ts = {row["ingest_ts"] for row in rows(lake, "events") if row["user_id"] == ERASED}
    assert logged_ts == {(start + second) * MICROS["s"] for second in SECONDS if second > now}


def deliver_again(raw: Path) -> None:
    """Write the log of the second day as a copy of that of the first."""
    log = raw / "log"
    (log / f"{DAY_2}.json").write_text((log / f"{DAY_1}.json").read_text())


def test_events_that_are_delivered_again_after_the_erasure_do_not_return(
    spark: SparkSession, logged: tuple[Lake, Path]
) -> None:
    """Nothing is left of which the copies, which become visible with their later file, are one."""
    lake, raw = logged
    erase(lake, spark.createDataFrame(pa.table({"user_id": [ERASED]})))
    deliver_again(raw)
    ingest(lake, str(raw), (DAY_2, DAY_2))
    assert ERASED not in {row["user_id"] for row in rows(lake, "events")}


def test_reprocessing_does_not_bring_erased_users_back(spark: SparkSession, tmp_path: Path) -> None:
    """A record of unknown type was quarantined, and its user is erased before the spec knows it."""
    spec_file, raw = tmp_path / "spec.yaml", tmp_path / "raw"
    spec_file.write_text(SPEC)
    lake = Lake(str(tmp_path / "lake"), load_spec(spec_file))
    write_logs(raw, lake.spec, DAY_1, (ERASED, "user-2"))
    log = raw / "log" / f"{DAY_1}.json"
    log.write_text(log.read_text().replace('"click"', '"klick"'))
    ingest(lake, str(raw), (DAY_1, DAY_1))
    users = spark.createDataFrame(pa.table({"user_id": [ERASED]}))
    record_erased_users(lake, users, erased_until(lake, None, now=0) * MICROS["s"], DAY_2)
    types = "    time_unit: s\n    types: {shown: shown, click: click, klick: click}\n"
    spec_file.write_text(SPEC.replace("    time_unit: s\n", types))
    corrected = Lake(lake.root, load_spec(spec_file))
    before = rows(lake, "events")
    assert reprocess_quarantine(corrected, (DAY_1, DAY_1))["released"] > 0
    released = [row for row in rows(corrected, "events") if row not in before]
    assert {row["user_id"] for row in released} == {"user-2"}


@pytest.mark.parametrize(
    "payload",
    [
        '{"url": "https://shop.example/?uid=user-1&item=3',
        "user-1,item=3,pa",
        '"user-1"x',
        "a;user-1",
    ],
)
def test_an_id_is_found_in_a_record_that_cannot_be_read(spark: SparkSession, payload: str) -> None:
    frame = spark.createDataFrame(pa.table({"payload": [payload]}))
    (row,) = frame.select(payload_words(F.col("payload")).alias("words")).collect()
    assert ERASED in row["words"]


def test_the_table_of_erased_users_has_a_salt_from_its_first_version(tmp_path: Path) -> None:
    """Ingest reads the salt as soon as there is a table, also after an interrupted erasure."""
    lake = Lake(str(tmp_path), load_spec(SIMULATOR_SPEC))
    create_salt(lake)
    first = lake.open("erased_users", version=0).metadata().configuration[SALT_PROPERTY]
    create_salt(lake)
    assert read_salt(lake) == first


def test_an_erasure_keeps_the_counts_of_days_that_have_expired(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = load_spec(tmp_path / "spec.yaml")
    retention = {"quarantine": DAY, "excluded_events": DAY}
    lake = Lake(str(tmp_path / "lake"), spec.model_copy(update={"retention": retention}))
    for day in (DAY_1, DAY_2):
        write_logs(tmp_path / "raw", spec, day, (ERASED, "user-2"))
    ingest(lake, str(tmp_path / "raw"), (DAY_1, DAY_2))
    (expired,) = (row for row in rows(lake, "ingest_metrics") if row["day"] == DAY_1)
    assert expired["quarantined"] and expired["excluded"]
    expire_days(lake)
    erase(lake, spark.createDataFrame(pa.table({"user_id": [ERASED]})))
    first, second = sorted(rows(lake, "ingest_metrics"), key=lambda row: str(row["day"]))
    kept = {"kept": expired["kept"] // 2, "read": expired["read"] - expired["kept"] // 2}
    assert first == expired | kept
    assert second == expired | {"day": DAY_2} | {
        name: expired[name] // 2 for name in ("read", "kept", "quarantined", "excluded")
    }


def test_versions_from_before_an_erasure_are_neither_pinned_nor_read_nor_kept(
    spark: SparkSession, logged: tuple[Lake, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lake, raw = logged
    published = {"examples": lake.version("examples"), "items": lake.version("items")}
    step_state.pin_versions(lake.root, "pinned during the erasure", published)
    erase(lake, spark.createDataFrame(pa.table({"user_id": [ERASED]})))
    flags = ["--spec", str(raw.parent / "spec.yaml"), "--lake", lake.root, "--pins"]
    pin = ["etl", "pin", *flags, str(published), "--run-id", "later"]
    assert main(pin) == 2
    expected = f"version {published['examples']} of table examples holds users who have been erased"
    assert expected in capsys.readouterr().err
    days = ["--days", f"{DAY_1}:{DAY_1}"]
    assert main(["etl", "table-info", *flags, str(published), *days, "--tables", "examples"]) == 2
    vacuum_lake(lake, 0)
    with pytest.raises(UserError, match="of table examples has been vacuumed"):
        rows(Lake(lake.root, lake.spec, published), "examples")
    published["examples"] = lake.version("examples")
    assert main([*pin[:-3], str(published), *pin[-2:]]) == 0, "current versions can be pinned"
    remove_folder(resolve_uri(lake.root, "examples"))
    build_examples(lake, (DAY_1, DAY_1))
    published["examples"] = lake.version("examples")
    assert main([*pin[:-3], str(published), *pin[-2:]]) == 0, "so can those of a rebuilt table"


@pytest.mark.proof
def test_what_was_known_before_a_day_is_erased_and_later_pointers_still_fit(
    spark: SparkSession, logged: tuple[Lake, Path]
) -> None:
    lake, raw = logged
    write_logs(raw, lake.spec, DAY_2, (ERASED, "user-2"))
    build_tables(lake, raw, (DAY_2, DAY_2))
    before = stored(lake)
    users = spark.createDataFrame(pa.table({"user_id": [ERASED]}))
    record_erased_users(lake, users, erased_until(lake, DAY_2, now=0) * MICROS["s"], DAY_2)
    erase_from_tables(ErasureScope.of_users(lake, users, before=DAY_2))
    after = stored(lake)
    again = erase_from_tables(ErasureScope.of_users(lake, users, before=DAY_2))
    assert not any(again.values()), "an interrupted run can be repeated"
    assert stored(lake) == after
    cut = lake.spec.day_start(DAY_2)
    for name in ("events", "excluded_events", "history", "quarantine"):
        kept = [row for row in before[name]
                if not mentions_user(row) or known_second(lake, row) >= cut]  # fmt: skip
        assert after[name] == kept, name
    assert len(after["events"]) == len(before["events"]) - 6
    shown = {row["impression_id"] for row in after["events"] if row["impression_id"]}
    assert {row["impression_id"] for row in after["impressions"]} == shown
    lengths = {row["impression_id"]: row["history_length"] for row in before["examples"]}
    for row in after["examples"]:
        erased_events = 6 if row["user_id"] == ERASED else 0
        assert row["history_length"] == lengths[row["impression_id"]] - erased_events
    assert {row["impression_id"] for row in after["examples"]} == shown
    assert not [found for found in validate_examples(lake, 20, 0) if found[1]]
    build_tables(lake, raw, (DAY_1, DAY_2))
    rebuilt = stored(lake)
    for row in (*after["examples"], *rebuilt["examples"]):
        # Stored examples keep what was computed from erased data.
        row.update(dict.fromkeys(("cnt_user_shown_1d", "user_plan", "user_known_since")))
    assert rebuilt == after


SIMULATOR = load_spec(SIMULATOR_SPEC)  # it has no retractions
RETRACTIONS = label_schemas.late_retractions(SIMULATOR)
ALL_TABLES = table_registry(SIMULATOR) | {RETRACTIONS.name: RETRACTIONS}


@pytest.mark.parametrize("name", sorted(ALL_TABLES))
def test_every_table_about_users_declares_how_they_are_erased(name: str) -> None:
    schema = ALL_TABLES[name]
    about_users = {"user_id", "impression_id", "sampled_user", "payload"} & {*schema.columns}
    assert (schema.user_rows is not None) == bool(about_users)
