"""Bad lines: corrupted copies of good ones."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.simulator.columns import ABSENT, Events, Ints


class Corruption(NamedTuple):
    """A text replaced in a line; applies to the records that have the field."""

    field: str
    pattern: str
    replacement: str


CORRUPTIONS = (
    Corruption("event_time", r".{12}\n$", "\n"),  # cut off
    Corruption("event_time", r"^.*\n$", "{}\n"),
    Corruption("event_time", r'"event_time":\d+', '"event_time":"noon"'),
    Corruption("event_time", r'"event_time":\d+', '"event_time":86400000'),  # in 1970
    Corruption("event_time", r'"event_time":\d+', '"event_time":4294967295000'),  # in 2106
    Corruption("event_time", r'"event_time":\d+', '"event_time":9999999999999999999'),
    Corruption("event_time", r'"event_time":\d+', '"event_time":99999999999999999'),
    Corruption("position", r'"position":\d+', '"position":"top"'),
    Corruption("dwell_ms", r'"dwell_ms":', '"dwell_ms":-1'),  # negative
    Corruption("user", r'"user_id":"\w+",', ""),
    Corruption("item", r'"item_id":"\w+",', ""),
    Corruption("surface", r'"surface":"\w+"', '"surface":"watch"'),
)


def corrupt_some(
    events: Events, lines: pa.StringArray, rate: float, rng: np.random.Generator
) -> tuple[Ints, pa.StringArray]:
    """Corrupted copies of some lines, `rate` per line, every kind as often as the others.

    Returns the (m,) rows that were copied and the m bad lines.
    """
    each = rate * len(events) / len(CORRUPTIONS)
    rows, bad = [], []
    for corruption in CORRUPTIONS:
        able = np.flatnonzero(getattr(events, corruption.field) != ABSENT)
        chosen = rng.choice(able, min(rng.poisson(each), able.size))
        rows.append(chosen)
        bad.append(
            pc.replace_substring_regex(
                lines.take(chosen), pattern=corruption.pattern, replacement=corruption.replacement
            )
        )
    return np.concatenate(rows), pa.concat_arrays(bad)
