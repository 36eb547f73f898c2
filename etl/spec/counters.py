"""Counters of past events: their section of the spec, and the column of each counter."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from etl.spec.base import EventName, KeyName, StrictModel
from etl.spec.units import Duration, format_duration

Aggregation = Literal["count", "decayed_count", "time_since_last", "mean_dwell"]
CounterKey = tuple[str, ...]
COLUMN_PREFIXES: dict[Aggregation, str] = {
    "count": "cnt",
    "decayed_count": "decayed",
    "time_since_last": "since",
    "mean_dwell": "dwell",
}
COLUMN_TYPES: dict[Aggregation, str] = {
    "count": "int",
    "decayed_count": "float",
    "time_since_last": "int",
    "mean_dwell": "float",
}


class Counter(NamedTuple):
    """One column: an aggregation of past events of a type that share a key with the impression.

    `period` is the window or the half-life in seconds; None is the longest window.
    """

    key: CounterKey
    aggregation: Aggregation
    event: str
    period: int | None

    @property
    def column(self) -> str:
        """The name of the column, such as `cnt_user_surface_ad_click_7d` or `since_item_click`."""
        parts = [COLUMN_PREFIXES[self.aggregation], *self.key, self.event]
        return "_".join(parts if self.period is None else [*parts, format_duration(self.period)])

    @property
    def sql_type(self) -> str:
        """The Spark SQL type of the column."""
        return COLUMN_TYPES[self.aggregation]


class CounterSpec(StrictModel):
    """Aggregations of past events, each for every combination of keys.

    Counts for each window and type of event; where declared also decayed counts, the time since
    the last event, and mean dwells.
    """

    windows: tuple[Duration, ...] = Field(min_length=1)
    """How long before the impression events are counted."""
    events: tuple[EventName, ...] = Field(min_length=1)
    """Types of events that are counted."""
    keys: tuple[tuple[KeyName, ...], ...] = Field(min_length=1)
    """What counted events share with the impression: user, item, surface or item attributes."""
    half_lives: tuple[Annotated[Duration, Field(ge=1)], ...] = ()
    """Half-lives of decayed counts: an event of the longest window weighs 2^(-age / half-life)."""
    time_since_last: tuple[EventName, ...] = ()
    """Types of events of which the seconds since the last, within the longest window, are given."""
    mean_dwell: tuple[EventName, ...] = ()
    """Types of events of which the mean dwell in each window, in seconds, is given."""

    @field_validator("*")
    @classmethod
    def _check_distinct(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        if len(set(values)) < len(values):
            raise ValueError("a value is listed twice; keep one")
        return values

    @property
    def longest_window(self) -> int:
        """Seconds of the longest window."""
        return max(self.windows)

    @property
    def columns(self) -> tuple[Counter, ...]:
        """All counters, in the order of their columns in `examples`."""
        return tuple(counter for key in self.keys for counter in self.columns_of(key))

    def columns_of(self, key: CounterKey) -> tuple[Counter, ...]:
        """The counters of one key, in the order of their columns."""
        return (
            *(Counter(key, "count", e, window) for window in self.windows for e in self.events),
            *(Counter(key, "decayed_count", e, h) for h in self.half_lives for e in self.events),
            *(Counter(key, "time_since_last", e, None) for e in self.time_since_last),
            *(Counter(key, "mean_dwell", e, w) for w in self.windows for e in self.mean_dwell),
        )
