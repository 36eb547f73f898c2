"""The daily DAG, executed: a task alone, and one more day on what the days before left."""

import os
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from etl.quarantine import NO_DAY
from etl.tables.lake import Lake
from gemline import main
from ranking.package.versions import current
from tests.conftest import FIRST, LAST, ROOT
from tests.pipeline import TABLES, build_tables, rows

BEFORE = LAST - timedelta(days=1)
RUN = """
import sys
import dags.daily as d
run = d.daily.test(run_conf={"day": sys.argv[1]}, mark_success_pattern=sys.argv[2])
print("STATE", run.state, sorted((t.task_id, str(t.state)) for t in run.get_task_instances()))
"""


def run_dag(own: Path, spec: Path, raw: Path, day: date, left_out: str) -> None:
    """Run the DAG for a day, but for the tasks that a pattern matches."""
    env = os.environ | {
        "AIRFLOW_HOME": str(own.with_name("airflow")),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "GEMLINE_SPEC": str(spec),
        "GEMLINE_RAW": str(raw),
        "GEMLINE_LAKE": str(own),
        "GEMLINE_FIRST_DAY": str(FIRST),
        "GEMLINE_SCALE": "tiny",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    tool = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(tool, env=env, cwd=ROOT, check=True, capture_output=True)
    command = [sys.executable, "-c", RUN, str(day), left_out]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    state = [line for line in done.stdout.splitlines() if line.startswith("STATE")]
    assert state and state[0].startswith("STATE success"), done.stdout[-4000:] + done.stderr[-4000:]


def test_a_task_runs_on_airflow_and_writes_its_day(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    own = tmp_path / "lake"
    run_dag(own, spec_path, raw, FIRST, "(?!ingest$).+")
    for name in ("events", "flow", "quarantine"):
        there = [row for row in rows(lake, name) if row["day"] in (FIRST, NO_DAY)]
        assert rows(Lake(str(own), lake.spec), name) == there, name


@pytest.mark.proof
def test_a_day_runs_on_airflow_and_gives_the_tables_of_the_range(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    own = tmp_path / "lake"
    build_tables(Lake(str(own), lake.spec), raw, (FIRST, BEFORE))
    days = ["--days", f"{FIRST}:{BEFORE}", "--scale", "tiny"]
    assert main(["train", "gem", "--spec", str(spec_path), "--lake", str(own), *days]) == 0
    run_dag(own, spec_path, raw, LAST, "nothing")
    made = Lake(str(own), lake.spec)
    for name in TABLES:
        assert rows(made, name) == rows(lake, name), name
    for surface in lake.spec.ad_surfaces:
        assert current(str(own), surface).target
    assert rows(made, "scores") and (own / "report.html").is_file()
