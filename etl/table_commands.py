"""The commands of `gemline etl` that show, pin and maintain tables."""

import json
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from etl.cli.runner import DayArgs, LakeArgs, holds_leases, print_counts
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.base import StrictModel

# The leases of all commands that write tables, besides those of `score_leases`.
TABLE_STEPS = (
    "ingest",
    "attributes",
    "labels",
    "items",
    "history",
    "examples",
    "feature_statistics",
    "teacher_predictions",
    "audience",
    "roi",
    "forecast",
)
MIN_SAFE_KEEP_DAYS = 7  # below: vacuum waits for all writers, whose files are uncommitted


class SpecArgs(StrictModel):
    """Arguments of a command that reads a spec only."""

    spec: Annotated[Path, tyro.conf.arg(help="data spec (YAML)")]


class TableInfoArgs(DayArgs):
    """Arguments of the table metadata."""

    tables: Annotated[tuple[str, ...], tyro.conf.arg(help="table names")]


class PinArgs(LakeArgs):
    """Arguments of pinning table versions."""

    run_id: Annotated[str, tyro.conf.arg(help="ID of the run that reads the versions")]


class RepartitionArgs(LakeArgs):
    """A spec with another number of buckets, and the spec that the lake was written under."""

    old_spec: Annotated[Path, tyro.conf.arg(help="the spec that the tables were written under")]


class VacuumArgs(LakeArgs):
    """Arguments of the vacuum."""

    # Files staged by a running write are in no version yet; a write takes less than a day.
    keep_days: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="retention of old table versions, in days")
    ] = 30


def print_schema_docs(args: SpecArgs) -> None:
    """Print the schemas of a spec's tables as Markdown."""
    from etl.spec import load_spec
    from etl.tables.metadata import schema_docs

    print(schema_docs(load_spec(args.spec)), end="")


def table_info(args: TableInfoArgs) -> None:
    """Print version, row count and schema fingerprint of tables as one line of JSON."""
    from etl.tables.metadata import table_metadata

    metadata = table_metadata(args.open_lake(), args.tables, args.day_range)
    print(json.dumps({name: table.model_dump() for name, table in metadata.items()}))


def pin(args: PinArgs) -> None:
    """Keep the table versions in --pins until the run unpins them; `etl vacuum` keeps them."""
    from etl.tables import step_state

    lake = args.open_lake()
    step_state.pin_versions(lake.root, args.run_id, lake.pinned_versions)


def unpin(args: PinArgs) -> None:
    """Release the table versions that a run has pinned."""
    from etl.tables import step_state

    step_state.unpin_versions(args.lake, args.run_id)


@holds_leases("vacuum")
def expire(args: LakeArgs) -> None:
    """Remove the days of tables that are older than their `retention` in the spec."""
    from etl.tables.lease import hold_leases
    from etl.tables.maintenance import expire_days

    lake = args.open_lake()
    if lake.pinned_versions:
        raise UserError("--pins: days are removed from the latest versions; leave it out")
    if not lake.spec.retention:
        print(f"expire: spec {lake.spec.name} has no `retention`; all days are kept")
        return
    with hold_leases(args.lake, _writers(lake.spec), "gemline etl expire"):
        removed = expire_days(lake)
    print_counts("expire", {f"rows of {name}": n for name, n in removed.items()})


def score_leases(spec: DataSpec) -> list[str]:
    """The leases of the commands that write `scores`, one per ad surface."""
    return [f"scores-{surface}" for surface in spec.ad_surfaces]


def _writers(spec: DataSpec) -> list[str]:
    """The leases of all commands that write tables; maintenance itself holds `vacuum`."""
    return [*TABLE_STEPS, *score_leases(spec)]


@holds_leases("vacuum")
def vacuum(args: VacuumArgs) -> None:
    """Delete files that neither a retained nor a pinned table version needs."""
    from etl.tables.lease import hold_leases
    from etl.tables.maintenance import vacuum_lake

    lake = args.open_lake()
    writers = _writers(lake.spec) if args.keep_days < MIN_SAFE_KEEP_DAYS else []
    with hold_leases(args.lake, writers, "gemline etl vacuum"):
        removed = vacuum_lake(lake, args.keep_days)
    print_counts("vacuum", {f"files of {name}": n for name, n in removed.items()})


@holds_leases(*TABLE_STEPS)
def repartition(args: RepartitionArgs) -> None:
    """Rewrite tables for other `buckets`. `gemline upgrade` runs it, and has to be run after it."""
    from etl.runtime.spark import spark_session
    from etl.spec import load_spec
    from etl.tables.maintenance import plan_upgrade
    from etl.tables.repartition import repartition_table

    lake = args.open_lake()
    plan = plan_upgrade(args.lake, load_spec(args.old_spec), lake.spec)
    spark_session("repartition")
    for name in plan.repartitioned_tables:
        print_counts("repartition", {f"rows of {name}": repartition_table(lake, name)})


TABLE_COMMANDS = {
    "schema-docs": print_schema_docs,
    "table-info": table_info,
    "pin": pin,
    "unpin": unpin,
    "expire": expire,
    "vacuum": vacuum,
    "repartition": repartition,
}
