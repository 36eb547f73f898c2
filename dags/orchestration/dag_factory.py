"""What the DAGs of a spec share: assets, templates of a run's days and versions, common tasks."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

from airflow.sdk import DAG, Asset, Param, PartitionedAssetTimetable
from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference

from dags.orchestration import runs
from dags.orchestration.operators import (
    DEFAULT_ARGS,
    DEFAULT_POOL,
    GemlineOperator,
    PublishAssetOperator,
)
from dags.orchestration.runs import PipelineRun, run_from_context
from dags.orchestration.settings import DagSettings
from dags.pipeline import ATTRIBUTE_TABLES, EXAMPLE_TABLES, SNAPSHOT_TABLES, TEACHER_TABLES
from etl.spec import DataSpec

# Assets of tables, with the tables whose metadata their events hold.
ASSET_TABLES = {
    "events": ("events", *ATTRIBUTE_TABLES, *SNAPSHOT_TABLES, "impressions", "ingest_metrics"),
    "features": (*EXAMPLE_TABLES, "events", *ATTRIBUTE_TABLES, *SNAPSHOT_TABLES),
    "teacher_predictions": TEACHER_TABLES,
}


class PipelineAssets(NamedTuple):
    """The assets of a spec, in the order in which they are written; one partition a day."""

    raw: Asset
    events: Asset
    features: Asset
    gem: Asset
    teacher_predictions: Asset
    rankers: Asset


def pipeline_assets(spec: DataSpec) -> PipelineAssets:
    """The assets of a spec."""
    return PipelineAssets(
        *(
            Asset(f"{spec.name}/{name}", f"gemline://{spec.name}/{name}")
            for name in PipelineAssets._fields
        )
    )


RUN_MACRO = "run(triggering_asset_events, dag_run, params)"  # a PipelineRun


def _run_template(attribute: str) -> str:
    return f"{{{{ {RUN_MACRO}.{attribute} }}}}"


DAY_RANGE = _run_template("day_range")
LAST_DAY = _run_template("last")
NEW_DAY_RANGE = _run_template("new_day_range")
MISSING_SOURCES = _run_template("missing_source_names")
RUN_JSON = _run_template("model_dump_json()")
PIN_FLAGS = ("--pins", _run_template("pinned_versions"))
PIN_OWNER = "{{ dag.dag_id }} {{ run_id }}"


@dataclass(frozen=True)
class DagFactory:
    """Creates the DAGs of a spec and the tasks that they have in common."""

    spec: DataSpec
    settings: DagSettings

    @cached_property
    def assets(self) -> PipelineAssets:
        """The assets of the spec."""
        return pipeline_assets(self.spec)

    def create_dag(
        self, name: str, schedule: Any, description: str, **macros: Callable[..., Any]
    ) -> DAG:
        """An empty DAG; it has one active run at a time, so that each table has one writer."""
        return DAG(
            f"{self.spec.name}_{name}",
            description=description,
            schedule=schedule,
            catchup=False,
            max_active_runs=1,
            default_args=DEFAULT_ARGS | {"on_failure_callback": runs.on_task_failure},
            deadline=self._deadline(),
            params={"days": Param(None, type=["null", "string"], description="first:last")},
            user_defined_macros={"run": run_from_context, **macros},
            tags=["gemline", self.spec.name],
        )

    def _deadline(self) -> DeadlineAlert | None:
        hours = self.settings.deadline_hours
        if not hours:
            return None
        callback = AsyncCallback(runs.on_deadline_missed)
        return DeadlineAlert(DeadlineReference.DAGRUN_QUEUED_AT, timedelta(hours=hours), callback)

    def publish_task(self, name: str) -> PublishAssetOperator:
        """A task that publishes the metadata of the tables of an asset in an asset event."""
        command = ("etl", "table-info", *self.settings.paths.cli_flags, "--days", DAY_RANGE)
        return PublishAssetOperator(
            task_id=f"publish_{name}",
            command=(*command, "--tables", *ASSET_TABLES[name]),
            run=RUN_JSON,
            outlets=[getattr(self.assets, name)],
        )

    def pin_task(self) -> GemlineOperator:
        """A setup task that protects the table versions a run reads from vacuum."""
        flags = (*self.settings.paths.cli_flags, *PIN_FLAGS)
        command = ("etl", "pin", *flags, "--run-id", PIN_OWNER)
        pin = GemlineOperator(task_id="pin", command=command, pool=DEFAULT_POOL)
        pin.as_setup()  # type: ignore[no-untyped-call]
        return pin

    def unpin_task(self, pin: GemlineOperator) -> GemlineOperator:
        """A teardown task that removes the protection, also after a failed run."""
        command = ("etl", "unpin", *self.settings.paths.cli_flags, "--run-id", PIN_OWNER)
        unpin = GemlineOperator(task_id="unpin", command=command, pool=DEFAULT_POOL)
        unpin.as_teardown(setups=pin)
        return unpin


def on_assets(assets: Any) -> PartitionedAssetTimetable:
    """A schedule that starts a run for each day on which all these assets have an event."""
    return PartitionedAssetTimetable(assets=assets)


def publish_run(context: Any, asset: Asset, run: PipelineRun) -> None:
    """Add an event to an asset that describes a run."""
    event = context["outlet_events"][asset]
    event.extra = run.model_dump(mode="json")
    event.add_partitions(str(run.last))


def current_run(context: Any) -> PipelineRun:
    """The run that a task belongs to."""
    return run_from_context(
        context.get("triggering_asset_events") or {}, context["dag_run"], context["params"]
    )
