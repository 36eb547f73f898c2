"""What the DAGs of a line share: settings, names of what a run works on, and how they tell it."""

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from airflow.sdk import DAG, Asset, Param, PartitionedAssetTimetable
from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference

from dags import alerts
from dags.assets import TABLES, Assets, assets_of
from dags.operators import DEFAULT_POOL, DEFAULTS, GemlineOperator, Publish
from dags.runs import Run, run_of
from dags.settings import Settings
from etl.spec import DataSpec

RUN = "run(triggering_asset_events, dag_run, params)"
DAYS, NEW_DAYS, PINS, ABSENT, AS_JSON = (
    f"{{{{ {RUN}.{name} }}}}"
    for name in ("days", "new_days", "pins", "sources_absent", "model_dump_json()")
)
PINNED = ("--pins", PINS)
HOLDER = "{{ dag.dag_id }} {{ run_id }}"


@dataclass(frozen=True)
class Line:
    """A spec, and where its DAGs run."""

    spec: DataSpec
    settings: Settings

    @cached_property
    def assets(self) -> Assets:
        """What the parts make."""
        return assets_of(self.spec)

    def dag(self, part: str, schedule: Any, about: str, **macros: Any) -> DAG:
        """An empty DAG: one run at a time, so that each table has one writer."""
        return DAG(
            f"{self.spec.name}_{part}",
            description=about,
            schedule=schedule,
            catchup=False,
            max_active_runs=1,
            default_args=DEFAULTS | {"on_failure_callback": alerts.failed},
            deadline=self._deadline(),
            params={"days": Param(None, type=["null", "string"], description="first:last")},
            user_defined_macros={"run": run_of, **macros},
            tags=["gemline", self.spec.name],
        )

    def _deadline(self) -> DeadlineAlert | None:
        hours = self.settings.deadline_hours
        queued = DeadlineReference.DAGRUN_QUEUED_AT
        late = AsyncCallback(alerts.late)
        return DeadlineAlert(queued, timedelta(hours=hours), late) if hours else None

    def publish(self, name: str) -> Publish:
        """The task that tells of the tables of an asset."""
        command = ("etl", "told", *self.settings.place.flags, "--days", DAYS)
        return Publish(
            task_id=f"publish_{name}",
            command=(*command, "--tables", *TABLES[name]),
            run=AS_JSON,
            outlets=[getattr(self.assets, name)],
        )

    def hold(self) -> GemlineOperator:
        """The task that keeps the versions that a run reads from being cleaned up."""
        flags = (*self.settings.place.flags, *PINNED)
        command = ("etl", "pin", *flags, "--run", HOLDER)
        return GemlineOperator(task_id="hold", command=command, pool=DEFAULT_POOL).as_setup()

    def release(self, hold: GemlineOperator) -> GemlineOperator:
        """The task that lets them go, however the run ends."""
        command = ("etl", "unpin", *self.settings.place.flags, "--run", HOLDER)
        release = GemlineOperator(task_id="release", command=command, pool=DEFAULT_POOL)
        return release.as_teardown(setups=hold)


def after(assets: Any) -> PartitionedAssetTimetable:
    """A run for each day of which all these assets have told."""
    return PartitionedAssetTimetable(assets=assets)


def tell(context: Any, asset: Asset, run: Run) -> None:
    """Put what a run worked on into the event of its asset."""
    event = context["outlet_events"][asset]
    event.extra = run.model_dump(mode="json")
    event.add_partitions(str(run.last))


def this_run(context: Any) -> Run:
    """What the run of a task works on."""
    return run_of(
        context.get("triggering_asset_events") or {}, context["dag_run"], context["params"]
    )
