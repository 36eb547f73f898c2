"""Wait for a day's logs."""

from typing import Any

from airflow.sdk import DAG, CronPartitionTimetable, PartitionedAtRuntime, TriggerRule, task
from airflow.sdk.exceptions import AirflowFailException

from dags import alerts
from dags.arrival import begin
from dags.parts.part import Line, tell, this_run
from dags.settings import NEVER
from etl.arrival import daily_sources, has_arrived
from etl.errors import UserError
from etl.spec.units import each_day


def raw(line: Line) -> DAG:
    """The DAG that begins a day, by the clock or by hand."""
    spec, settings, asset = line.spec, line.settings, line.assets.raw
    with line.dag("raw", _schedule(line), "a day's logs have come") as dag:

        @task.sensor(
            poke_interval=60,
            timeout=settings.wait.total_seconds(),
            mode="reschedule",
            soft_fail=True,
            map_index_template="{{ task.op_kwargs['source'] }}",
        )
        def wait(source: str, **context: Any) -> bool:
            run = this_run(context)
            days = each_day(run.first, run.last)
            return all(has_arrived(spec, settings.raw, source, day) for day in days)

        @task(trigger_rule=TriggerRule.ALL_DONE, outlets=[asset])
        def day(**context: Any) -> None:
            try:
                run = begin(spec, settings.raw, settings.lake, this_run(context))
            except UserError as error:
                raise AirflowFailException(str(error)) from None
            alerts.send_run_alerts(spec.name, run)
            tell(context, asset, run)

        wait.expand(source=daily_sources(spec)) >> day()
    return dag


def _schedule(line: Line) -> Any:
    """Each day by the clock, when no clock is turned forward or back; or never."""
    if line.settings.schedule == NEVER:
        return PartitionedAtRuntime()
    return CronPartitionTimetable(
        line.settings.schedule,
        timezone=line.spec.time_zone,
        key_format="%Y-%m-%d",
        run_offset=-1,
    )
