"""The days whose examples a refit or a calibration reads, and the check that they exist."""

from datetime import date, timedelta

from etl.errors import UserError
from etl.event_time import format_utc
from etl.spec.units import date_range
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader


def days_with_labels(reader: ExampleReader, window: LabelWindow) -> list[date]:
    """The days with examples whose labels may become final in a window."""
    spec = reader.lake.spec
    first = spec.day_of(window.start) - timedelta(days=spec.label_delay_days)
    last = spec.last_day_before(window.end)
    return [day for day in reader.days() if first <= day <= last]


def require_examples(reader: ExampleReader, labels_until: int, data_until: int) -> None:
    """Raise UserError unless there are examples of each day with labels to learn next.

    These are the days between the epoch second until which labels were learned and that on which
    the data ends. Labels of a day would be skipped for good if its examples were built later. A day
    that has been ingested and on which no impression was logged needs none, nor do days before the
    first one that is kept.
    """
    spec, existing = reader.lake.spec, reader.days()
    last = spec.last_day_before(data_until)
    first = max(spec.day_of(labels_until), min(existing, default=last))
    for day in date_range(min(first, last), last):
        if day not in existing and _may_have_impressions(reader.lake, day):
            raise UserError(
                f"there are no examples of {day}, and labels of its impressions become final by "
                f"{format_utc(data_until)} UTC: run `gemline features examples` for it, or set an "
                "earlier --data-until"
            )


def _may_have_impressions(lake: Lake, day: date) -> bool:
    """Whether impressions of a day were logged, or the day has not been ingested."""
    if day not in lake.rows_by_day("ingest_metrics"):
        return True
    events = snapshot(lake, schemas.table_schema(lake.spec, "events"))
    types = events.read(["type"], day=[day])["type"].unique().to_pylist()
    return lake.spec.event_codes[lake.spec.impression_type] in types
