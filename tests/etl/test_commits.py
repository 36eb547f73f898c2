"""The last write of a table is found in its log, without reading all entries."""

from datetime import date
from pathlib import Path

import pytest
from deltalake import DeltaTable

from etl.spec import load_spec
from etl.tables import arrow, lake, model_schemas
from etl.tables.lake import Lake, arrow_schema, last_commit_metadata
from etl.tables.uri import StoragePath, read_text_if_exists
from tests.conftest import SPEC

NUM_WRITES = 40
DAY = date(2026, 1, 1)
TABLE = "user_teacher_embeddings"


def write(own: Lake, number: int) -> None:
    schema = model_schemas.user_teacher_embeddings(own.spec)
    rows = arrow_schema(schema).empty_table()
    arrow.replace_rows(own, schema, rows, f"day = '{DAY}'", {"number": number})


def maintain(own: Lake) -> None:
    """A commit without metadata."""
    DeltaTable(own.table_uri(TABLE)).alter.set_table_properties(
        {"delta.checkpointInterval": "10"}, raise_if_not_exists=False
    )


@pytest.fixture
def written(tmp_path: Path) -> tuple[Lake, list[int | None]]:
    """A table of many writes, some of them followed by maintenance, and the last write by version.

    The first version creates the table. Its path is not a URL as it is.
    """
    own = Lake(str(tmp_path / "my läke"), load_spec(SPEC))
    last_writes: list[int | None] = [None]
    for number in range(NUM_WRITES):
        write(own, number)
        last_writes.append(number)
        for _ in range(number % 4):
            maintain(own)
            last_writes.append(number)
    return own, last_writes


def test_the_last_write_is_that_of_each_version_and_few_entries_are_read(
    written: tuple[Lake, list[int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of an older, pinned version gets what was recorded for it."""
    own, expected = written
    entries: list[str] = []
    read = read_text_if_exists

    def record(path: StoragePath) -> str | None:
        entries.append(path.name)
        return read(path)

    monkeypatch.setattr(lake, "read_text_if_exists", record)
    found = []
    for version in range(len(expected)):
        entries.clear()
        metadata = last_commit_metadata(DeltaTable(own.table_uri(TABLE), version=version))
        found.append(metadata["inputs"]["number"] if metadata else None)
        assert 1 <= len(entries) <= 4, "a write, and the maintenance after it"
    assert found == expected
    assert DeltaTable(own.table_uri(TABLE)).version() == len(expected) - 1


def test_the_last_write_is_that_of_the_complete_history(
    written: tuple[Lake, list[int | None]],
) -> None:
    table = DeltaTable(written[0].table_uri(TABLE))
    recorded = next(commit["facts"] for commit in table.history() if "facts" in commit)
    assert f'"number": {NUM_WRITES - 1}' in recorded
    assert last_commit_metadata(table)["inputs"] == {"number": NUM_WRITES - 1}


def test_a_log_whose_writes_have_expired_has_no_metadata(
    written: tuple[Lake, list[int | None]],
) -> None:
    own, expected = written
    table = DeltaTable(own.table_uri(TABLE))
    table.create_checkpoint()
    for entry in Path(own.root, TABLE, "_delta_log").glob("*.json"):
        if int(entry.stem) < table.version():
            entry.unlink()
    assert expected[-2:] == [NUM_WRITES - 1] * 2, "the last entry is one of maintenance"
    assert last_commit_metadata(DeltaTable(own.table_uri(TABLE))) == {}
