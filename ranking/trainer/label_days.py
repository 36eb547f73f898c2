"""The days whose examples a refit or a calibration reads, and the check that they exist."""

from datetime import date, timedelta

from etl.errors import UserError
from etl.event_time import format_utc
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


def require_examples(reader: ExampleReader, data_until: int) -> None:
    """Raise UserError unless there are examples of the day on which the data ends.

    Its labels would be skipped for good if its examples were built later. A day that has been
    ingested and on which no impression was logged needs none.
    """
    day = reader.lake.spec.last_day_before(data_until)
    if day not in reader.days() and _may_have_impressions(reader.lake, day):
        raise UserError(
            f"there are no examples of {day}, and labels of its impressions become final by "
            f"{format_utc(data_until)} UTC: run `gemline features examples` for it, or set an "
            "earlier --data-until"
        )


def _may_have_impressions(lake: Lake, day: date) -> bool:
    """Whether impressions of a day were logged, or none of its events has been ingested."""
    events = snapshot(lake, schemas.table_schema(lake.spec, "events"))
    types = events.read(["type"], day=[day])["type"].unique().to_pylist()
    return not types or lake.spec.event_codes[lake.spec.impression_type] in types
