"""The line by day, on Airflow: the same commands as the local runner, one task a step.

Where it runs comes from the environment: GEMLINE_SPEC, GEMLINE_RAW, GEMLINE_LAKE,
GEMLINE_FIRST_DAY, the first day with logs, and if it is not small GEMLINE_SCALE, the size of GEM.
"""

import os
import shlex
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, CronPartitionTimetable, Param, chain, task

from dags.line import Days, ModelFlags, Place, Step, data_steps, model_steps, newest_mature
from etl.errors import UserError
from etl.spec import DataSpec, load_spec

DAY = "{{ day_of(dag_run, params, logical_date) }}"
SPLIT = "{{ split_of(dag_run, params, logical_date) }}"
TESTED = "{{ tested_of(dag_run, params, logical_date) }}"
FLAGS = ModelFlags(
    learned=("--days", DAY),
    known=("--days", DAY),
    split=(SPLIT,),
    tested=("--days", TESTED),
    landed=("--landed", DAY),
)
DEFAULTS = {
    "owner": "gemline",
    "retries": 2,
    "retry_delay": timedelta(minutes=5),
    "execution_timeout": timedelta(hours=12),
}


def day_of(dag_run: Any, params: Mapping[str, Any], logical_date: Any) -> date:
    """The day of a run: its partition, else its parameter, else its logical date.

    Raises ValueError where it has none of them.
    """
    key = getattr(dag_run, "partition_key", None) or params.get("day")
    if key:
        return date.fromisoformat(key)
    if logical_date is None:
        raise ValueError("this run has no day: trigger it with a partition key or params.day")
    day: date = logical_date.date()
    return day


def macros(spec: DataSpec, first: date) -> dict[str, Callable[..., Any]]:
    """What the commands of a run ask for: its day, how its days are split, which are tested."""

    def days(*run: Any) -> Days:
        return newest_mature(spec, first, day_of(*run))

    return {
        "day_of": day_of,
        "split_of": lambda *run: shlex.join(days(*run).split),
        "tested_of": lambda *run: f"{days(*run).test_first}:{days(*run).test_last}",
    }


def build(spec: DataSpec, place: Place, first: date) -> DAG:
    """The daily DAG of a spec: it runs at four, when no clock is turned forward or back."""
    with DAG(
        f"gemline_{spec.name}",
        schedule=CronPartitionTimetable(
            "0 4 * * *", timezone=spec.time_zone, key_format="%Y-%m-%d", run_offset=-1
        ),
        catchup=False,
        max_active_runs=1,
        default_args=DEFAULTS,
        params={"day": Param(None, type=["null", "string"], format="date")},
        user_defined_macros=macros(spec, first),
        doc_md=__doc__,
    ) as dag:

        @task.short_circuit
        def enough_days(**context: Any) -> bool:
            """Whether a day is there for each of training, calibration and test."""
            day = day_of(context["dag_run"], context["params"], context.get("logical_date"))
            try:
                newest_mature(spec, first, day)
            except UserError as reason:
                print(reason)
                return False
            return True

        gate = enough_days()
        written: dict[str, BashOperator] = {}
        size = ("--scale", os.environ.get("GEMLINE_SCALE", "small"))
        learn, judge = model_steps(spec, place, FLAGS, size)
        for step in (*data_steps(place, ("--days", DAY)), *learn):
            _after(written, step)
        written["knowledge"] >> gate
        scores = []
        for step in judge:
            operator = _after(written, step)
            gate >> operator
            if step.name.startswith("scores-"):
                scores.append(operator)
        chain(*scores)  # they write one table, one after the other
    return dag


def _after(written: dict[str, BashOperator], step: Step) -> BashOperator:
    """The task of a step, after the tasks that write what it reads."""
    words = [word if "{{" in word else shlex.quote(word) for word in step.command]
    operator = BashOperator(task_id=step.name, bash_command=f"python -m gemline {' '.join(words)}")
    for name in step.reads:
        if name in written:
            written[name] >> operator
    written.update(dict.fromkeys(step.writes, operator))
    return operator


if "GEMLINE_SPEC" in os.environ:
    _place = Place(
        Path(os.environ["GEMLINE_SPEC"]), os.environ["GEMLINE_RAW"], os.environ["GEMLINE_LAKE"]
    )
    daily = build(
        load_spec(_place.spec), _place, date.fromisoformat(os.environ["GEMLINE_FIRST_DAY"])
    )
