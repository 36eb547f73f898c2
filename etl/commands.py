"""The commands of this folder. Spark is imported when a Spark step is called."""

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import ValidationError

from etl.cli import DayArgs, LakeArgs, days_argument, read_mapping, reasons_of
from etl.errors import UserError
from etl.spec.base import Strict


class SimulateArgs(Strict):
    """Arguments of the simulator."""

    simulator: Annotated[
        Path, tyro.conf.arg(help="a configuration, such as conf/simulator/demo.yaml")
    ]
    out: Annotated[Path, tyro.conf.arg(help="folder to write the raw logs to")]


class RawArgs(DayArgs):
    """Arguments of a step that reads raw logs."""

    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]


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


def ingest(args: RawArgs) -> None:
    """Raw logs of some days to clean events and quarantine."""
    from etl.ingest import ingest as step
    from etl.session import spark_session

    lake = args.open_lake()
    spark_session("ingest")
    tell("ingest", step(lake, args.raw, args.span))


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


def labels(args: DayArgs) -> None:
    """Events to impressions with the labels whose windows have closed."""
    from etl.labels import label
    from etl.session import spark_session

    lake = args.open_lake()
    spark_session("labels")
    tell("labels", label(lake, args.span))


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
    },
    "doctor": doctor,
}
