"""The five DAGs of a spec: raw, tables, gem, rankers and maintenance."""

from typing import Any

from airflow.sdk import (
    DAG,
    CronPartitionTimetable,
    PartitionedAtRuntime,
    TriggerRule,
    chain,
    task,
    task_group,
)
from airflow.sdk.exceptions import AirflowFailException

from dags.advertiser_steps import audience_steps, roi_steps
from dags.orchestration import runs
from dags.orchestration.dag_factory import (
    DAY_RANGE,
    LAST_DAY,
    MISSING_SOURCES,
    NEW_DAY_RANGE,
    PIN_FLAGS,
    RUN_MACRO,
    DagFactory,
    current_run,
    on_assets,
    publish_run,
)
from dags.orchestration.operators import (
    GemlineOperator,
    create_operator,
    operator_for_step,
    surface_operator,
)
from dags.orchestration.runs import PipelineRun, plan_run
from dags.orchestration.settings import MANUAL_SCHEDULE, DagSettings
from dags.pipeline import (
    SURFACE_COMMANDS,
    TRAINING_TABLES,
    data_steps,
    gem_steps,
    latest_mature_split,
    ranking_steps,
    statistics_step,
)
from dags.steps import ModelFlags
from etl.errors import UserError
from etl.ingest.arrival import has_arrived, required_daily_sources
from etl.spec import DataSpec
from etl.spec.units import DAY, DaySplit, date_range

SPLIT_MACRO = f"split({RUN_MACRO})"  # a DaySplit; a macro of the rankers DAG


def _split_template(*fields: str) -> str:
    """A template of one day of the split, or of `first:last`."""
    return ":".join(f"{{{{ {SPLIT_MACRO}.{field} }}}}" for field in fields)


TEST_DAYS = _split_template("test_first", "test_last")
DATA_UNTIL_FLAGS = ("--data-until", _split_template("data_until"))
# Templates of the days of a run: GEM is trained on new days only, the rest follows the split.
MODEL_FLAGS = ModelFlags(
    training_days=("--days", NEW_DAY_RANGE),
    teacher_days=("--days", DAY_RANGE),
    split=(
        *("--train", _split_template("train_first", "train_last")),
        *("--calibration", _split_template("calibration")),
        *("--test", TEST_DAYS),
        *DATA_UNTIL_FLAGS,
    ),
    scored_days=("--days", _split_template("test_first", "data_until")),
    data_until=DATA_UNTIL_FLAGS,
)


def raw_dag(factory: DagFactory) -> DAG:
    """Waits for the logs of a day; scheduled daily, or triggered manually."""
    spec, settings, asset = factory.spec, factory.settings, factory.assets.raw
    with factory.create_dag("raw", _raw_schedule(factory), "wait for a day's logs") as dag:

        @task.sensor(
            poke_interval=60,
            timeout=settings.arrival_timeout.total_seconds(),
            mode="reschedule",
            soft_fail=True,
            map_index_template="{{ task.op_kwargs['source'] }}",
        )
        def wait(source: str, **context: Any) -> bool:
            run = current_run(context)
            days = date_range(run.first, run.last)
            return all(has_arrived(spec, settings.raw, source, day) for day in days)

        @task(trigger_rule=TriggerRule.ALL_DONE, outlets=[asset])
        def plan(**context: Any) -> None:
            try:
                run = plan_run(spec, settings.raw, settings.lake, current_run(context))
            except UserError as error:
                raise AirflowFailException(str(error)) from None
            runs.send_run_alerts(spec.name, run)
            publish_run(context, asset, run)

        wait.expand(source=required_daily_sources(spec)) >> plan()
    return dag


def _raw_schedule(factory: DagFactory) -> Any:
    """The cron schedule in the spec's time zone; for `never`, runs are only triggered manually."""
    if factory.settings.schedule == MANUAL_SCHEDULE:
        return PartitionedAtRuntime()
    return CronPartitionTimetable(
        factory.settings.schedule,
        timezone=factory.spec.time_zone,
        key_format="%Y-%m-%d",
        run_offset=-1,  # the partition is the day before
    )


def tables_dag(factory: DagFactory) -> DAG:
    """The steps from raw logs to examples, those of audiences and campaigns, and compaction."""
    paths, day_flags = factory.settings.paths, ("--days", DAY_RANGE)
    data_until = ("--data-until", LAST_DAY)
    steps = [
        *data_steps(factory.spec, paths, day_flags),
        statistics_step(paths, day_flags),
        *audience_steps(factory.spec, paths, day_flags, data_until),
        *roi_steps(factory.spec, paths, day_flags, data_until),
    ]
    with factory.create_dag("tables", on_assets(factory.assets.raw), "logs to tables") as dag:
        operators = {}
        for step in steps:
            flags = ("--missing-sources", MISSING_SOURCES) if "raw" in step.reads else ()
            operators[step.name] = operator_for_step(step, factory.settings, flags)
        chain(*operators.values())
        operators["labels"] >> factory.publish_task("events")
        check = _feature_check(factory)
        before_publishing = [check]
        if factory.spec.history.compact_every:
            before_publishing.append(_compaction(factory))
        chain(operators["feature_statistics"], *before_publishing, factory.publish_task("features"))
    return dag


