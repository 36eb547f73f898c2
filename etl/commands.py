"""The commands of this folder. Spark is imported when a Spark step is called."""

import json
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field, ValidationError

from etl.cli import DayArgs, LakeArgs, days_argument, exclusive, read_mapping, reasons_of
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.base import Strict

TABLE_STEPS = ("ingest", "attributes", "labels", "items", "history", "examples", "knowledge")
SAFE_KEEP_DAYS = 7  # with fewer, files that a step writes at the same time would be removed


class SimulateArgs(Strict):
    """Arguments of the simulator."""

    simulator: Annotated[
        Path, tyro.conf.arg(help="a configuration, such as conf/simulator/demo.yaml")
    ]
    out: Annotated[Path, tyro.conf.arg(help="folder to write the raw logs to")]


class RawArgs(DayArgs):
    """Arguments of a step that reads raw logs."""

    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]
    absent: Annotated[
        str, tyro.conf.arg(help="sources, joined by commas, whose files never came: go without")
    ] = ""

    def load(self) -> DataSpec:
        """The data spec; the absent sources may lack files."""
        return super().load().without_files_of([n for n in self.absent.split(",") if n])


def simulate(args: SimulateArgs) -> None:
    """Write raw logs of simulated surfaces."""
    from etl.sources.simulator.config import SimulatorConfig
    from etl.sources.simulator.simulate import simulate as write

    content = read_mapping(args.simulator)
    try:
        config = SimulatorConfig(**content)
    except ValidationError as error:
        raise UserError(f"{args.simulator}: {reasons_of(error)}") from None
    write(config, args.out)


@exclusive("ingest")
def ingest(args: RawArgs) -> None:
    """Raw logs of some days to clean events and quarantine."""
    from etl.ingest import ingest as step
    from etl.session import spark_session

    lake = args.open_lake()
    spark_session("ingest")
    tell("ingest", step(lake, args.raw, args.span))


@exclusive("attributes")
def attributes(args: RawArgs) -> None:
    """Attribute files to versions of users and items."""
    from etl.attributes import load_attributes
    from etl.session import spark_session

    lake = args.open_lake()
    spark_session("attributes")
    tell("attributes", load_attributes(lake, args.raw, args.span))


class SpecArgs(Strict):
    """Arguments of what needs a spec alone."""

    spec: Annotated[Path, tyro.conf.arg(help="the data spec, a YAML file")]


class QuarantineArgs(LakeArgs):
    """Arguments of a look into quarantine."""

    days: Annotated[str | None, tyro.conf.arg(help="first:last; all without")] = None
    examples: Annotated[int, tyro.conf.arg(help="records to show of each reason")] = 2
    replay: Annotated[bool, tyro.conf.arg(help="let in what is clean now")] = False


def quarantine(args: QuarantineArgs) -> None:
    """Show what is in quarantine by reason; with --replay let in what is clean now."""
    lake = args.open_lake()
    days = days_argument(args.days) if args.days else lake.days("events")
    if args.replay:
        from etl.replay import replay as step
        from etl.session import spark_session
        from etl.tables import records
        from etl.tables.lease import held

        with held(args.lake, ["ingest"], "gemline etl quarantine --replay"):
            spark_session("replay")
            tell("replay", step(lake, days))
            records.renew(lake.root, "ingest")
        print("next: the same `gemline run` as before; it makes anew what was made of these days")
    else:
        from rich.console import Console

        from etl.show import show

        show(lake, days, args.examples, Console())


def contracts(args: SpecArgs) -> None:
    """Print the page of table contracts that a spec stands for, as Markdown."""
    from etl.spec import load_spec
    from etl.tables.page import page

    print(page(load_spec(args.spec)), end="")


@exclusive("labels")
def labels(args: DayArgs) -> None:
    """Events to impressions with the labels whose windows have closed."""
    from etl.labels import label
    from etl.session import spark_session

    lake = args.open_lake()
    spark_session("labels")
    tell("labels", label(lake, args.span))


class ToldArgs(DayArgs):
    """Arguments of what is told of tables."""

    tables: Annotated[tuple[str, ...], tyro.conf.arg(help="names of tables")]


def told(args: ToldArgs) -> None:
    """Print version, rows and contract of tables, as one line of JSON."""
    from etl.told import told as look

    found = look(args.open_lake(), args.tables, args.span)
    print(json.dumps({name: table.model_dump() for name, table in found.items()}))


class PinArgs(LakeArgs):
    """Arguments of what holds table versions."""

    run: Annotated[str, tyro.conf.arg(help="name of the run that reads them")]


def pin(args: PinArgs) -> None:
    """Hold the versions --pins for a run: `etl vacuum` leaves them whole."""
    from etl.tables import pins

    pins.pin(args.lake, args.run, args.pins)


def unpin(args: PinArgs) -> None:
    """Let go the versions that a run holds."""
    from etl.tables import pins

    pins.unpin(args.lake, args.run)


class VacuumArgs(LakeArgs):
    """Arguments of cleaning up."""

    # A file that a running write has staged is of no version yet: a day old, none is.
    keep_days: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="days of whose table versions all files stay")
    ] = 30


@exclusive("vacuum")
def vacuum(args: VacuumArgs) -> None:
    """Remove files that no version of the last days needs, nor one that a run holds."""
    from etl.tables.lease import held
    from etl.vacuum import vacuum as step

    lake = args.open_lake()
    scores = [f"scores-{surface}" for surface in lake.spec.ad_surfaces]
    writers = [*TABLE_STEPS, *scores] if args.keep_days < SAFE_KEEP_DAYS else []
    with held(args.lake, writers, "gemline etl vacuum"):
        removed = step(lake, args.keep_days)
    tell("vacuum", {f"files of {name}": n for name, n in removed.items()})


def jars(args: Strict) -> None:
    """Print the paths of the Delta JARs for `spark-submit --jars`; they are fetched if need be."""
    from etl.jars import delta_jars

    print(",".join(map(str, delta_jars())))


def tell(step: str, counts: dict[str, int]) -> None:
    """One line of what a step wrote."""
    print(f"{step}: {', '.join(f'{n:,} {what}' for what, n in counts.items())}", flush=True)


def doctor(args: Strict) -> None:
    """Print versions, Java, the Delta JARs, GPU and disk, and what is missing with its fix."""
    from etl.doctor import examine

    examine()


COMMANDS = {
    "simulate": simulate,
    "etl": {
        "ingest": ingest,
        "attributes": attributes,
        "labels": labels,
        "jars": jars,
        "quarantine": quarantine,
        "contracts": contracts,
        "told": told,
        "pin": pin,
        "unpin": unpin,
        "vacuum": vacuum,
    },
    "doctor": doctor,
}
