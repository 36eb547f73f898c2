"""Schemas of tables with one row per user: what is carried forward of them, and who was erased."""

from etl.event_time import day_end_sql
from etl.spec.model import DataSpec
from etl.tables.table_schema import TableSchema, UserRows


def user_event_counts(spec: DataSpec) -> TableSchema:
    """One user at the end of a day, once a week: the number of events that had become visible."""
    columns = {"user_id": "string", "events": "int", "day": "date"}
    required = {f"no {name}": name for name in columns}
    user_rows = UserRows("user_id", day_end_sql(spec))
    order = ("user_id",)
    return TableSchema("user_event_counts", columns, ("day",), order, required, user_rows=user_rows)


def erased_users(_spec: DataSpec) -> TableSchema:
    """One user whose data until `until_ts` (µs) was erased on `day`, and stays so.

    `id_hash` is a salted hash of the id, by which later runs leave the user's raw records out.
    """
    columns = {"id_hash": "string", "until_ts": "bigint", "day": "date"}
    required = {f"no {name}": name for name in columns}
    return TableSchema("erased_users", columns, ("day",), ("id_hash",), required, user_rows=None)