def _compaction(factory: DagFactory) -> Any:
    """A task that compacts histories if that is due, except for the days that rankers read.

    It comes before the features are published, because the refresh of the next day, which writes
    histories too, waits for that.
    """
    keep_days = str(days_read_by_rankers(factory.spec, factory.settings))
    flags = (*factory.settings.paths.cli_flags, "--keep-days", keep_days)
    command = ("features", "compact", *flags)
    return create_operator("compact", "spark", command, factory.settings)


def _feature_check(factory: DagFactory) -> GemlineOperator:
    """A task that fails if a feature became null or constant, so that no model learns from it."""
    flags = (*factory.settings.paths.cli_flags, "--days", DAY_RANGE)
    return GemlineOperator(task_id="feature_drift", command=("features", "check-drift", *flags))


def gem_dag(factory: DagFactory) -> DAG:
    """Trains GEM on new days, writes its predictions, and checks them for drift."""
    settings, assets = factory.settings, factory.assets
    description = "GEM and its predictions"
    with factory.create_dag("gem", on_assets(assets.features), description) as dag:

        @task(outlets=[assets.gem])
        def publish_gem(**context: Any) -> None:
            publish_run(context, assets.gem, current_run(context))

        train, predict = (
            operator_for_step(step, settings, PIN_FLAGS)
            for step in gem_steps(settings.paths, MODEL_FLAGS, settings.gem_flags)
        )
        pin = factory.pin_task()
        chain(
            pin,
            train,
            predict,
            _drift_check(factory),
            factory.publish_task("teacher_predictions"),
            factory.unpin_task(pin),
        )
        train >> publish_gem()
    return dag


def _drift_check(factory: DagFactory) -> GemlineOperator:
    """A task that fails where prequential metrics drift, so that no ranker is distilled."""
    flags = (*factory.settings.paths.cli_flags, "--days", DAY_RANGE, *PIN_FLAGS)
    return GemlineOperator(task_id="drift", command=("train", "check-drift", *flags))


def split_of_run(spec: DataSpec, settings: DagSettings, run: PipelineRun) -> DaySplit:
    """The days on which the rankers of a run train, are calibrated and are tested."""
    return latest_mature_split(spec, settings.first_day, run.last, settings.training_days)


def days_read_by_rankers(spec: DataSpec, settings: DagSettings) -> int:
    """How many of the latest days rankers train on, are calibrated on or are tested on."""
    return settings.training_days + spec.ranker_lag_days


def check_retention(spec: DataSpec, settings: DagSettings) -> None:
    """Raise UserError if the spec removes examples that rankers still train on."""
    days_read = days_read_by_rankers(spec, settings)
    for name in TRAINING_TABLES:
        days_kept = spec.retention.get(name, days_read * DAY) // DAY
        if days_kept < days_read:
            raise UserError(
                f"the spec's retention of {name} is {days_kept}d, but rankers read {days_read} "
                "days: raise it, or lower GEMLINE_TRAINING_DAYS"
            )


def rankers_dag(factory: DagFactory) -> DAG:
    """Evaluates models, trains, promotes and scores a ranker per surface, writes the report."""
    settings, assets = factory.settings, factory.assets
    check_retention(factory.spec, settings)

    def split(run: PipelineRun) -> DaySplit:
        return split_of_run(factory.spec, settings, run)

    schedule = on_assets(assets.gem & assets.teacher_predictions)
    with factory.create_dag("rankers", schedule, "rankers and report", split=split) as dag:

        @task.short_circuit
        def enough_days(**context: Any) -> bool:
            """Whether there is a day each for training, calibration and test."""
            try:
                split(current_run(context))
            except UserError as error:
                print(error)
                return False
            return True

        @task_group
        def surface(name: str) -> None:
            chain(
                *(
                    surface_operator(command, settings, MODEL_FLAGS, name, PIN_FLAGS)
                    for command in SURFACE_COMMANDS
                )
            )

        @task(outlets=[assets.rankers])
        def publish_rankers(**context: Any) -> None:
            publish_run(context, assets.rankers, current_run(context))

        pin = factory.pin_task()
        shared = _shared_operators(factory)
        surfaces = surface.expand(name=list(factory.spec.ad_surfaces))
        enough_days() >> pin >> [*shared.values(), surfaces]
        surfaces >> shared["feature_store"] >> publish_rankers()
        if "forecast" in shared:
            surfaces >> shared["forecast"]
        [*shared.values(), surfaces] >> factory.unpin_task(pin)
        before_report = [task for name, task in shared.items() if name != "report"]
        [surfaces, *before_report] >> shared["report"]
    return dag


def _shared_operators(factory: DagFactory) -> dict[str, Any]:
    """Operators of the steps that are not specific to a surface, by step name."""
    steps = ranking_steps(factory.spec, factory.settings.paths, MODEL_FLAGS)
    return {
        step.name: operator_for_step(step, factory.settings, PIN_FLAGS)
        for step in steps
        if step.surface is None
    }


def maintenance_dag(factory: DagFactory) -> DAG:
    """Removes expired days, old versions of tables and old GEM checkpoints, daily."""
    settings = factory.settings
    schedule = None if settings.schedule == MANUAL_SCHEDULE else "@daily"
    flags = (*settings.paths.cli_flags, "--keep-days", settings.keep_days)
    with factory.create_dag("maintenance", schedule, "remove old files") as dag:
        expire = ("etl", "expire", *settings.paths.cli_flags)
        expire_task = GemlineOperator(task_id="expire", command=expire)
        expire_task >> GemlineOperator(task_id="vacuum", command=("etl", "vacuum", *flags))
        GemlineOperator(task_id="clean", command=("train", "clean", *flags))
    return dag
