"""The as-of rule: an event is visible to an example if and only if visible_ts < as_of_ts.

Both are in whole seconds, and the comparison is strict: events of the same second are not visible.
All code that decides what an example may read uses these functions.
"""

import numpy as np
import numpy.typing as npt

from etl.event_time import day_end_sql
from etl.spec.model import DataSpec
from etl.spec.units import MICROS

Ints = npt.NDArray[np.int64]


def as_of_expression(spec: DataSpec) -> str:
    """Spark SQL for the second as of which an impression's features are computed.

    It is the impression's `event_ts`, but never later than its ingest time or the end of its
    landing day: a device clock that runs ahead must not reveal later events.
    """
    trusted_second = f"floor(least(event_ts, ingest_ts) / {MICROS['s']})"
    return f"CAST(least({trusted_second}, {day_end_sql(spec)}) AS BIGINT)"


def count_visible(visible_ts: Ints, as_of: Ints) -> Ints:
    """The number of `visible_ts` (ascending) that are visible as of each of `as_of`."""
    return np.searchsorted(visible_ts, as_of, side="left")


def is_pointer_valid(
    last_visible_ts: Ints, first_hidden_ts: Ints, as_of: Ints
) -> npt.NDArray[np.bool_]:
    """Whether a pointer into a history still separates visible events from later ones.

    `last_visible_ts` and `first_hidden_ts` are the `visible_ts` before and after the cut.
    """
    return (last_visible_ts < as_of) & (as_of <= first_hidden_ts)
