"""What was known of an entry's user and item strictly before it, as numbers.

N entries; entries of the same second do not see each other.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from training.sequential.files import POSITIVE, SPLITS, UNLABELLED, Attribute, Int64, Log

Float64 = npt.NDArray[np.float64]
PRIOR = 5.0  # as many labels of the mean beside what was seen
RECENT = 20


def numbers(log: Log) -> npt.NDArray[np.float32]:
    """Counts and shares of positive labels (N, M), by user, item and each attribute; all known."""
    labelled = (log.label != UNLABELLED).astype(np.float64)
    positive = (log.label == POSITIVE).astype(np.float64)
    learned = log.split == SPLITS.index("train")
    share = float(positive[learned].mean())
    seen = np.stack((np.ones(len(log)), labelled, positive), 1)
    person = log.person
    user = before(person, log.time, seen)
    item = before(log.key, log.time, seen)
    own = (user[:, 2] + PRIOR * share) / (user[:, 1] + PRIOR)
    columns = [
        *(np.log1p(counts[:, i]) for counts in (user, item) for i in (0, 1)),
        own,
        (item[:, 2] + PRIOR * share) / (item[:, 1] + PRIOR),
        recent(log, seen, own),
        np.log1p(since_last(log)),
    ]
    for attribute in log.item_attributes.values():
        columns += taste(log, attribute, seen[:, 1:], own)
    return np.stack(columns, 1).astype(np.float32)


def before(key: Int64, time: Float64, values: Float64) -> Float64:
    """Sums (N, k) of the values of the entries with the same key and an earlier time."""
    order = np.lexsort((time, key))
    sums = np.concatenate((np.zeros((1, values.shape[1])), values[order].cumsum(0)))
    fresh = np.append(True, key[order][1:] != key[order][:-1])
    later = fresh | np.append(True, time[order][1:] != time[order][:-1])
    at = np.arange(len(order))
    first, since = (np.maximum.accumulate(np.where(mark, at, 0)) for mark in (fresh, later))
    found = np.empty_like(values)
    found[order] = sums[since] - sums[first]
    return found


def limits(log: Log) -> Int64:
    """How many entries (N) of the same user are earlier."""
    return before(log.person, log.time, np.ones((len(log), 1)))[:, 0].astype(np.int64)


def recent(log: Log, seen: Float64, own: Float64) -> Float64:
    """The share of positive labels (N) of a user's last entries; `own` (N) is that of all."""
    first = log.user_offsets[log.person]
    stop = first + limits(log)
    sums = np.concatenate((np.zeros((1, seen.shape[1])), seen.cumsum(0)))
    last = sums[stop] - sums[np.maximum(first, stop - RECENT)]
    return (last[:, 2] + PRIOR * own) / (last[:, 1] + PRIOR)


def since_last(log: Log) -> Float64:
    """Seconds (N) since the user's last earlier entry; 0 for the first."""
    earlier = limits(log)
    last = log.time[log.user_offsets[log.person] + np.maximum(earlier - 1, 0)]
    return np.where(earlier > 0, log.time - last, 0.0)


def taste(log: Log, attribute: Attribute, seen: Float64, own: Float64) -> Iterator[Float64]:
    """How much the user has to do with an item's values (N), and how much it likes them.

    Means over the values of the item; `seen` (N, 2) are labelled and positive ones.
    """
    entry, value = spread(attribute, log.key)
    key = log.person[entry] * attribute.size + value
    found = before(key, log.time[entry], seen[entry])
    mean = (found[:, 1] + PRIOR * own[entry]) / (found[:, 0] + PRIOR)
    several = np.bincount(entry, minlength=len(log))
    yield np.bincount(entry, np.log1p(found[:, 0]), len(log)) / several
    yield np.bincount(entry, mean, len(log)) / several


def spread(attribute: Attribute, entities: Int64) -> tuple[Int64, Int64]:
    """Every (position in `entities`, value of that entity), as two columns."""
    counts = np.diff(attribute.offsets)[entities]
    position = np.repeat(np.arange(len(entities)), counts)
    within = np.arange(len(position)) - np.repeat(np.cumsum(counts) - counts, counts)
    return position, attribute.values[attribute.offsets[entities][position] + within]
