"""How many days of events an example's counters need: the same for table builds and serving."""

from etl.spec.model import DataSpec
from etl.spec.units import DAY


def counter_horizon_days(spec: DataSpec) -> int:
    """Days before an example's landing day on which the events that it counts became visible.

    The longest window, counted from an impression that lands as late as the spec allows.
    """
    longest_window = max(spec.counters.windows, default=0)
    return _full_days(longest_window + spec.allowed_lateness)


def max_visibility_delay_days(spec: DataSpec) -> int:
    """Days after its landing day on which an event becomes visible at the latest."""
    slowest_source = max(log.delay for log in spec.log_sources.values())
    return _full_days(spec.allowed_lateness + slowest_source) + 1


def counter_input_days(spec: DataSpec) -> int:
    """Days before an example's landing day on which the events that it counts may have landed."""
    return counter_horizon_days(spec) + max_visibility_delay_days(spec)


def _full_days(seconds: int) -> int:
    return -(-seconds // DAY)
