"""Files of old table versions go, but for those that a run still reads."""

from airflow.sdk import DAG

from dags.operators import GemlineOperator
from dags.parts.part import Line
from dags.settings import NEVER


def upkeep(line: Line) -> DAG:
    """The DAG that cleans up once a day."""
    settings = line.settings
    schedule = None if settings.schedule == NEVER else "@daily"
    command = ("etl", "vacuum", *settings.place.flags, "--keep-days", settings.keep_days)
    with line.dag("upkeep", schedule, "old files go") as dag:
        GemlineOperator(task_id="vacuum", command=command)
    return dag
