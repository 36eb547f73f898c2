"""The daily DAG, executed: one more day on tables and a GEM of the days before."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from etl.tables.lake import Lake
from gemline import main
from tests.conftest import FIRST, LAST, ROOT
from tests.pipeline import build_tables, rows

BEFORE = LAST - timedelta(days=1)
RUN = f"""
import sys
import dags.daily as d
run = d.daily.test(run_conf={{"day": "{LAST}"}}, mark_success_pattern=sys.argv[1])
print("STATE", run.state, sorted((t.task_id, str(t.state)) for t in run.get_task_instances()))
"""


@pytest.mark.parametrize(
    ("left_out", "surfaces"),
    [
        pytest.param("evaluate|baseline|.*-(reels|messaging)", ["feed"], id="one surface"),
        pytest.param("nothing", ["feed", "reels", "messaging"], id="all", marks=pytest.mark.proof),
    ],
)
def test_a_day_runs_on_airflow_and_gives_the_tables_of_the_range(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path, left_out: str, surfaces: list[str]
) -> None:
    own = tmp_path / "lake"
    build_tables(Lake(str(own), lake.spec), raw, (FIRST, BEFORE))
    days = ["--days", f"{FIRST}:{BEFORE}", "--scale", "tiny"]
    assert main(["train", "gem", "--spec", str(spec_path), "--lake", str(own), *days]) == 0
    env = os.environ | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "GEMLINE_SPEC": str(spec_path),
        "GEMLINE_RAW": str(raw),
        "GEMLINE_LAKE": str(own),
        "GEMLINE_FIRST_DAY": str(FIRST),
        "GEMLINE_SCALE": "tiny",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    tool = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(tool, env=env, cwd=ROOT, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", RUN, left_out], env=env, cwd=ROOT, capture_output=True, text=True
    )
    state = [line for line in done.stdout.splitlines() if line.startswith("STATE")]
    assert state and state[0].startswith("STATE success"), done.stdout[-4000:] + done.stderr[-4000:]
    made = Lake(str(own), lake.spec)
    for name in ("events", "quarantine", "items", "history", "examples", "impressions"):
        assert rows(made, name) == rows(lake, name), name
    for surface in surfaces:
        assert (own / "rankers" / surface / "ranker.json").is_file()
    assert rows(made, "scores") and (own / "report.html").is_file()
