"""Time in Spark SQL: the bounds of a table's days, and which times can be true."""

from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS

EARLIEST = 946_684_800 * MICROS["s"]  # 2000-01-01: no log is older
SKEW = 3600  # seconds that a device's clock may run ahead of ours


def day_start(spec: DataSpec, day: str = "day") -> str:
    """The epoch second at which the date `day` begins."""
    return f"(CAST(unix_date({day}) AS BIGINT) * {DAY} - {spec.utc_offset_hours * 3600})"


def day_end(spec: DataSpec, day: str = "day") -> str:
    """The epoch second at which the day after begins."""
    return f"({day_start(spec, day)} + {DAY})"
