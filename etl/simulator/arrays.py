"""Batches of rows as NumPy arrays, and random draws from logits and probabilities.

The argmax of logits + Gumbel noise is a draw from their softmax; sorting the sums in descending
order draws all columns one after another without replacement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from etl.array_types import Bools, Floats, Int64
from etl.simulator.config import EventType

MISSING = -1
"""Value of a field that does not apply to a record."""

IDS_PER_DAY = 10**9
"""Distance between the first ids of two consecutive days."""


def new_ids(day: int, count: int) -> Int64:
    """(count,) ids that no other day has."""
    return day * IDS_PER_DAY + np.arange(count)


@dataclass(frozen=True)
class RowBatch:
    """Base of batches, dataclasses whose fields are arrays with rows on the first axis."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, rows: NDArray[Any]) -> Self:
        """The rows that a mask or positions select."""
        names = [field.name for field in fields(self)]
        return type(self)(**{name: getattr(self, name)[rows] for name in names})

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """All rows of some batches, in order."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: np.concatenate([getattr(b, name) for b in batches]) for name in names})


@dataclass(frozen=True)
class Events(RowBatch):
    """Records of the log; times are epoch ms, and MISSING where a field does not apply."""

    event: Int64
    type: Int64
    session: Int64
    user: Int64
    item: Int64
    surface: Int64
    event_time: Int64
    ingest_time: Int64
    request: Int64
    impression: Int64
    position: Int64
    propensity: Floats
    device: Int64
    connection: Int64
    dwell_ms: Int64
    value: Floats
    refunded: Int64

    @classmethod
    def of_type(cls, event_type: EventType, **columns: NDArray[Any]) -> Self:
        """Events of one type; columns that are not given are MISSING."""
        missing = np.full(len(columns["user"]), MISSING)
        columns["type"] = np.full_like(missing, event_type)
        return cls(**{field.name: columns.get(field.name, missing) for field in fields(cls)})

    def follow_up(self, event_type: EventType, delay_ms: Int64, **columns: NDArray[Any]) -> Self:
        """Events of another type by the same users on the same items, `delay_ms` after these."""
        return self.of_type(
            event_type,
            session=self.session,
            user=self.user,
            item=self.item,
            surface=self.surface,
            event_time=self.event_time + delay_ms,
            **columns,
        )


def sigmoid(logit: Floats) -> Floats:
    """Probabilities of logits."""
    return 1 / (1 + np.exp(-logit))


def draw_bernoulli(logit: Floats, rng: np.random.Generator) -> Bools:
    """(n,) draws that are true with the probability of their logit."""
    return rng.random(len(logit)) < sigmoid(logit)


def draw_categorical(logits: Floats, rng: np.random.Generator) -> Int64:
    """(n,) columns drawn from the softmax of each row of (n, k) logits."""
    columns: Int64 = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    return columns


def sample_without_replacement(logits: Floats, rng: np.random.Generator) -> tuple[Int64, Floats]:
    """All columns of each row of (n, k) logits, drawn one after another without replacement.

    Returns:
        The (n, k) columns in the order drawn, and the (n, k) probability with which each was drawn
        from the remaining ones: 0 for logits of minus infinity, which are drawn last.
    """
    order = np.argsort(-(logits + rng.gumbel(size=logits.shape)), axis=1)
    weight = np.exp(np.take_along_axis(logits, order, axis=1))
    remaining = np.cumsum(weight[:, ::-1], axis=1)[:, ::-1]
    return order, np.divide(weight, remaining, out=np.zeros_like(weight), where=remaining > 0)


def draw_from_probabilities(probabilities: Floats, rng: np.random.Generator) -> Int64:
    """(n,) columns drawn with the probabilities in each row of (n, k)."""
    cumulative = np.cumsum(probabilities, axis=1)
    draws = rng.random((len(probabilities), 1)) * cumulative[:, -1:]
    columns: Int64 = np.sum(draws > cumulative[:, :-1], axis=1)
    return columns
