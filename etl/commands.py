"""The commands `gemline simulate`, `gemline etl …` and `gemline doctor`.

Spark is imported only when a Spark step is called.
"""

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field, ValidationError

from etl.cli.runner import (
    DayArgs,
    LakeArgs,
    format_validation_error,
    holds_leases,
    parse_data_until,
    parse_days_argument,
    print_counts,
    read_yaml_mapping,
)
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.base import StrictModel
from etl.table_commands import TABLE_COMMANDS


class SimulateArgs(StrictModel):
    """Arguments of the simulator."""

    simulator: Annotated[
        Path, tyro.conf.arg(help="simulator configuration, such as conf/simulator/demo.yaml")
    ]
    out: Annotated[Path, tyro.conf.arg(help="folder to write the raw logs to")]


class RawArgs(DayArgs):
    """Arguments of a step that reads raw files."""

    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]
    missing_sources: Annotated[
        str, tyro.conf.arg(help="comma-separated sources that may lack files on these days")
    ] = ""

    def load_spec(self) -> DataSpec:
        """The data spec, in which the missing sources are optional."""
        missing = [name for name in self.missing_sources.split(",") if name]
        return super().load_spec().allow_missing_sources(missing)


class IngestArgs(RawArgs):
    """Arguments of the ingest step."""

    allow_empty_days: Annotated[
        bool,
        tyro.conf.arg(
            help="also ingest days without events; otherwise they are refused, as a wrong --raw "
            "would be"
        ),
    ] = False


class LabelArgs(DayArgs):
    """Arguments of the labels step."""

    data_until: Annotated[
        str | None,
        tyro.conf.arg(
            help="time until which all events have landed, such as 2026-01-08T14:00; by default "
            "the end of the last day"
        ),
    ] = None


class InferArgs(StrictModel):
    """Arguments of the inference of a spec."""

    folder: Annotated[
        tyro.conf.Positional[Path], tyro.conf.arg(help="folder with samples of your raw files")
    ]


def infer(args: InferArgs) -> None:
    """Print a first data spec for the files in a folder, with comments on guesses."""
    from etl.spec.infer import infer_spec

    print(infer_spec(args.folder), end="")


class CheckArgs(StrictModel):
    """Arguments of the check of a spec against raw files."""

    spec: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="data spec (YAML)")]
    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]
    sample: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="records of each source's latest day to read")
    ] = 10_000


def check(args: CheckArgs) -> None:
    """Preview the ingest of a sample of each source: accepted records, and reasons for quarantine.

    Writes nothing. Exits with 2 if a source cannot be read or has too many bad records.
    """
    from rich.console import Console

    from etl.ingest.preview import preview_sources, print_previews
    from etl.runtime.spark import spark_session
    from etl.spec import load_spec

    spec = load_spec(args.spec)
    spark_session("spec check")
    if not print_previews(spec, preview_sources(spec, args.raw, args.sample), Console()):
        raise UserError("a source cannot be ingested as the spec describes it; see above")


class QuarantineArgs(LakeArgs):
    """Arguments of the quarantine report and of reprocessing."""

    days: Annotated[
        str | None, tyro.conf.arg(help="one day or first:last; by default all ingested days")
    ] = None
    examples: Annotated[int, tyro.conf.arg(help="records to show per reason")] = 2
    reprocess: Annotated[
        bool, tyro.conf.arg(help="move records that are valid now to the events table")
    ] = False


def simulate(args: SimulateArgs) -> None:
    """Write simulated raw logs."""
    from etl.simulator.config import SimulatorConfig
    from etl.simulator.simulate import simulate as write_logs

    content = read_yaml_mapping(args.simulator)
    try:
        config = SimulatorConfig.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{args.simulator}: {format_validation_error(error)}") from None
    write_logs(config, args.out)


@holds_leases("ingest")
def ingest(args: IngestArgs) -> None:
    """Parse, deduplicate and filter raw logs into the events table."""
    from etl.ingest.run import ingest as step
    from etl.runtime.spark import spark_session

    lake = args.open_lake()
    spark_session("ingest")
    counts = step(lake, args.raw, args.day_range, allow_empty_days=args.allow_empty_days)
    print_counts("ingest", counts)


@holds_leases("attributes")
def attributes(args: RawArgs) -> None:
    """Load attribute files as versioned rows of users and items."""
    from etl.attributes import load_attributes
    from etl.runtime.spark import spark_session
    from etl.tables.day_order import days_in_order

    lake = args.open_lake()
    with days_in_order(lake, "attributes", args.day_range):
        spark_session("attributes")
        print_counts("attributes", load_attributes(lake, args.raw, args.day_range))


@holds_leases("labels")
def labels(args: LabelArgs) -> None:
    """Attribute outcomes to impressions and write the labels that are mature."""
    from etl.labels import label_impressions
    from etl.retractions import record_late_retractions
    from etl.runtime.spark import spark_session
    from etl.tables.day_order import days_in_order

    lake = args.open_lake()
    data_until = parse_data_until(lake.spec, args.data_until) if args.data_until else None
    with days_in_order(lake, "labels", args.day_range):
        spark_session("labels")
        counts = label_impressions(lake, args.day_range, data_until)
        if lake.spec.retraction_types:
            counts["late retractions"] = record_late_retractions(lake, args.day_range)
    print_counts("labels", counts)


def quarantine(args: QuarantineArgs) -> None:
    """Show quarantined records by reason, or reprocess them with --reprocess."""
    lake = args.open_lake()
    days = parse_days_argument(args.days) if args.days else lake.day_range("events")
    if args.reprocess:
        from etl.ingest.reprocess import reprocess_quarantine
        from etl.runtime.spark import spark_session
        from etl.tables.lease import hold_leases

        with hold_leases(args.lake, ["ingest"], "gemline etl quarantine --reprocess"):
            spark_session("reprocess")
            print_counts("reprocess", reprocess_quarantine(lake, days))
        print("next: repeat the last `gemline run`; it rebuilds the tables that read these days")
    else:
        from rich.console import Console

        from etl.ingest.quarantine import quarantine_report

        quarantine_report(lake, days, args.examples, Console())


def jars(_: StrictModel) -> None:
    """Print the paths of the Delta JARs for `spark-submit --jars`, downloading them if needed."""
    from etl.runtime.java import delta_jars

    print(",".join(map(str, delta_jars())))


def doctor(_: StrictModel) -> None:
    """Check Python, Java, the Delta JARs, packages, GPU and disk, and suggest fixes."""
    from etl.runtime.doctor import check_installation

    check_installation()


COMMANDS = {
    "simulate": simulate,
    "spec": {"infer": infer, "check": check},
    "etl": {
        "ingest": ingest,
        "attributes": attributes,
        "labels": labels,
        "jars": jars,
        "quarantine": quarantine,
        **TABLE_COMMANDS,
    },
    "doctor": doctor,
}
