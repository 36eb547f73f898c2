"""The attribute versions of users or items that requests of some days can read, as Arrow."""

from collections.abc import Sequence
from datetime import date

import pyarrow as pa

from etl.tables import arrow, schemas
from etl.tables.lake import Lake
from etl.tables.schemas import STATIC_DAY


def readable_versions(
    lake: Lake,
    entity: str,
    first_day: date,
    last_day: date = date.max,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Versions that landed up to a day and that are valid at some time of `first_day` or later.

    These are the latest weekly snapshot before `first_day`, the versions that have landed since,
    and static rows, with some or all columns of the table of attributes. Versions that others
    superseded before `first_day` may be among them. `etl.attribute_versions.versions_from` is the
    same on Spark.
    """
    stored = arrow.snapshot(lake, schemas.attributes(lake.spec, entity))
    days = [day for day in stored.days() if day == STATIC_DAY or day <= last_day]
    schema = schemas.attribute_snapshots(lake.spec, entity)
    snapshot_day = None
    if lake.exists(schema.name):
        snapshot_day = lake.latest_day(schema.name, before=first_day)
    if snapshot_day is None:
        return stored.read(columns, day=days).combine_chunks()
    since = [day for day in days if day > snapshot_day or day == STATIC_DAY]
    names = list(columns or stored.schema.columns)
    in_snapshot = ["landing_day" if name == "day" else name for name in names]
    snapshot = arrow.snapshot(lake, schema).read(in_snapshot, day=snapshot_day)
    recent = stored.read(names, day=since).select(names)
    return pa.concat_tables([recent, snapshot.rename_columns(names)]).combine_chunks()
