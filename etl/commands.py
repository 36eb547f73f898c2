"""The commands of this folder. Spark is imported when a Spark step is called."""

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import ValidationError

from etl.cli import DayArgs, read_mapping, reasons_of
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
    "etl": {"ingest": ingest, "attributes": attributes, "labels": labels, "jars": jars},
    "doctor": doctor,
}
