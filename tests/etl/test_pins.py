"""A run reads its pinned table versions until it unpins them, regardless of later writes."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from etl.errors import UserError
from etl.spec import load_spec
from etl.tables import arrow, label_schemas, schemas, step_state
from etl.tables.lake import Lake
from etl.tables.maintenance import vacuum_lake
from etl.tables.metadata import schema_fingerprint, table_metadata
from gemline import main
from tests.conftest import FIRST, LAST
from tests.pipeline import rows

pytestmark = pytest.mark.spark

TABLE = "impressions"


def remove_half_of_the_first_day(lake: Lake) -> None:
    schema = label_schemas.impressions(lake.spec)
    day = arrow.snapshot(lake, schema).read(day=FIRST)
    arrow.replace_rows(lake, schema, day.slice(0, len(day) // 2), f"day = '{FIRST}'", {})


def test_a_lake_reads_tables_at_their_pinned_versions(own: Lake) -> None:
    before, version = rows(own, TABLE), own.version(TABLE)
    remove_half_of_the_first_day(own)
    pinned = Lake(own.root, own.spec, {TABLE: version})
    assert rows(pinned, TABLE) == before != rows(own, TABLE)
    assert (pinned.version(TABLE), own.version(TABLE)) == (version, version + 1)
    assert pinned.count_rows(TABLE) == len(before)


def test_pins_that_nothing_would_read_are_refused(
    spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of no table, and any in a command of which each step reads the latest versions."""
    flags = ["--spec", str(spec_path), "--lake", str(tmp_path / "lake")]
    assert main(["features", "items", *flags, "--days", str(LAST), "--pins", "{itms: 1}"]) == 2
    assert "no table is called itms" in capsys.readouterr().err
    raw, pins = ["--raw", str(tmp_path)], ["--pins", "{events: 1}"]
    days = ["--days", f"{FIRST}:{LAST}"]
    for command in (
        ["run", *days],
        ["refresh", "--data-until", f"{LAST}T12:00"],
        ["airflow", *days],
        ["upgrade", *days, "--old-spec", str(spec_path)],
    ):
        assert main([*command, *flags, *raw, *pins]) == 2
        assert "--pins: steps of a run read what" in capsys.readouterr().err, command


def test_vacuum_keeps_pinned_versions(own: Lake) -> None:
    before, version = rows(own, TABLE), own.version(TABLE)
    pinned = Lake(own.root, own.spec, {TABLE: version})
    remove_half_of_the_first_day(own)
    after = rows(own, TABLE)
    step_state.pin_versions(own.root, "a run / of today", {TABLE: version})
    vacuum_lake(own, 0)
    assert rows(pinned, TABLE) == before
    step_state.unpin_versions(own.root, "a run / of today")
    step_state.unpin_versions(own.root, "a run / of today")
    assert step_state.read_pins(own.root) == []
    assert vacuum_lake(own, 30)[TABLE] == 0
    assert rows(pinned, TABLE) == before
    assert vacuum_lake(own, 0)[TABLE] > 0
    assert rows(own, TABLE) == after
    with pytest.raises(UserError, match=r"version .* of table impressions has been vacuumed"):
        rows(pinned, TABLE)


def test_table_info_reports_version_rows_and_schema_fingerprint(
    own: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--spec", str(spec_path), "--lake", own.root, "--days", f"{FIRST}:{FIRST}"]
    assert main(["etl", "table-info", *flags, "--tables", TABLE, "items"]) == 0
    metadata = json.loads(capsys.readouterr().out.splitlines()[-1])[TABLE]
    assert metadata["version"] == own.version(TABLE)
    assert metadata["rows"] == sum(row["day"] == FIRST for row in rows(own, TABLE))
    assert metadata["schema_fingerprint"] == schema_fingerprint(label_schemas.impressions(own.spec))
    assert metadata["schema_fingerprint"] != schema_fingerprint(schemas.examples(own.spec))
    with pytest.raises(UserError, match="no table is called imprints; known: events"):
        table_metadata(own, ["imprints"], (FIRST, LAST))


def test_missing_sources_skips_the_files_of_a_source(
    spark: object, spec_path: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    shutil.copytree(raw, logs)
    second = FIRST + timedelta(days=1)
    (logs / "users" / f"day={second}.json.gz").unlink()
    own = Lake(str(tmp_path / "lake"), load_spec(spec_path))
    command = ["etl", "attributes", "--spec", str(spec_path), "--lake", own.root]
    command += ["--raw", str(logs), "--days", f"{FIRST}:{second}"]
    assert main(command) == 2
    assert not own.exists("attributes_user")
    assert main([*command, "--missing-sources", "users"]) == 0
    users, items = (
        arrow.snapshot(own, schemas.attributes(own.spec, entity)) for entity in ("user", "item")
    )
    assert (users.days(), items.days()) == ([FIRST], [FIRST, second])
    capsys.readouterr()
    assert main([*command, "--missing-sources", "messages"]) == 2
    known = ", ".join(sorted(own.spec.sources))
    assert f"has no source 'messages'; known: {known}" in capsys.readouterr().err
