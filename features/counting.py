"""Counting what happened before, over windows: an algorithm with no Spark in it."""

import numpy as np
import numpy.typing as npt

from features.as_of import visible_before

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def seen_before(key: Int64, ts: Int64, query_key: Int64, query_ts: Int64) -> Int32:
    """The number of events of each query's key before it (Q)."""
    none = np.zeros(len(key), np.int64)
    forever = max(1, int(query_ts.max(initial=0) - ts.min(initial=0)))
    return counts_before(key, ts, none, query_key, query_ts, (forever,), (0,))[:, 0]


def counts_before(
    event_key: Int64,
    event_ts: Int64,
    event_type: Int64,
    query_key: Int64,
    query_ts: Int64,
    windows: tuple[int, ...],
    types: tuple[int, ...],
) -> Int32:
    """Events of each query's key in [query_ts - window, query_ts), by window and type.

    Returns counts (Q, len(windows) * len(types)), types within windows. Keys are any integers;
    times are in seconds.
    """
    keys, group = np.unique(np.concatenate((event_key, query_key)), return_inverse=True)
    event_group, query_group = group[: len(event_key)], group[len(event_key) :]
    origin = min(event_ts.min(initial=0), query_ts.min(initial=0) - max(windows, default=0))
    latest = max(event_ts.max(initial=origin), query_ts.max(initial=origin))
    span = latest - origin + 1
    assert len(keys) * span < 2**62, "times and keys do not fit one integer"

    moment = event_group * span + (event_ts - origin)
    order = np.argsort(moment, kind="stable")
    moment = moment[order]
    total = np.zeros((len(order) + 1, len(types)), np.int32)
    np.cumsum(event_type[order, None] == np.array(types), axis=0, out=total[1:])

    now = query_group * span + (query_ts - origin)
    until = visible_before(moment, now)
    counts = [total[until] - total[visible_before(moment, now - window)] for window in windows]
    return np.concatenate(counts, axis=1)
