"""Files of old table versions go, but for those that a run still reads; and GEMs of long ago."""

from airflow.sdk import DAG

from dags.operators import GemlineOperator
from dags.parts.part import Line
from dags.settings import NEVER


def upkeep(line: Line) -> DAG:
    """The DAG that cleans up once a day."""
    settings = line.settings
    schedule = None if settings.schedule == NEVER else "@daily"
    flags = (*settings.place.flags, "--keep-days", settings.keep_days)
    with line.dag("upkeep", schedule, "old files go") as dag:
        GemlineOperator(task_id="vacuum", command=("etl", "vacuum", *flags))
        GemlineOperator(task_id="forget", command=("train", "forget", *flags))
    return dag
