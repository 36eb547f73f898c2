"""The raw columns of logs: those that the spec names, and those that files may lack."""

from pyspark.sql import DataFrame

from etl.ingest.file_discovery import RawSelection
from etl.ingest.readers import read_raw_records
from etl.spec.attributes import LoggedAttribute
from etl.spec.model import DataSpec
from etl.spec.sources import EventLogSource, ImpressionLogSource
from etl.tables.declared_columns import event_columns

LogSource = EventLogSource | ImpressionLogSource


def read_log_records(spec: DataSpec, log: LogSource, selection: RawSelection) -> DataFrame:
    """Raw records of a log in the selected files; see `read_raw_records`."""
    columns, required = logged_columns(spec, log), required_columns(log)
    return read_raw_records(
        log, selection, columns, required, columns_that_files_may_lack(spec, log)
    )


def required_columns(log: LogSource) -> list[str]:
    """Raw columns without which no record of a file can be valid."""
    c = log.columns
    ids = (c.event_id,) if isinstance(c.event_id, str) else c.event_id or ()
    day = log.day.column if log.day else None
    names = (c.user, c.item, c.surface, log.reference_column, c.event_time, c.type, *ids, day)
    return list(filter(None, names))


def logged_columns(spec: DataSpec, log: LogSource) -> list[str]:
    """All raw columns of a log that the spec names."""
    return [*_source_columns(log), *_attribute_columns(spec)]


def columns_that_files_may_lack(spec: DataSpec, log: LogSource) -> set[str]:
    """Raw columns of attributes, in a log without impressions; none in others."""
    if spec.impression_type in spec.event_types_of(log):
        return set()
    return {*_attribute_columns(spec)} - {*_source_columns(log)}


def _source_columns(log: LogSource) -> list[str]:
    """The raw columns that a source names."""
    named = log.columns.model_dump()
    ids = named.pop("event_id") or ()
    columns = [name for name in named.values() if name]
    columns += [ids] if isinstance(ids, str) else list(ids)
    columns += [log.day.column] if log.day else []
    if isinstance(log, ImpressionLogSource):
        for outcome in log.outcomes:
            optional = (outcome.indicator, outcome.delay, outcome.dwell, outcome.value)
            columns += [name for name in optional if name]
    return columns


def _attribute_columns(spec: DataSpec) -> list[str]:
    return [column for column, _ in logged_attributes(spec).values()]


def logged_attributes(spec: DataSpec) -> dict[str, tuple[str, LoggedAttribute]]:
    """Raw column and declaration of each attribute that is logged with events, by column."""
    return {
        name: (attribute.column or name.partition("_")[2], attribute)
        for name, attribute in event_columns(spec).items()
    }
