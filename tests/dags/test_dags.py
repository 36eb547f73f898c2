"""Invariants of the DAGs as parsed by Airflow, and of their tasks as run by Airflow."""

import json
import subprocess
import sys
from collections import Counter
from datetime import date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import jinja2
import pytest

from dags.orchestration.runs import PipelineRun
from dags.pipeline import latest_mature_split, pipeline_steps
from dags.refresh import RefreshPlan
from dags.steps import PipelinePaths, Step
from etl.cli.runner import DayArgs
from etl.spec import load_spec
from etl.spec.units import DAY
from etl.tables.lake import Lake
from etl.tables.schemas import NO_DAY
from tests.cli import parse_command
from tests.conftest import FIRST, LAST, ROOT
from tests.dags.conftest import environment
from tests.pipeline import rows
from training.commands import SplitArgs

# Runs in an Airflow environment: prints a description of the DAGs as JSON.
DESCRIBE_DAGS = """
import json, os, sys
import dags.orchestration.daily as daily
def assets_of(condition):
    if condition is None:
        return []
    return [asset.name for asset in getattr(condition, "objects", [condition])]
dags = [value for value in vars(daily).values() if type(value).__name__ == "DAG"]
described = {}
for dag in dags:
    described[dag.dag_id.partition("_")[2]] = {
        "max_active_runs": dag.max_active_runs,
        "tasks": [
            {"id": task.task_id, "owner": task.owner, "retries": task.retries, "pool": task.pool,
             "has_timeout": bool(task.execution_timeout),
             "retry_policy": type(task.retry_policy).__name__,
             "outlets": [asset.name for asset in task.outlets],
             "upstream": sorted(task.upstream_task_ids),
             "command": [str(word) for word in getattr(task, "command", None)
                         or getattr(task, "application_args", None) or []]}
            for task in dag.tasks
        ],
        "scheduled_on": assets_of(getattr(dag.timetable, "asset_condition", None)),
    }
modules = sorted(sys.modules)
from airflow.utils.file import list_py_file_paths
dag_files = list_py_file_paths(os.environ["AIRFLOW__CORE__DAGS_FOLDER"], safe_mode=False)
import pendulum
from airflow.serialization.encoders import coerce_to_core_timetable
from airflow.timetables.base import TimeRestriction
(raw,) = (dag for dag in dags if dag.dag_id.endswith("_raw"))
timetable, run, runs = coerce_to_core_timetable(raw.timetable), None, []
since = TimeRestriction(pendulum.datetime(2026, 3, 1), None, catchup=True)
for _ in range(300):
    run = timetable.next_dagrun_info_v2(last_dagrun_info=run, restriction=since)
    runs.append((run.run_after.isoformat(), run.partition_key))
print("OUTPUT" + json.dumps(
    {"dags": described, "modules": modules, "dag_files": dag_files, "raw_runs": runs}
))
"""
RUN_DAGS = """
import json, sys
import dags.orchestration.daily as daily
for suffix, conf, mark_success in json.loads(sys.argv[1]):
    dag = next(value for name, value in vars(daily).items() if name.endswith(suffix))
    print("BEGIN", suffix)
    run = dag.test(run_conf=conf, mark_success_pattern=mark_success)
    states = sorted((t.task_id, str(t.state)) for t in run.get_task_instances())
    print("STATE", run.state, states, flush=True)
"""
REFRESH = "refresh"
NO_TASK = "nothing"
ALL_BUT_INGEST = "(?!ingest$).+"
DAY_WITHOUT_LOGS = "2027-05-01"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Airflow and of the lake that its DAGs write."""
    return tmp_path_factory.mktemp("airflow")


@pytest.fixture(scope="module")
def run_outputs(home: Path, spec_path: Path, raw: Path) -> list[str]:
    """The output of DAG runs: a day without logs, the ingest of the first day, and a refresh."""
    env = environment(home, spec_path, raw)
    migrate = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(migrate, env=env, cwd=ROOT, check=True, capture_output=True)
    runs = [
        ("_raw", {"days": DAY_WITHOUT_LOGS}, NO_TASK),
        ("_tables", {"days": f"{FIRST}"}, ALL_BUT_INGEST),
        ("_refresh", {"data_until": f"{LAST}T12:00"}, NO_TASK),
    ]
    result = subprocess.run(
        [sys.executable, "-c", RUN_DAGS, json.dumps(runs)], env=env, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    outputs = result.stdout.split("BEGIN ")[1:]
    assert len(outputs) == len(runs), result.stdout[-4000:]
    return outputs


@pytest.fixture(scope="module")
def described(home: Path, spec_path: Path, raw: Path) -> Any:
    """The output of DESCRIBE_DAGS for a spec in Berlin's time zone with a daily schedule."""
    berlin = home / "berlin.yaml"
    berlin.write_text(
        spec_path.read_text() + "time_zone: Europe/Berlin\nhistory: {compact_every: 30d}\n"
    )
    env = environment(home, berlin, raw) | {
        "GEMLINE_SCHEDULE": "0 4 * * *",
        "GEMLINE_REFRESH_SCHEDULE": "5 * * * *",
    }
    result = subprocess.run(
        [sys.executable, "-c", DESCRIBE_DAGS],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "OUTPUT" in result.stdout, result.stderr
    return json.loads(result.stdout.partition("OUTPUT")[2])


def steps_of(spec_path: Path) -> list[Step]:
    spec = load_spec(spec_path)
    paths = PipelinePaths(spec_path, "raw", "lake")
    return pipeline_steps(spec, paths, latest_mature_split(spec, FIRST, LAST))


def task_name(step: Step) -> str:
    """The task of a step; tasks of a surface are mapped in the task group `surface`."""
    return f"surface.{step.name.removesuffix(f'-{step.surface}')}" if step.surface else step.name


def test_parsing_the_dags_imports_nothing_heavy(described: Any) -> None:
    heavy = {"torch", "pyspark", "pandas", "deltalake", "pyarrow", "mlflow", "torchrec", "numpy"}
    assert not heavy & set(described["modules"])


def test_each_day_has_one_run_on_the_next_morning(described: Any) -> None:
    """Also when clocks are put forward or back."""
    days = [date.fromisoformat(key) for _, key in described["raw_runs"]]
    assert days == [days[0] + timedelta(days=n) for n in range(len(days))]
    for run_after, key in described["raw_runs"]:
        start = datetime.fromisoformat(run_after).astimezone(ZoneInfo("Europe/Berlin"))
        assert start.date() - timedelta(days=1) == date.fromisoformat(key)
        assert (start.hour, start.minute) == (4, 0)


def test_airflow_looks_for_dags_in_one_file(described: Any) -> None:
    assert described["dag_files"] == [str(ROOT / "dags" / "orchestration" / "daily.py")]


def test_every_step_of_the_pipeline_is_a_task(described: Any, spec_path: Path) -> None:
    tasks = {task["id"] for dag in described["dags"].values() for task in dag["tasks"]}
    assert {task_name(step) for step in steps_of(spec_path)} <= tasks


def test_each_table_is_written_by_one_dag_with_one_active_run(
    described: Any, spec_path: Path
) -> None:
    """Apart from refreshes, whose steps hold the same leases."""
    dag_of_task = {
        task["id"]: name
        for name, dag in described["dags"].items()
        if name != REFRESH
        for task in dag["tasks"]
    }
    writers: dict[str, set[str]] = {}
    for step in steps_of(spec_path):
        for table in step.writes:
            writers.setdefault(table, set()).add(dag_of_task[task_name(step)])
    assert all(len(dags) == 1 for dags in writers.values()), writers
    assert {dag["max_active_runs"] for dag in described["dags"].values()} == {1}


def test_a_refresh_runs_the_steps_of_the_daily_run_that_serve(described: Any) -> None:
    """It writes no assets, because its tables are those of an unfinished day.

    What is fitted to audiences and spend waits for whole days, and so does the drift of features.
    """
    daily_only = (
        *("publish", "audience_quality", "response_curves", "feature_drift"),
        "compact",
    )
    tasks = {name: [t["id"] for t in dag["tasks"]] for name, dag in described["dags"].items()}
    steps = [t for t in tasks["tables"] if not t.startswith(daily_only)]
    expected = ["plan", *steps, "teacher_predictions", "surfaces", "surface.refit",
                "feature_store"]  # fmt: skip
    assert sorted(tasks[REFRESH]) == sorted(expected)
    assert not any(task["outlets"] for task in described["dags"][REFRESH]["tasks"])


def test_each_asset_has_one_writer_and_is_read(described: Any) -> None:
    written = Counter(
        asset
        for dag in described["dags"].values()
        for task in dag["tasks"]
        for asset in task["outlets"]
    )
    read = {name for dag in described["dags"].values() for name in dag["scheduled_on"]}
    assert set(written.values()) == {1}
    assert {"raw", "features", "gem", "teacher_predictions"} == {
        name.partition("/")[2] for name in read
    }
    assert read < set(written)


def test_every_task_has_an_owner_a_timeout_and_a_retry_policy(described: Any) -> None:
    for dag in described["dags"].values():
        for task in dag["tasks"]:
            assert task["owner"] == "gemline"
            assert task["has_timeout"]
            assert task["retry_policy"] == "RetryUnlessUserError"
            assert task["retries"] > 0 or task["id"] == "enough_days", task
            if task["command"]:
                is_light = task["id"].startswith(("publish", "pin", "unpin"))
                pools = {"default_pool"} if is_light else {"gemline_spark", "gemline_torch"}
                assert task["pool"] in pools, task


def test_tasks_that_read_tables_read_pinned_versions(described: Any) -> None:
    commands = [
        task["command"]
        for name in ("gem", "rankers")
        for task in described["dags"][name]["tasks"]
        if task["command"] and not task["id"].startswith(("publish", "unpin"))
    ]
    assert len(commands) == 14
    for command in commands:
        assert "--pins" in command, command


def test_every_command_line_parses_once_its_templates_are_filled_in(
    described: Any, spec_path: Path
) -> None:
    run = PipelineRun(
        first=FIRST,
        new_from=LAST,
        last=LAST,
        missing_sources={LAST: ("events",)},
        tables={"events": {"version": 3}, "items": {"version": 0}},
    )
    split = latest_mature_split(load_spec(spec_path), FIRST, LAST)
    refresh = RefreshPlan(
        days=f"{LAST}:{LAST}", data_until=f"{LAST}T14:00", missing_sources="users", surfaces=()
    )
    context = {
        "run": lambda *_: run,
        "split": lambda _: split,
        "dag": {"dag_id": "simulator_gem"},
        "run_id": "manual",
        "dag_run": None,
        "params": {},
        "triggering_asset_events": {},
        "ti": SimpleNamespace(xcom_pull=lambda **_: refresh.model_dump()),
    }

    def render(word: str) -> str:
        return str(jinja2.Template(word, undefined=jinja2.StrictUndefined).render(context))

    commands = 0
    for dag in described["dags"].values():
        for task in dag["tasks"]:
            if not task["command"]:
                continue
            words = [
                "feed" if word.startswith("MappedArgument") else word for word in task["command"]
            ]
            args = parse_command([render(word) for word in words])
            commands += 1
            if isinstance(args, SplitArgs):
                assert args.split == split, task
            if isinstance(args, DayArgs):
                first, last = args.day_range
                assert FIRST <= first <= last <= LAST, task
            if "--pins" in words:
                assert getattr(args, "pins", None) == {"events": 3, "items": 0}, task
    assert commands > len({task_name(step) for step in steps_of(spec_path)})


@pytest.mark.parametrize(
    ("message", "is_retried"),
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
def test_user_errors_are_not_retried(message: str, is_retried: bool) -> None:
    from airflow.sdk.definitions.retry_policy import RetryAction

    from dags.orchestration.operators import RetryUnlessUserError

    action = RetryUnlessUserError().evaluate(RuntimeError(message), 1, 3).action
    assert action == (RetryAction.DEFAULT if is_retried else RetryAction.FAIL)


def test_an_invalid_spec_is_reported_in_one_line(
    tmp_path: Path, spec_path: Path, raw: Path
) -> None:
    invalid = tmp_path / "invalid.yaml"
    invalid.write_text(spec_path.read_text().replace("role: impression", "role: impresion"))
    command = [sys.executable, "-c", "import dags.orchestration.daily"]
    env = environment(tmp_path, invalid, raw)
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    last_line = result.stderr.strip().splitlines()[-1]
    assert "invalid.yaml:" in last_line, result.stderr
    assert "events.ad_impression.role" in last_line, result.stderr


def test_invalid_settings_are_reported_in_one_line() -> None:
    from dags.orchestration.settings import DagSettings
    from etl.errors import UserError

    variables = {"GEMLINE_SPEC": "s.yaml", "GEMLINE_RAW": "raw", "GEMLINE_WAIT_HOURS": "-1"}
    with pytest.raises(UserError, match=r"GEMLINE_.*lake: Field required.*wait_hours"):
        DagSettings.from_environment(variables)
    days = {"GEMLINE_WAIT_HOURS": "1", "GEMLINE_LAKE": "lake", "GEMLINE_FIRST_DAY": str(FIRST)}
    settings = DagSettings.from_environment(variables | days | {"GEMLINE_GEM": "--scale 'base"})
    assert settings
    with pytest.raises(UserError, match="GEMLINE_GEM --scale 'base: No closing quotation"):
        _ = settings.gem_flags


@pytest.mark.parametrize("age", [0, 3, 29, 30, 31, 400])
def test_rankers_train_on_a_bounded_number_of_days_however_old_the_lake_is(
    spec_path: Path, age: int
) -> None:
    """The latest ones; a young lake has fewer. Days of calibration and test do not depend on it."""
    from dags.orchestration.builders import split_of_run
    from dags.orchestration.settings import DagSettings

    spec, last = load_spec(spec_path), date(2027, 6, 30)
    newest = latest_mature_split(spec, FIRST, last)
    first_day = newest.train_last - timedelta(days=age)
    settings = DagSettings(spec=spec_path, raw="raw", lake="lake", first_day=first_day)
    run = PipelineRun(first=first_day, new_from=last, last=last, missing_sources={}, tables={})
    split = split_of_run(spec, settings, run)
    assert (split.train_last - split.train_first).days + 1 == min(age + 1, 30)
    assert split.model_copy(update={"train_first": FIRST}) == newest


def test_histories_that_rankers_read_are_not_compacted(described: Any, spec_path: Path) -> None:
    """Refreshes, which write histories too, wait until compacted features are published."""
    from dags.orchestration.builders import split_of_run
    from dags.orchestration.settings import DagSettings

    (compact,) = (t for t in described["dags"]["tables"]["tasks"] if t["id"] == "compact")
    flag = compact["command"].index("--keep-days")
    keep_days, spec = int(compact["command"][flag + 1]), load_spec(spec_path)
    settings = DagSettings(spec=spec_path, raw="raw", lake="lake", first_day=FIRST)
    run = PipelineRun(first=LAST, new_from=LAST, last=LAST)
    old = settings.model_copy(update={"first_day": LAST - timedelta(days=400)})
    assert LAST - timedelta(days=keep_days) < split_of_run(spec, old, run).train_first
    (publish,) = (t for t in described["dags"]["tables"]["tasks"] if t["id"] == "publish_features")
    assert publish["upstream"] == ["compact"]


def test_examples_are_not_removed_before_rankers_have_read_them(spec_path: Path) -> None:
    from dags.orchestration.builders import check_retention, split_of_run
    from dags.orchestration.settings import DagSettings
    from etl.errors import UserError

    spec, last = load_spec(spec_path), date(2027, 6, 30)
    settings = DagSettings(
        spec=spec_path, raw="raw", lake="lake", first_day=FIRST, training_days=20
    )
    run = PipelineRun(first=last, new_from=last, last=last, missing_sources={}, tables={})
    days_read = (last - split_of_run(spec, settings, run).train_first).days + 1
    for days, is_refused in ((days_read, False), (days_read - 1, True)):
        retaining = spec.model_copy(update={"retention": {"examples": days * DAY}})
        if is_refused:
            with pytest.raises(UserError, match="retention of examples is"):
                check_retention(retaining, settings)
        else:
            check_retention(retaining, settings)


def test_a_task_runs_by_spark_submit_and_writes_its_day(
    run_outputs: list[str], home: Path, lake: Lake
) -> None:
    assert "STATE success" in run_outputs[1], run_outputs[1][-4000:]
    for name in ("events", "ingest_metrics", "quarantine"):
        expected = [row for row in rows(lake, name) if row["day"] in (FIRST, NO_DAY)]
        assert rows(Lake(str(home / "lake"), lake.spec), name) == expected, name


def test_a_day_without_logs_fails_and_is_named(run_outputs: list[str]) -> None:
    output = run_outputs[0]
    assert "STATE failed" in output, output[-4000:]
    assert f"no log of {DAY_WITHOUT_LOGS} is complete in" in output, output[-4000:]


def test_a_refresh_waits_for_the_daily_run_of_the_day_before(run_outputs: list[str]) -> None:
    output = run_outputs[2]
    assert "STATE success" in output and "('plan', 'skipped')" in output, output[-4000:]
    assert f"not that before {LAST}: wait for its run" in output
