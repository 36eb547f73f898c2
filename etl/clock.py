"""Time in Spark SQL: the bounds of a table's days, and which times can be true."""

from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS

EARLIEST = 946_684_800 * MICROS["s"]  # 2000-01-01: no log is older
SKEW = 3600  # seconds that a device's clock may run ahead of ours


def day_start(spec: DataSpec, day: str = "day") -> str:
    """The epoch second at which the date `day` begins; whatever the session's time zone."""
    midnight = f"(CAST(unix_date({day}) AS BIGINT) * {DAY})"
    if spec.time_zone == "UTC":
        return midnight
    return f"unix_seconds(to_utc_timestamp(timestamp_seconds({midnight}), '{spec.time_zone}'))"


def day_end(spec: DataSpec, day: str = "day") -> str:
    """The epoch second at which the day after begins."""
    return day_start(spec, f"date_add({day}, 1)")
