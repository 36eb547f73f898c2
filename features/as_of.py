"""The as-of rule: an event is visible to an example if and only if visible_ts < as_of_ts.

Both in whole seconds, strictly: an event of the same second is not seen. Whatever else asks what
an example may see asks here.
"""

import numpy as np
import numpy.typing as npt

from etl.clock import day_end
from etl.spec.model import DataSpec
from etl.spec.units import MICROS

Ints = npt.NDArray[np.int64]


def as_of_ts(spec: DataSpec) -> str:
    """The second as of which an impression sees the world, in Spark SQL.

    Its `event_ts`, by a clock to be trusted: a device's clock that runs ahead must not show what
    came after, so never later than its ingest, nor than the end of the day on which it landed.
    """
    seen = f"floor(least(event_ts, ingest_ts) / {MICROS['s']})"
    return f"CAST(least({seen}, {day_end(spec)}) AS BIGINT)"


def visible_before(visible_ts: Ints, as_of: Ints) -> Ints:
    """How many of the ascending `visible_ts` each of `as_of` sees."""
    return np.searchsorted(visible_ts, as_of, side="left")


def pointer_holds(last_seen: Ints, first_unseen: Ints, as_of: Ints) -> npt.NDArray[np.bool_]:
    """Whether a pointer still cuts its history at its time.

    `last_seen` and `first_unseen` are the visible seconds on both sides of the cut.
    """
    return (last_seen < as_of) & (as_of <= first_unseen)
