"""Counters of past events: their section of the spec, and the column of each counter."""

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, field_validator

from etl.spec.base import DistinctColumnName, EventName, KeyName, NumberColumnName, StrictModel
from etl.spec.units import Duration, format_duration

Function = Literal["sum", "mean", "min", "max", "first", "last"]
Aggregation = Literal["count", "decayed_count", "time_since_last", "distinct_count"] | Function
FUNCTIONS: tuple[Function, ...] = get_args(Function)
EVENT_NUMBERS = ("dwell", "value")  # numbers of events besides attributes
CounterKey = tuple[str, ...]
COLUMN_PREFIXES = {"count": "cnt", "decayed_count": "decayed", "time_since_last": "since"}


class Counter(NamedTuple):
    """One column: an aggregation of past events of a type that share a key with the impression.

    `period` is the window or the half-life in seconds; None is the longest window. `input_column`
    is what a function is computed of.
    """

    key: CounterKey
    aggregation: Aggregation
    event: str
    period: int | None
    input_column: str | None = None

    @property
    def column(self) -> str:
        """The name of the column, such as `cnt_user_ad_click_7d` or `mean_dwell_item_view_1d`."""
        prefix = COLUMN_PREFIXES.get(self.aggregation, f"{self.aggregation}_{self.input_column}")
        parts = [prefix, *self.key, self.event]
        return "_".join(parts if self.period is None else [*parts, format_duration(self.period)])

    @property
    def sql_type(self) -> str:
        """The Spark SQL type of the column."""
        return "int" if self.aggregation in ("count", "time_since_last") else "float"


class NumericAggregation(StrictModel):
    """A function of a number of the events of a type, in each window.

    Numbers are rounded: dwells to milliseconds and at most a day, others to ten-thousandths and
    within ±1e9. Events without the number are left out; without any, a sum is 0 and others are
    null.
    """

    function: Function
    """What is computed; of one second's numbers, `first` is the smallest and `last` the largest."""
    column: NumberColumnName
    """`dwell` (in seconds), `value`, or a numeric attribute of events or of the context."""
    event: EventName
    """The type of events; it need not be counted."""


class DistinctCount(StrictModel):
    """The number of distinct items, users or others among the events of a type, in each window.

    It is estimated with HyperLogLog, with a standard error of 9 %; of few values it is closer.
    Events without the value are left out.
    """

    function: Literal["distinct_count"]
    """What is computed."""
    column: DistinctColumnName
    """What is counted: `user`, `item`, `surface`, or a categorical attribute.

    Values of an attribute of users or of the context that share a row of its `size` count as one.
    """
    event: EventName
    """The type of events; it need not be counted."""


ColumnAggregation = Annotated[NumericAggregation | DistinctCount, Field(discriminator="function")]


class CounterSpec(StrictModel):
    """Aggregations of past events, each for every combination of keys.

    Counts for each window and type of event; where declared also decayed counts, the time since
    the last event, functions of numbers, and distinct counts.
    """

    windows: tuple[Annotated[Duration, Field(ge=1)], ...] = Field(min_length=1)
    """How long before the impression events are counted."""
    events: tuple[EventName, ...] = Field(min_length=1)
    """Types of events that are counted."""
    keys: tuple[tuple[KeyName, ...], ...] = Field(min_length=1)
    """What counted events share with the impression.

    `user`, `item`, `surface`, or attributes of items, users and the context.
    """
    half_lives: tuple[Annotated[Duration, Field(ge=1)], ...] = ()
    """Half-lives of decayed counts: an event of the longest window weighs 2^(-age / half-life)."""
    time_since_last: tuple[EventName, ...] = ()
    """Types of events of which the seconds since the last, within the longest window, are given."""
    aggregations: tuple[ColumnAggregation, ...] = ()
    """Functions of numbers of events, and distinct counts, in each window."""

    @field_validator("*")
    @classmethod
    def _check_distinct(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        if len(set(values)) < len(values):
            raise ValueError("a value is listed twice; keep one")
        return values

    @property
    def key_parts(self) -> tuple[str, ...]:
        """What keys consist of and what is counted distinctly, each once."""
        of_keys = (part for key in self.keys for part in key)
        return tuple(dict.fromkeys((*of_keys, *(each.column for each in self.distinct_counts))))

    @property
    def numeric_aggregations(self) -> tuple[NumericAggregation, ...]:
        """Those of `aggregations` that are functions of numbers."""
        return tuple(each for each in self.aggregations if isinstance(each, NumericAggregation))

    @property
    def distinct_counts(self) -> tuple[DistinctCount, ...]:
        """Those of `aggregations` that count distinct values; their columns come last."""
        return tuple(each for each in self.aggregations if isinstance(each, DistinctCount))

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
            *(
                Counter(key, each.function, each.event, window, each.column)
                for aggregations in (self.numeric_aggregations, self.distinct_counts)
                for window in self.windows
                for each in aggregations
            ),
        )
