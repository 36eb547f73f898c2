"""When a user last dealt with what is like a candidate, by type of event, and how regularly.

B candidates of R requests, N events, T event types; column 0 of T + 1 is the unknown type.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NEVER = 1 << 40  # seconds, as in training/model/recency.py


@dataclass(frozen=True)
class Rhythm:
    """Of the events like each candidate, by type (…, T + 1), in seconds.

    `last` is the age of the newest, NEVER where there is none; `span` is from the oldest to the
    newest, `gaps` how many there are between.
    """

    last: Ints
    span: Ints
    gaps: Ints


def rhythm(
    own: Ints, request: Ints, seen: Ints, offsets: Ints, types: Ints, ages: Ints, kinds: int
) -> Rhythm:
    """Of candidates by an attribute `own` (B) of theirs, and the same attribute of events (N).

    `request` (B) is each candidate's, `offsets` (R+1) cut the events. Attribute 0 is like nothing.
    """
    span = 1 + int(max(own.max(initial=0), seen.max(initial=0)))
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    asked, place = np.unique(request * span + own, return_inverse=True)
    key = owner * span + seen
    at = np.minimum(np.searchsorted(asked, key), len(asked) - 1)
    like = (asked[at] == key) & (seen > 0)
    cell = at[like] * kinds + types[like]
    last = np.full(len(asked) * kinds, NEVER)
    first, count = np.zeros_like(last), np.zeros_like(last)
    np.minimum.at(last, cell, ages[like])
    np.maximum.at(first, cell, ages[like])
    np.add.at(count, cell, 1)
    gaps = np.maximum(count - 1, 0)
    found = (last, np.where(gaps > 0, first - last, 0), gaps)
    return Rhythm(*(x.reshape(len(asked), kinds)[place] for x in found))
