"""The model inputs in an example, derived from the data spec, and the reach of its counters."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etl.spec.attributes import (
    CategoricalAttribute,
    LocalTimeAttribute,
    NumericAttribute,
    VectorAttribute,
)
from etl.spec.model import DataSpec
from etl.spec.units import DAY
from etl.tables.schemas import counter_columns

Float32 = npt.NDArray[np.float32]
Attribute = CategoricalAttribute | NumericAttribute | VectorAttribute | LocalTimeAttribute
ITEM_TABLE, USER_TABLE = "item", "user"  # embedding tables of item and user ids
TEACHER_EMBEDDING_WIDTH = 32  # numbers that GEM stores per impression, for its user's later ones


class Counter(NamedTuple):
    """A column of counts: events of a type, over a window of seconds, with equal keys."""

    column: str
    key: tuple[str, ...]
    window: int
    event: str


def counters(spec: DataSpec) -> list[Counter]:
    """All counters of a spec, in the order of their columns in `examples`."""
    declared = spec.counters
    definitions = product(declared.keys, declared.windows, declared.events)
    return [
        Counter(column, key, window, event)
        for column, (key, window, event) in zip(counter_columns(spec), definitions, strict=True)
    ]


@dataclass(frozen=True)
class CounterTransform:
    """Positions of outcome counters, and of the impression counter of the same key and window."""

    outcomes: tuple[int, ...]
    impressions: tuple[int, ...]
    column_names: tuple[str, ...]

    def __call__(self, counts: Float32) -> Float32:
        """Counts (B, C) to ln(1 + n) and outcome rates ln((k + 0.1) / (n + 1)): (B, C + rates)."""
        outcomes, impressions = counts[:, self.outcomes], counts[:, self.impressions]
        rates = np.log((outcomes + 0.1) / (impressions + 1.0))
        return np.concatenate((np.log1p(counts), rates), axis=1, dtype=np.float32)


def counter_transform(spec: DataSpec) -> CounterTransform:
    """The transform of a spec's counters; it has rates only where impressions are counted."""
    declared = counters(spec)
    positions = {(c.key, c.window, c.event): position for position, c in enumerate(declared)}
    outcomes, impressions = [], []
    if spec.impression_type in spec.counters.events:
        for position, counter in enumerate(declared):
            if spec.events[counter.event].role == "outcome":
                outcomes.append(position)
                impressions.append(positions[counter.key, counter.window, spec.impression_type])
    columns = [counter.column for counter in declared]
    rates = [f"rate_{columns[position]}" for position in outcomes]
    return CounterTransform(tuple(outcomes), tuple(impressions), (*columns, *rates))


@dataclass(frozen=True)
class FeatureGroup:
    """Columns of one entity; `categorical` maps a column to the rows of its embedding table."""

    categorical: dict[str, int]
    numeric: tuple[str, ...]
    vectors: dict[str, int]


@dataclass(frozen=True)
class FeatureSchema:
    """All that a model may read of an impression, except for its history and its item's id."""

    user: FeatureGroup
    item: FeatureGroup
    context: FeatureGroup
    counters: tuple[str, ...]
    counter_transform: CounterTransform
    objectives: tuple[str, ...]
    similarity_columns: tuple[str, ...]
    surfaces: tuple[str, ...]
    events: tuple[str, ...]
    value_objectives: tuple[str, ...]

    @property
    def numeric_columns(self) -> tuple[str, ...]:
        """Numbers of an impression, in the order of the batch: item, context, counters."""
        return (*self.item.numeric, *self.context.numeric, *self.counter_transform.column_names)


def feature_schema(spec: DataSpec) -> FeatureSchema:
    """The features of a spec, named as the columns of `examples` and `items`."""
    return FeatureSchema(
        user=_feature_group("user", spec.attributes.user),
        item=_feature_group("item", spec.attributes.item),
        context=_feature_group("ctx", spec.attributes.context),
        counters=tuple(counter_columns(spec)),
        counter_transform=counter_transform(spec),
        objectives=tuple(spec.objectives),
        similarity_columns=tuple(f"item_{name}" for name in spec.similarity_attributes),
        surfaces=tuple(spec.surfaces),
        events=tuple(spec.events),
        value_objectives=tuple(
            name for name, objective in spec.objectives.items() if objective.value
        ),
    )


def _feature_group(prefix: str, attributes: Mapping[str, Attribute]) -> FeatureGroup:
    columns = {f"{prefix}_{name}": attribute for name, attribute in attributes.items()}
    return FeatureGroup(
        categorical={
            column: attribute.num_embeddings
            for column, attribute in columns.items()
            if isinstance(attribute, CategoricalAttribute | LocalTimeAttribute)
        },
        numeric=tuple(
            column
            for column, attribute in columns.items()
            if isinstance(attribute, NumericAttribute)
        ),
        vectors={
            column: attribute.width
            for column, attribute in columns.items()
            if isinstance(attribute, VectorAttribute)
        },
    )


def counter_horizon_days(spec: DataSpec) -> int:
    """Days before an example's landing day on which the events that it counts became visible.

    The longest window, counted from an impression that lands as late as the spec allows.
    """
    longest_window = max(spec.counters.windows, default=0)
    return _full_days(longest_window + spec.allowed_lateness)


def max_visibility_delay_days(spec: DataSpec) -> int:
    """Days after its landing day on which an event becomes visible at the latest."""
    slowest_source = max(log.delay for log in spec.log_sources.values())
    return _full_days(spec.allowed_lateness + slowest_source) + 1


def counter_input_days(spec: DataSpec) -> int:
    """Days before an example's landing day on which the events that it counts may have landed."""
    return counter_horizon_days(spec) + max_visibility_delay_days(spec)


def _full_days(seconds: int) -> int:
    return -(-seconds // DAY)
