"""What holds of the DAGs as Airflow reads them, and of their tasks as Airflow runs them."""

import json
import subprocess
import sys
from collections import Counter
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from dags.line import Place, line, newest_mature
from etl.quarantine import NO_DAY
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST, ROOT
from tests.dags.conftest import environment
from tests.pipeline import rows

TELL = """
import json, os, sys
import dags.daily as daily
def waits_for(condition):
    if condition is None:
        return []
    return [a.name for a in getattr(condition, "objects", [condition])]
told = {}
for dag in [made for made in vars(daily).values() if type(made).__name__ == "DAG"]:
    told[dag.dag_id.partition("_")[2]] = {
        "runs": dag.max_active_runs,
        "tasks": [
            {"id": task.task_id, "owner": task.owner, "retries": task.retries, "pool": task.pool,
             "limit": bool(task.execution_timeout), "policy": type(task.retry_policy).__name__,
             "down": sorted(task.downstream_task_ids), "outlets": [a.name for a in task.outlets],
             "command": [str(w) for w in getattr(task, "command", None)
                         or getattr(task, "application_args", None) or []]}
            for task in dag.tasks
        ],
        "waits for": waits_for(getattr(dag.timetable, "asset_condition", None)),
    }
modules = sorted(sys.modules)
from airflow.utils.file import list_py_file_paths
read = list_py_file_paths(os.environ["AIRFLOW__CORE__DAGS_FOLDER"], safe_mode=False)
import pendulum
from airflow.serialization.encoders import coerce_to_core_timetable
from airflow.timetables.base import TimeRestriction
made = [dag for dag in vars(daily).values() if type(dag).__name__ == "DAG"]
(raw,) = (dag for dag in made if dag.dag_id.endswith("_raw"))
timetable, run, runs = coerce_to_core_timetable(raw.timetable), None, []
since = TimeRestriction(pendulum.datetime(2026, 3, 1), None, catchup=True)
for _ in range(300):
    run = timetable.next_dagrun_info_v2(last_dagrun_info=run, restriction=since)
    runs.append((run.run_after.isoformat(), run.partition_key))
print("TOLD" + json.dumps({"dags": told, "modules": modules, "read": read, "runs": runs}))
"""
RUN = """
import json, sys
import dags.daily as daily
for part, days, mark_success in json.loads(sys.argv[1]):
    dag = next(made for name, made in vars(daily).items() if name.endswith(part))
    print("BEGIN", part)
    run = dag.test(run_conf={"days": days}, mark_success_pattern=mark_success)
    states = sorted((t.task_id, str(t.state)) for t in run.get_task_instances())
    print("STATE", run.state, states, flush=True)
"""
NOTHING = "nothing"
ALL_BUT_INGEST = "(?!ingest$).+"
NEVER = "2027-05-01"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this file's Airflow and of the lake that its DAGs write."""
    return tmp_path_factory.mktemp("airflow")


