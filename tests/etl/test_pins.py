"""What a run was told it reads, whatever is written meanwhile, until it lets go."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from etl.errors import UserError
from etl.spec import load_spec
from etl.tables import arrow, contracts, pins
from etl.tables.lake import Lake
from etl.told import promise, told
from etl.vacuum import vacuum
from gemline import main
from tests.conftest import FIRST, LAST
from tests.pipeline import rows

pytestmark = pytest.mark.spark

TABLE = "impressions"


def rewrite(lake: Lake) -> None:
    """The first day of a table loses half of its rows."""
    contract = contracts.impressions(lake.spec)
    day = arrow.snapshot(lake, contract).read(day=FIRST)
    arrow.replace(lake, contract, day.slice(0, len(day) // 2), f"day = '{FIRST}'", {})


def test_a_pinned_lake_reads_what_it_was_told(own: Lake) -> None:
    before, version = rows(own, TABLE), own.version(TABLE)
    rewrite(own)
    pinned = Lake(own.root, own.spec, {TABLE: version})
    assert rows(pinned, TABLE) == before != rows(own, TABLE)
    assert (pinned.version(TABLE), own.version(TABLE)) == (version, version + 1)
    assert pinned.rows(TABLE) == len(before)


def test_cleaning_up_leaves_what_a_run_holds(own: Lake) -> None:
    before, version = rows(own, TABLE), own.version(TABLE)
    pinned = Lake(own.root, own.spec, {TABLE: version})
    rewrite(own)
    now = rows(own, TABLE)
    pins.pin(own.root, "a run / of today", {TABLE: version})
    vacuum(own, 0)
    assert rows(pinned, TABLE) == before
    pins.unpin(own.root, "a run / of today")
    pins.unpin(own.root, "a run / of today")
    assert pins.pinned(own.root) == []
    assert vacuum(own, 30)[TABLE] == 0
    assert rows(pinned, TABLE) == before
    assert vacuum(own, 0)[TABLE] > 0
    assert rows(own, TABLE) == now
    with pytest.raises(UserError, match=r"version .* of table impressions has been vacuumed"):
        rows(pinned, TABLE)


def test_what_is_told_of_tables_is_so(
    own: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--spec", str(spec_path), "--lake", own.root, "--days", f"{FIRST}:{FIRST}"]
    assert main(["etl", "told", *where, "--tables", TABLE, "items"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found[TABLE]["version"] == own.version(TABLE)
    assert found[TABLE]["rows"] == sum(row["day"] == FIRST for row in rows(own, TABLE))
    assert found[TABLE]["contract"] == promise(contracts.impressions(own.spec))
    assert found[TABLE]["contract"] != promise(contracts.examples(own.spec))
    with pytest.raises(UserError, match="no table is called imprints; known: events"):
        told(own, ["imprints"], (FIRST, LAST))


def test_a_source_that_never_comes_can_be_gone_without(
    spark: object, spec_path: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    shutil.copytree(raw, logs)
    second = FIRST + timedelta(days=1)
    (logs / "users" / f"day={second}.json.gz").unlink()
    own = Lake(str(tmp_path / "lake"), load_spec(spec_path))
    words = ["etl", "attributes", "--spec", str(spec_path), "--lake", own.root]
    words += ["--raw", str(logs), "--days", f"{FIRST}:{second}"]
    assert main(words) == 2
    assert not own.exists("attributes_user")
    assert main([*words, "--absent", "users"]) == 0
    users, items = (
        arrow.snapshot(own, contracts.attributes(own.spec, entity)) for entity in ("user", "item")
    )
    assert (users.days(), items.days()) == ([FIRST], [FIRST, second])
    capsys.readouterr()
    assert main([*words, "--absent", "messages"]) == 2
    assert "has no source 'messages'; known: events, items, users" in capsys.readouterr().err
