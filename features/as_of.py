"""The as-of rule: an event is visible to an example if and only if visible_ts < as_of_ts.

Both in whole seconds, strictly: an event of the same second is not seen. Whatever else asks what
an example may see asks here.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


# The second as of which an impression (event_ts in µs) sees the world, in Spark SQL.
AS_OF_TS = "CAST(floor(event_ts / 1000000) AS BIGINT)"


def visible_before(visible_ts: Ints, as_of: Ints) -> Ints:
    """How many of the ascending `visible_ts` each of `as_of` sees."""
    return np.searchsorted(visible_ts, as_of, side="left")


def pointer_holds(last_seen: Ints, first_unseen: Ints, as_of: Ints) -> npt.NDArray[np.bool_]:
    """Whether a pointer still cuts its history at its time.

    `last_seen` and `first_unseen` are the visible seconds on both sides of the cut.
    """
    return (last_seen < as_of) & (as_of <= first_unseen)
