"""Time rules of the tables: day bounds, plausible event times, and when an event is visible.

Each rule is plain Python or Spark SQL text, so that serving imports this module without Spark. The
Python side of the day bounds is `DataSpec.day_start` and `DataSpec.day_end`; a test
checks that both sides agree.
"""

import time
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS

MIN_EVENT_TS = 946_684_800 * MICROS["s"]  # 2000-01-01: earlier times are invalid
MAX_CLOCK_SKEW_SECONDS = 3600  # how far a device's clock may run ahead of the server's


def format_utc(epoch_second: float) -> str:
    """A time for messages and reports, to the minute, in UTC: `2026-01-03 12:05`."""
    return f"{datetime.fromtimestamp(epoch_second, UTC):%Y-%m-%d %H:%M}"


def parse_local_time(spec: DataSpec, text: str) -> int:
    """Epoch second of a time, in the spec's time zone unless it names an offset.

    Raises ValueError if the text is not a time.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=ZoneInfo(spec.time_zone))
    return int(moment.timestamp())


def is_in_future(epoch_second: float) -> bool:
    """Whether a time is after now."""
    return epoch_second > time.time()


def is_after_today(spec: DataSpec, epoch_second: int) -> bool:
    """Whether a time is after the end of the current day in the spec's time zone."""
    return epoch_second > spec.day_end(spec.day_of(int(time.time())))


def day_start_sql(spec: DataSpec, day_column: str = "day") -> str:
    """Spark SQL for the epoch second at which a date begins in the spec's time zone."""
    midnight = f"(CAST(unix_date({day_column}) AS BIGINT) * {DAY})"
    if spec.time_zone == "UTC":
        return midnight
    return f"unix_seconds(to_utc_timestamp(timestamp_seconds({midnight}), '{spec.time_zone}'))"


def day_end_sql(spec: DataSpec, day_column: str = "day") -> str:
    """Spark SQL for the epoch second at which the next date begins."""
    return day_start_sql(spec, f"date_add({day_column}, 1)")


def compute_visible_ts(
    event_ts: int, ingest_ts: int, delay_seconds: int, landing_day_start: int = 0
) -> int:
    """The epoch second from which an event is visible: the latest of three times.

    These are the event time, the ingest time plus the delay of the event's source, and the start
    of the day on which the event landed, because histories are built one landing day at a time.
    `visible_ts_sql` is the same rule in Spark.

    Args:
        event_ts: Event time in µs.
        ingest_ts: Ingest time in µs.
        delay_seconds: `delay` of the source.
        landing_day_start: Epoch second; 0 for an event that lands on the day of its ingest.
    """
    available = ingest_ts // MICROS["s"] + delay_seconds
    return max(event_ts // MICROS["s"], available, landing_day_start)


def visible_ts_sql(spec: DataSpec, delay_seconds: int) -> str:
    """Spark SQL for `compute_visible_ts` of rows with `event_ts`, `ingest_ts` and `day`."""
    available = f"FLOOR(ingest_ts / {MICROS['s']}) + {delay_seconds}"
    return f"GREATEST(FLOOR(event_ts / {MICROS['s']}), {available}, {day_start_sql(spec)})"