@pytest.fixture(scope="module")
def runs(home: Path, spec_path: Path, raw: Path) -> list[str]:
    """What DAG runs print, on one Airflow: a day that never comes, and the ingest of the first."""
    env = environment(home, spec_path, raw)
    tool = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(tool, env=env, cwd=ROOT, check=True, capture_output=True)
    asked = json.dumps([("_raw", NEVER, NOTHING), ("_tables", f"{FIRST}", ALL_BUT_INGEST)])
    done = subprocess.run(
        [sys.executable, "-c", RUN, asked], env=env, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    printed = done.stdout.split("BEGIN ")[1:]
    assert len(printed) == 2, done.stdout[-4000:]
    return printed


@pytest.fixture(scope="module")
def told(home: Path, spec_path: Path, raw: Path) -> Any:
    """What the DAGs of a line in Berlin, begun by the clock, tell of themselves."""
    berlin = home / "berlin.yaml"
    berlin.write_text(spec_path.read_text() + "time_zone: Europe/Berlin\n")
    env = environment(home, berlin, raw) | {"GEMLINE_SCHEDULE": "0 4 * * *"}
    done = subprocess.run(
        [sys.executable, "-c", TELL], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert "TOLD" in done.stdout, done.stderr
    return json.loads(done.stdout.partition("TOLD")[2])


def test_reading_the_dags_imports_nothing_heavy(told: Any) -> None:
    heavy = {"torch", "pyspark", "pandas", "deltalake", "pyarrow", "mlflow", "torchrec", "numpy"}
    assert not heavy & set(told["modules"])


def test_each_day_is_begun_once_on_the_morning_after(told: Any) -> None:
    """Whether clocks are turned forward or back."""
    days = [date.fromisoformat(key) for _, key in told["runs"]]
    assert days == [days[0] + timedelta(days=n) for n in range(len(days))]
    for moment, key in told["runs"]:
        begun = datetime.fromisoformat(moment).astimezone(ZoneInfo("Europe/Berlin"))
        assert begun.date() - timedelta(days=1) == date.fromisoformat(key)
        assert (begun.hour, begun.minute) == (4, 0)


def test_airflow_looks_for_dags_in_one_file(told: Any) -> None:
    assert told["read"] == [str(ROOT / "dags" / "daily.py")]


def test_every_step_of_the_line_is_a_task(told: Any, spec_path: Path) -> None:
    spec = load_spec(spec_path)
    place, days = Place(spec_path, "raw", "lake"), newest_mature(spec, FIRST, LAST)
    steps = {step.name.partition("-")[0] for step in line(spec, place, days)}
    tasks = {
        t["id"].removeprefix("surface.") for dag in told["dags"].values() for t in dag["tasks"]
    }
    assert steps <= tasks


def test_each_table_is_written_by_one_dag_one_run_at_a_time(told: Any, spec_path: Path) -> None:
    spec = load_spec(spec_path)
    place, days = Place(spec_path, "raw", "lake"), newest_mature(spec, FIRST, LAST)
    dag_of = {
        task["id"].removeprefix("surface."): name
        for name, dag in told["dags"].items() for task in dag["tasks"]
    }  # fmt: skip
    writers: dict[str, set[str]] = {}
    for step in line(spec, place, days):
        for table in step.writes:
            writers.setdefault(table, set()).add(dag_of[step.name.partition("-")[0]])
    assert all(len(dags) == 1 for dags in writers.values()), writers
    assert {dag["runs"] for dag in told["dags"].values()} == {1}


def test_each_asset_has_a_writer_and_a_reader(told: Any) -> None:
    made = Counter(a for dag in told["dags"].values() for t in dag["tasks"] for a in t["outlets"])
    read = {name for dag in told["dags"].values() for name in dag["waits for"]}
    assert set(made.values()) == {1}
    assert {"raw", "features", "gem", "knowledge"} == {name.partition("/")[2] for name in read}
    assert read < set(made)


def test_every_task_has_an_owner_a_limit_and_retries_by_cause(told: Any) -> None:
    for dag in told["dags"].values():
        for task in dag["tasks"]:
            assert (task["owner"], task["limit"], task["policy"]) == ("gemline", True, "ByCause")
            assert task["retries"] > 0 or task["id"] == "enough_days", task
            if task["command"]:
                light = task["id"].startswith(("publish", "hold", "release"))
                pools = {"default_pool"} if light else {"gemline_spark", "gemline_torch"}
                assert task["pool"] in pools, task


def test_who_reads_tables_reads_the_versions_it_was_told(told: Any) -> None:
    for name in ("gem", "rankers"):
        tasks = [task for task in told["dags"][name]["tasks"] if task["command"]]
        for task in tasks:
            if not task["id"].startswith(("publish", "release")):
                assert "--pins" in task["command"], task["id"]


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ("gemline etl ended with exit code 2", False),
        ("Cannot execute: spark-submit …. Error code is: 2.", False),
        ("gemline train ended with exit code 1", True),
        ("gemline train ended with exit code 75", True),
        ("Cannot execute: spark-submit …. Error code is: 75.", True),
        ("gemline train ended with exit code 137", True),
        ("Cannot execute: spark-submit …. Error code is: 20.", True),
        ("connection reset", True),
    ],
)
def test_what_the_input_did_wrong_is_not_tried_again(said: str, again: bool) -> None:
    from airflow.sdk.definitions.retry_policy import RetryAction

    from dags.operators import ByCause

    action = ByCause().evaluate(RuntimeError(said), 1, 3).action
    assert action == (RetryAction.DEFAULT if again else RetryAction.FAIL)


def test_a_spec_with_an_error_is_one_sentence(tmp_path: Path, spec_path: Path, raw: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(spec_path.read_text().replace("role: impression", "role: impresion"))
    command = [sys.executable, "-c", "import dags.daily"]
    env = environment(tmp_path, bad, raw)
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "bad.yaml:" in last and "events.ad_impression.role" in last, done.stderr


def test_settings_that_are_wrong_are_one_sentence() -> None:
    from dags.settings import Settings
    from etl.errors import UserError

    told = {"GEMLINE_SPEC": "s.yaml", "GEMLINE_RAW": "raw", "GEMLINE_WAIT_HOURS": "-1"}
    with pytest.raises(UserError, match=r"GEMLINE_.*lake: Field required.*wait_hours"):
        Settings.from_environment(told)


def test_a_task_runs_by_spark_submit_on_airflow_and_writes_its_day(
    runs: list[str], home: Path, lake: Lake
) -> None:
    assert "STATE success" in runs[1], runs[1][-4000:]
    for name in ("events", "flow", "quarantine"):
        there = [row for row in rows(lake, name) if row["day"] in (FIRST, NO_DAY)]
        assert rows(Lake(str(home / "lake"), lake.spec), name) == there, name


def test_a_day_that_never_comes_is_named(runs: list[str]) -> None:
    assert "STATE failed" in runs[0] and f"no log of {NEVER} is complete in" in runs[0], runs[0][
        -4000:
    ]
