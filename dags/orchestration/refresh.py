"""The DAG that refreshes the current day: its tables, the live rankers and online features.

It starts when the daily run has written the tables of the day before, so that no table of an
unfinished day depends on another. The daily run of the day replaces its tables.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, chain, task, task_group
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from dags.orchestration.dag_factory import DagFactory
from dags.orchestration.operators import operator_for_step, surface_operator
from dags.orchestration.runs import PipelineRun
from dags.orchestration.settings import MANUAL_SCHEDULE
from dags.pipeline import REFIT_RANKER, feature_store_step
from dags.refresh import RefreshPlan, plan_refresh, refresh_flags, refresh_steps
from etl.cli.runner import parse_data_until
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.units import SECONDS

PLAN_TASK = "plan"


def refresh_dag(factory: DagFactory) -> DAG:
    """Ingest to examples, predictions of the teacher, refits and online features."""
    spec, settings, features = factory.spec, factory.settings, factory.assets.features
    is_manual = settings.refresh_schedule == MANUAL_SCHEDULE
    schedule = None if is_manual else settings.refresh_schedule
    with factory.create_dag("refresh", schedule, "refresh the current day") as dag:
        dag.params["data_until"] = Param(
            None, type=["null", "string"], description="time until which events have landed"
        )

        @task(task_id=PLAN_TASK, inlets=[features])
        def plan(**context: Any) -> dict[str, Any]:
            data_until = _data_until(spec, context)
            reason = reason_to_skip(spec, data_until, context["inlet_events"][features])
            if reason:
                raise AirflowSkipException(reason)
            try:
                planned = plan_refresh(spec, settings.raw, settings.lake, data_until)
            except UserError as error:
                raise AirflowFailException(str(error)) from None
            return planned.model_dump(mode="json")

        @task
        def surfaces(planned: dict[str, Any]) -> list[str]:
            return list(planned["surfaces"])

        @task_group
        def surface(name: str) -> None:
            surface_operator(REFIT_RANKER, settings, refresh_flags(TEMPLATES), name)

        planned: Any = plan()
        steps = refresh_steps(spec, settings.paths, TEMPLATES)
        operators = [operator_for_step(step, settings) for step in steps]
        store = feature_store_step(spec, settings.paths, refresh_flags(TEMPLATES))
        refits = surface.expand(name=surfaces(planned))
        chain(planned, *operators, refits, operator_for_step(store, settings))
    return dag


def _plan_template(field: str) -> str:
    return f"{{{{ ti.xcom_pull(task_ids='{PLAN_TASK}')['{field}'] }}}}"


TEMPLATES = RefreshPlan(
    days=_plan_template("days"),
    data_until=_plan_template("data_until"),
    missing_sources=_plan_template("missing_sources"),
    surfaces=(),  # refits are mapped over those of the plan
)


def _data_until(spec: DataSpec, context: Mapping[str, Any]) -> int:
    """The epoch second of `params.data_until`, by default the full hour before the run's time."""
    requested = context["params"].get("data_until")
    if requested:
        return parse_data_until(spec, requested)
    second = int(context["dag_run"].run_after.timestamp())
    return second - second % SECONDS["h"]


def reason_to_skip(spec: DataSpec, data_until: int, feature_events: Iterable[Any]) -> str | None:
    """Why the tables of a day are not refreshed now; None if they may be.

    `feature_events` are the events of the asset that the daily runs publish.
    """
    day = spec.last_day_before(data_until)
    if spec.is_day_end(data_until):
        return f"{day} is over: its daily run writes the tables"
    finished = [PipelineRun.model_validate(event.extra).last for event in feature_events]
    if not finished or max(finished) != day - timedelta(days=1):
        latest = max(finished, default=None)
        return f"the latest day with tables is {latest}, not that before {day}: wait for its run"
    return None
