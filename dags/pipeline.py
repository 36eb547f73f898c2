"""The pipeline, declared once: its steps, their commands, and what each reads and writes."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Literal

from dags.advertiser_steps import audience_steps, forecast_steps, roi_steps
from dags.steps import Engine, ModelFlags, PipelinePaths, Step
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.sections import RetainedTable
from etl.spec.units import DaySplit

ATTRIBUTE_TABLES = ("attributes_user", "attributes_item")
SNAPSHOT_TABLES = ("attributes_user_snapshots", "attributes_item_snapshots")  # of the attributes
GEM_MODEL_DIR = "models/gem"
ITEM_TABLES = ("items", "item_versions")
TEACHER_TABLES = ("teacher_predictions", "user_teacher_embeddings")
EXAMPLE_TABLES = ("examples", "impressions", "history", *ITEM_TABLES)
# Tables of which rankers read the days that they train on.
TRAINING_TABLES: tuple[RetainedTable, ...] = (
    "examples",
    "impressions",
    "teacher_predictions",
    "user_teacher_embeddings",
)


def latest_mature_split(
    spec: DataSpec, first: date, last: date, max_training_days: int | None = None
) -> DaySplit:
    """Test on the latest day whose labels are all final at the end of `last`.

    The day before is for calibration, and earlier ones are for training: all of them from `first`
    on, or the latest `max_training_days`. Raises UserError if no day is left for training.
    """
    maturity_days = spec.days_until_mature
    test = last - timedelta(days=maturity_days)
    train_last = last - timedelta(days=spec.ranker_lag_days)
    if train_last < first:
        raise UserError(
            f"--days {first}:{last} is too short: labels of {spec.name} mature after "
            f"{maturity_days} days, and training, calibration and test need at least one day each "
            "before that"
        )
    if max_training_days is not None:
        first = max(first, train_last - timedelta(days=max_training_days - 1))
    return DaySplit(
        train_first=first,
        train_last=train_last,
        calibration=test - timedelta(days=1),
        test_first=test,
        test_last=test,
        data_until=last,
    )


def all_days_flags(split: DaySplit) -> tuple[str, ...]:
    """The flag of the steps that work on all days with logs."""
    return ("--days", f"{split.train_first}:{split.data_until}")


def split_flags(split: DaySplit) -> tuple[str, ...]:
    """Flags of the steps that train, calibrate and test."""
    calibration = ("--calibration", str(split.calibration)) if split.calibration else ()
    return (
        *("--train", f"{split.train_first}:{split.train_last}"),
        *calibration,
        *("--test", f"{split.test_first}:{split.test_last}"),
        *("--data-until", str(split.data_until)),
    )


def model_flags(split: DaySplit) -> ModelFlags:
    """Flags of the steps of models, for all days at once.

    GEM learns the days after those of rankers, too, but never together with them.
    """
    days = f"{split.train_first}:{split.data_until}"
    return ModelFlags(
        training_days=("--days", days, "--joint-until", str(split.train_last)),
        teacher_days=("--days", days),
        split=split_flags(split),
        scored_days=("--days", f"{split.test_first}:{split.data_until}"),
        data_until=("--data-until", str(split.data_until)),
    )


def data_steps(
    spec: DataSpec,
    paths: PipelinePaths,
    day_flags: tuple[str, ...],
    label_flags: tuple[str, ...] = (),
    raw_flags: tuple[str, ...] = (),
) -> list[Step]:
    """Spark steps from raw logs to examples.

    `label_flags` are further flags of the labels, `raw_flags` of the steps that read raw files.
    """
    raw = ("--raw", paths.raw, *raw_flags)
    attribute_tables = (*ATTRIBUTE_TABLES, *SNAPSHOT_TABLES)
    item_tables = (*ITEM_TABLES, "first_item_versions")

    def spark_step(
        name: str, command: tuple[str, ...], reads: tuple[str, ...], writes: tuple[str, ...]
    ) -> Step:
        return Step(name, "spark", (*command, *paths.cli_flags, *day_flags), reads, writes)

    attributes = spark_step(
        "attributes",
        ("etl", "attributes", *raw),
        reads=("raw",),
        writes=(*attribute_tables, "quarantine"),
    )
    ingest = spark_step(
        "ingest",
        ("etl", "ingest", *raw),
        reads=("raw", *(attribute_tables if spec.ingest_uses_item_attributes else ())),
        writes=("events", "quarantine", "ingest_metrics"),
    )
    return [
        *((attributes, ingest) if spec.ingest_uses_item_attributes else (ingest, attributes)),
        spark_step(
            "labels",
            ("etl", "labels", *label_flags),
            reads=("events", *attribute_tables),
            writes=("impressions",),
        ),
        spark_step(
            "items",
            ("features", "items"),
            reads=("events", *attribute_tables),
            writes=item_tables,
        ),
        spark_step(
            "history",
            ("features", "history"),
            reads=("events", "items"),
            writes=("history", "user_event_counts"),
        ),
        spark_step(
            "examples",
            ("features", "examples"),
            reads=("events", *item_tables, "history", "user_event_counts", *attribute_tables),
            writes=("examples",),
        ),
    ]


def statistics_step(paths: PipelinePaths, day_flags: tuple[str, ...]) -> Step:
    """Compute statistics of the features of some days."""
    return Step(
        "feature_statistics",
        "spark",
        ("features", "statistics", *paths.cli_flags, *day_flags),
        ("examples", "item_versions"),
        ("feature_statistics",),
    )


def gem_steps(
    paths: PipelinePaths, flags: ModelFlags, gem_flags: tuple[str, ...] = ()
) -> list[Step]:
    """Train GEM, with further `gem_flags`, and write its predictions and user embeddings."""
    return [
        Step(
            "gem",
            "torch",
            ("train", "gem", *paths.cli_flags, *flags.training_days, *gem_flags),
            EXAMPLE_TABLES,
            (GEM_MODEL_DIR,),
            is_distributed=True,
        ),
        teacher_step(paths, flags.teacher_days),
    ]


def teacher_step(paths: PipelinePaths, day_flags: tuple[str, ...]) -> Step:
    """Predict the impressions of some days with earlier GEMs."""
    return Step(
        "teacher_predictions",
        "torch",
        ("teacher-predictions", *paths.cli_flags, *day_flags),
        (*EXAMPLE_TABLES, GEM_MODEL_DIR),
        TEACHER_TABLES,
    )


def evaluation_steps(paths: PipelinePaths, flags: ModelFlags) -> list[Step]:
    """Test predictions of GEM and of the LightGBM baseline."""
    return [
        Step(
            "evaluate",
            "torch",
            ("train", "evaluate", *paths.cli_flags, *flags.split),
            (*EXAMPLE_TABLES, GEM_MODEL_DIR),
            ("evaluations/gem.parquet",),
        ),
        Step(
            "baseline",
            "torch",
            ("train", "baseline", *paths.cli_flags, *flags.split),
            EXAMPLE_TABLES,
            ("evaluations/lightgbm.parquet",),
        ),
    ]


@dataclass(frozen=True)
class SurfaceCommand:
    """A command that runs once per ad surface; its step is called `{name}-{surface}`."""

    name: str
    engine: Engine
    subcommand: tuple[str, ...]
    days: Literal["split", "scored_days", "data_until"]

    def for_surface(self, paths: PipelinePaths, flags: ModelFlags, surface: Any) -> tuple[Any, ...]:
        """The command line, the surface last: a name, or a template that Airflow renders."""
        days = getattr(flags, self.days)
        return (*self.subcommand, *paths.cli_flags, *days, "--surface", surface)


TRAIN_RANKER = SurfaceCommand("ranker", "torch", ("rank", "train"), "split")
PROMOTE_RANKER = SurfaceCommand("promotion", "torch", ("rank", "promote"), "split")
REFIT_RANKER = SurfaceCommand("refit", "torch", ("rank", "refit"), "data_until")
SCORE_SURFACE = SurfaceCommand("scores", "spark", ("rank", "score"), "scored_days")
SURFACE_COMMANDS = (TRAIN_RANKER, PROMOTE_RANKER, REFIT_RANKER, SCORE_SURFACE)


def surface_step(
    command: SurfaceCommand, paths: PipelinePaths, flags: ModelFlags, surface: str
) -> Step:
    """The step of a command for one surface."""
    folder = f"rankers/{surface}"
    evaluations = (
        f"evaluations/{variant}-{surface}.parquet" for variant in ("student", "distilled")
    )
    reads, writes = {
        TRAIN_RANKER: (
            (*EXAMPLE_TABLES, *TEACHER_TABLES, GEM_MODEL_DIR),
            (f"{folder}/newest.json", *evaluations),
        ),
        PROMOTE_RANKER: (
            (*EXAMPLE_TABLES, *TEACHER_TABLES, f"{folder}/newest.json"),
            (f"{folder}/current.json",),
        ),
        REFIT_RANKER: (
            (*EXAMPLE_TABLES, *TEACHER_TABLES, f"{folder}/current.json"),
            (f"{folder}/refit.json",),
        ),
        SCORE_SURFACE: (
            (
                *("examples", "history", *ITEM_TABLES, "user_teacher_embeddings"),
                *(f"{folder}/current.json", f"{folder}/refit.json"),
            ),
            (f"scores/surface={surface}",),
        ),
    }[command]
    words = command.for_surface(paths, flags, surface)
    return Step(f"{command.name}-{surface}", command.engine, words, reads, writes, surface=surface)


def feature_store_step(spec: DataSpec, paths: PipelinePaths, flags: ModelFlags) -> Step:
    """Materialize the features that the promoted rankers read when serving.

    The store of a refresh of a later day, which a daily run may outlast, is kept.
    """
    return Step(
        "feature_store",
        "torch",
        ("rank", "materialize", *paths.cli_flags, *flags.data_until, "--keep-newer"),
        (
            *("events", *ATTRIBUTE_TABLES, "items", "user_teacher_embeddings"),
            *(f"rankers/{surface}/refit.json" for surface in spec.ad_surfaces),
        ),
        ("feature_store/current.json",),
    )


def report_step(
    spec: DataSpec, paths: PipelinePaths, flags: ModelFlags, earlier: Iterable[Step]
) -> Step:
    """The HTML report, which reads the outputs of earlier steps."""
    reads = (
        *(name for step in earlier for name in step.writes),
        *("impressions", *TEACHER_TABLES, "quarantine", "ingest_metrics", "feature_statistics"),
        *(("audience_quality",) if spec.audiences else ()),
        *(("response_curves",) if spec.roi else ()),
    )
    command = ("report", *paths.cli_flags, "--raw", paths.raw, *flags.split)
    return Step("report", "torch", command, reads, ("report.html",))


def ranking_steps(spec: DataSpec, paths: PipelinePaths, flags: ModelFlags) -> list[Step]:
    """All steps that follow the split of days: evaluations, rankers, scores, features, report."""
    steps = evaluation_steps(paths, flags)
    for surface in spec.ad_surfaces:
        for command in (TRAIN_RANKER, PROMOTE_RANKER, REFIT_RANKER):
            steps.append(surface_step(command, paths, flags, surface))
    for surface in spec.ad_surfaces:
        steps.append(surface_step(SCORE_SURFACE, paths, flags, surface))
    steps += forecast_steps(spec, paths, flags)
    steps.append(feature_store_step(spec, paths, flags))
    return [*steps, report_step(spec, paths, flags, steps)]


def pipeline_steps(
    spec: DataSpec, paths: PipelinePaths, split: DaySplit, gem_flags: tuple[str, ...] = ()
) -> list[Step]:
    """All steps in order; `gem_flags` are further flags of `gemline train gem`."""
    flags = model_flags(split)
    advertiser_steps = [
        *audience_steps(spec, paths, all_days_flags(split), flags.data_until),
        *roi_steps(spec, paths, all_days_flags(split), flags.data_until),
    ]
    return [
        *data_steps(spec, paths, all_days_flags(split)),
        statistics_step(paths, all_days_flags(split)),
        # Consecutive steps of one engine share a process: Spark starts once for all of them.
        *sorted(advertiser_steps, key=lambda step: step.engine == "torch"),
        *gem_steps(paths, flags, gem_flags),
        *ranking_steps(spec, paths, flags),
    ]
