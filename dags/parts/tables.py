"""Logs to tables."""

from airflow.sdk import DAG, chain

from dags.line import data_steps
from dags.operators import operator_of
from dags.parts.part import ABSENT, DAYS, Line, after

ENDS = {"labels": "events", "examples": "features"}  # the last step of what is told of


def tables(line: Line) -> DAG:
    """The DAG of all Spark steps up to examples."""
    steps = data_steps(line.settings.place, ("--days", DAYS))
    with line.dag("tables", after(line.assets.raw), "logs to tables") as dag:
        operators = {
            step.name: operator_of(
                step, line.settings, ("--absent", ABSENT) if "raw" in step.reads else ()
            )
            for step in steps
        }
        chain(*operators.values())
        for last, asset in ENDS.items():
            operators[last] >> line.publish(asset)
    return dag
