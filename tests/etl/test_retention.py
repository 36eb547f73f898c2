"""Days of tables that are older than their retention are removed, and nothing else is."""

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake

from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.units import DAY
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake, last_commit_metadata
from etl.tables.maintenance import expire_days, expire_logs, vacuum_lake
from etl.tables.schemas import NO_DAY
from gemline import main
from tests.conftest import LAST, SPEC
from tests.pipeline import TABLES, rows

pytestmark = pytest.mark.spark

# Specs name other tables, of which this lake has no days; all are treated alike.
RETENTION = {"examples": 2 * DAY, "quarantine": 30 * DAY, "scores": DAY}


@pytest.fixture
def expiring(own: Lake) -> Lake:
    """A lake of four days: two of them are kept in `examples`, and `scores` does not exist."""
    return Lake(own.root, own.spec.model_copy(update={"retention": RETENTION}))


def test_only_days_older_than_the_retention_are_removed(expiring: Lake) -> None:
    before = {name: rows(expiring, name) for name in TABLES}
    version = expiring.version("examples")
    removed = expire_days(expiring)
    first_kept = LAST - timedelta(days=1)
    kept = [row for row in before["examples"] if row["day"] >= first_kept]
    assert removed == {"examples": len(before["examples"]) - len(kept), "quarantine": 0}
    assert 0 < len(kept) < len(before["examples"])
    assert {name: rows(expiring, name) for name in TABLES} == before | {"examples": kept}
    assert expire_days(expiring)["examples"] == 0
    assert expiring.version("examples") == version + 1, "nothing to remove is no commit"


def test_records_without_a_day_are_kept(own: Lake) -> None:
    """Each run replaces them; their partition is older than all days."""
    schema = schemas.quarantine(own.spec)
    quarantined = snapshot(own, schema).read(list(schema.columns))
    without_day = pa.array([NO_DAY] * len(quarantined), pa.date32())
    position = quarantined.column_names.index("day")
    rows_without_day = quarantined.set_column(position, "day", without_day)
    write_deltalake(own.table_uri("quarantine"), rows_without_day, mode="append")
    lake = Lake(own.root, own.spec.model_copy(update={"retention": {"quarantine": DAY}}))
    expire_days(lake)
    days = {row["day"] for row in rows(lake, "quarantine")}
    assert NO_DAY in days and days <= {NO_DAY, LAST} and len(quarantined) > 0


def test_removed_days_are_read_from_old_versions_until_a_vacuum(expiring: Lake) -> None:
    version, before = expiring.version("examples"), rows(expiring, "examples")
    expire_days(expiring)
    old = Lake(expiring.root, expiring.spec, {"examples": version})
    assert rows(old, "examples") == before
    vacuum_lake(expiring, 0)
    with pytest.raises(UserError, match="has been vacuumed"):
        rows(old, "examples")


def test_what_the_last_write_recorded_outlives_the_other_entries_of_the_log(own: Lake) -> None:
    before = {name: last_commit_metadata(own.open(name)) for name in TABLES}
    contents = rows(own, "examples")
    vacuum_lake(own, 0, full=True)
    expire_logs(own)
    assert {name: last_commit_metadata(own.open(name)) for name in TABLES} == before
    assert before["examples"]["inputs"] and rows(own, "examples") == contents
    for name in TABLES:
        assert len(list(Path(own.root, name, "_delta_log").glob("[0-9]*.json"))) == 1


@pytest.mark.parametrize(
    ("table", "retention", "problem"),
    [
        ("user_event_counts", "18d", "later steps read the days before: keep at least 19d"),
        ("user_event_counts", "19d", None),
        ("examples", "18d", "keep at least 19d"),
        ("impressions", "19d", None),
        ("teacher_predictions", "19d", None),
        ("user_teacher_embeddings", "18d", "keep at least 19d"),
        ("user_teacher_embeddings", "19d", None),
        ("feature_statistics", "19d", None),
        ("audits", "41d", "keep at least 42d"),
        ("audience_counts", "41d", "keep at least 42d"),
        ("audience_counts", "42d", None),
        ("audience_labels", "400d", "audience_labels"),
        ("quarantine", "19d", None),
        ("excluded_events", "18d", "keep at least 19d"),
        ("scores", "20d", "keep at least 21d"),
        ("scores", "21d", None),
        ("scores", "601h", "write whole days"),
        ("events", "400d", "events"),
    ],
)
def test_a_retention_that_later_steps_do_not_allow_is_refused(
    tmp_path: Path, table: str, retention: str, problem: str | None
) -> None:
    """Labels mature for three days, events may be two days late.

    Forecasts read seven days, estimates of the quality of labels 28.
    """
    path = tmp_path / "spec.yaml"
    path.write_text(f"{SPEC.read_text()}\nretention: {{{table}: {retention}}}\n")
    if problem is None:
        assert list(load_spec(path).retention) == [table]
        return
    with pytest.raises(UserError, match=problem):
        load_spec(path)


def test_a_retention_does_not_change_what_tables_hold(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"{SPEC.read_text()}\nretention: {{scores: 90d}}\n")
    assert load_spec(path).hash == load_spec(SPEC).hash


def test_the_command_prints_what_it_removed(
    own: Lake, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["etl", "expire", "--spec", str(spec_path), "--lake", own.root]) == 0
    assert "has no `retention`; all days are kept" in capsys.readouterr().out
    spec = tmp_path / "with_retention.yaml"
    spec.write_text(f"{spec_path.read_text()}\nretention: {{scores: 90d}}\n")
    assert main(["etl", "expire", "--spec", str(spec), "--lake", own.root]) == 0
    assert capsys.readouterr().out.startswith("expire: ")
    pins = ("--pins", '{"examples": 0}')
    assert main(["etl", "expire", "--spec", str(spec), "--lake", own.root, *pins]) == 2
    assert "leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "days", "is_enough"),
    [
        ("examples", 30, False),
        ("examples", 78, False),
        ("examples", 79, True),
        ("impressions", 30, False),
        ("impressions", 85, False),
        ("impressions", 86, True),
        ("teacher_predictions", 19, True),
    ],
)
def test_what_net_rates_and_campaign_days_read_is_kept_as_long_as_retractions_count(
    tmp_path: Path, table: str, days: int, is_enough: bool
) -> None:
    """Beyond the 19 days of other tables, examples for 60 days, impressions for 7 days more.

    Outcomes and their retractions may land late, and a click may precede its outcome by 3 days.
    """
    spec = yaml.safe_load(SPEC.read_text())
    spec["events"]["refund"] = {"role": "retraction"}
    retraction = {"event": "refund", "within": "60d"}
    spec["objectives"]["conversion"]["retracted_by"] = retraction
    spec["sources"]["events"]["columns"]["retracts"] = "refunded_event"
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec | {"retention": {table: f"{days}d"}}, sort_keys=False))
    if is_enough:
        assert list(load_spec(path).retention) == [table]
        return
    shortest = {"examples": 79, "impressions": 86}[table]
    problem = f"later steps read the days before: keep at least {shortest}d"
    with pytest.raises(UserError, match=f"retention.{table}: {problem}"):
        load_spec(path)
