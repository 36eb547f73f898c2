"""Events as the figures need them: in any number, of users and items as uneven as real ones."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

DAYS, SURFACES, TYPES = 30, 4, 8
START = 1_767_225_600  # 2026-01-01
AD_SHARE = 0.14


@dataclass(frozen=True)
class World:
    """N events in order of time; `item` is an index by popularity, from 1; `dwell` may be NaN."""

    user: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.int64]
    item: npt.NDArray[np.int32]
    surface: npt.NDArray[np.int8]
    type: npt.NDArray[np.int8]
    dwell_ms: npt.NDArray[np.float64]

    def __len__(self) -> int:
        """Number of events."""
        return len(self.user)

    def table(self) -> pa.Table:
        """Rows as `features.history.build.newly_visible` gives them."""
        days = (self.seconds // 86_400).astype(np.int32)
        return pa.table(
            {
                "user_id": pa.array(np.char.add("u", self.user.astype(str))),
                "day": pa.array(days, pa.int32()).cast(pa.date32()),
                "visible_ts": self.seconds,
                "event_ts": self.seconds * 1_000_000,
                "event_id": pa.array(np.char.mod("%x", np.arange(len(self)))),
                "item_ix": self.item,
                "surface": self.surface,
                "type": self.type,
                "dwell_ms": pa.array(self.dwell_ms, from_pandas=True),
            }
        )


def make_world(events: int, users: int, seed: int = 0) -> World:
    """Events of a month: users log-normal in activity, items as 1/rank, half with a dwell time."""
    rng = np.random.default_rng(seed)
    activity = rng.lognormal(0, 1.3, users)
    items = max(1000, events // 7)
    rank = np.exp(rng.random(events) * np.log(items)).astype(np.int32)
    dwell = rng.lognormal(8, 1.5, events)
    return World(
        user=rng.choice(users, events, p=activity / activity.sum()),
        seconds=START + np.sort(rng.integers(0, DAYS * 86_400, events)),
        item=rank,
        surface=rng.integers(1, SURFACES + 1, events, dtype=np.int8),
        type=np.where(rng.random(events) < AD_SHARE, 1, rng.integers(2, TYPES + 1, events)).astype(
            np.int8
        ),
        dwell_ms=np.where(rng.random(events) < 0.5, dwell, np.nan),
    )
