"""The days whose examples a refit or a calibration reads, and the check that they exist."""

from datetime import date, timedelta

from etl.errors import UserError
from etl.event_time import format_utc
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
    spec = reader.lake.spec
    last = spec.last_day_before(data_until)
    first = max(spec.day_of(labels_until), min(reader.days(), default=last))
    missing = reader.missing_days(min(first, last), last)
    if missing:
        raise UserError(
            f"there are no examples of {missing[0]}, and labels of its impressions become final by "
            f"{format_utc(data_until)} UTC: run `gemline features examples` for it, or set an "
            "earlier --data-until"
        )
