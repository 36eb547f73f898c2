"""Batches of rows as arrays: row i of every array describes the same thing."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etl.sources.simulator.vocabulary import EventType

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.floating[Any]]
Bools: TypeAlias = NDArray[np.bool_]

ABSENT = -1
"""Value of a field that a record does not have."""

DAY_STRIDE = 10**9
"""Distance between the numbers given on one day and on the next."""


def numbers(day: int, count: int) -> Ints:
    """(count,) numbers that no other day gives."""
    return day * DAY_STRIDE + np.arange(count)


@dataclass(frozen=True)
class Columns:
    """Base of the batches: their fields are arrays whose first axis is the row."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, rows: NDArray[Any]) -> Self:
        """The rows picked by a mask or by positions."""
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """All rows of the batches, in order."""
        return cls(
            **{f.name: np.concatenate([getattr(b, f.name) for b in batches]) for f in fields(cls)}
        )


@dataclass(frozen=True)
class Events(Columns):
    """Records of the log. Times are epoch ms; `ABSENT` where a field does not apply."""

    event: Ints
    type: Ints
    session: Ints
    user: Ints
    item: Ints
    surface: Ints
    event_time: Ints
    ingest_time: Ints
    request: Ints
    impression: Ints
    position: Ints
    propensity: Floats
    device: Ints
    connection: Ints
    dwell_ms: Ints
    value: Floats

    @classmethod
    def of(cls, kind: EventType, **given: NDArray[Any]) -> Self:
        """Events of one type; what is not given is absent."""
        absent = np.full(len(given["user"]), ABSENT)
        given["type"] = np.full_like(absent, kind)
        return cls(**{f.name: given.get(f.name, absent) for f in fields(cls)})

    def followed_by(self, kind: EventType, after_ms: Ints, **given: NDArray[Any]) -> Self:
        """Events of another type, of the same users on the same items, some time after these."""
        return self.of(
            kind,
            session=self.session,
            user=self.user,
            item=self.item,
            surface=self.surface,
            event_time=self.event_time + after_ms,
            **given,
        )
