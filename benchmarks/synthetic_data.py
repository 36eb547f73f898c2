"""Synthetic events with a skew of users and items similar to real logs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.array_types import Float64, Int32, Int64
from etl.spec.units import DAY, MICROS

DAYS, SURFACES, TYPES = 30, 4, 8
START = 1_767_225_600  # 2026-01-01
IMPRESSION = 1  # the type of ad impressions
AD_SHARE = 0.14


@dataclass(frozen=True)
class SyntheticEvents:
    """N events in order of time; `item` is a popularity rank, `dwell_ms` NaN where missing."""

    user: Int64
    seconds: Int64
    item: Int32
    surface: npt.NDArray[np.int8]
    type: npt.NDArray[np.int8]
    dwell_ms: Float64

    def __len__(self) -> int:
        """Number of events."""
        return len(self.user)

    def to_arrow(self) -> pa.Table:
        """Rows with the columns of `features.history.build.newly_visible_events`."""
        days = (self.seconds // DAY).astype(np.int32)
        return pa.table(
            {
                "user_id": pa.array(np.char.add("u", self.user.astype(str))),
                "day": pa.array(days, pa.int32()).cast(pa.date32()),
                "visible_ts": self.seconds,
                "event_ts": self.seconds * MICROS["s"],
                "event_id": pa.array(np.char.mod("%x", np.arange(len(self)))),
                "item_index": self.item,
                "surface": self.surface,
                "type": self.type,
                "dwell_ms": pa.array(self.dwell_ms, from_pandas=True),
            }
        )


def generate_events(events: int, users: int, seed: int = 0) -> SyntheticEvents:
    """Events of a month: log-normal activity of users, item popularity 1/rank, half with dwell."""
    rng = np.random.default_rng(seed)
    activity = rng.lognormal(0, 1.3, users)
    items = max(1000, events // 7)
    rank = np.exp(rng.random(events) * np.log(items)).astype(np.int32)
    dwell = rng.lognormal(8, 1.5, events)
    user = rng.choice(users, events, p=activity / activity.sum())
    seconds = START + np.sort(rng.integers(0, DAYS * DAY, events))
    surface = rng.integers(1, SURFACES + 1, events, dtype=np.int8)
    is_ad = rng.random(events) < AD_SHARE
    type_ = np.where(is_ad, IMPRESSION, rng.integers(2, TYPES + 1, events)).astype(np.int8)
    has_dwell = rng.random(events) < 0.5
    return SyntheticEvents(user, seconds, rank, surface, type_, np.where(has_dwell, dwell, np.nan))
