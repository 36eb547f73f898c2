"""The model inputs in an example, derived from the data spec, and the reach of its counters."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from etl.array_types import Float32
from etl.spec.attributes import (
    Attribute,
    BagAttribute,
    CategoricalAttribute,
    LocalTimeAttribute,
    NumericAttribute,
    VectorAttribute,
)
from etl.spec.counters import Counter, CounterKey
from etl.spec.model import DataSpec
from etl.spec.sections import HISTORY_ATTRIBUTE_CODES
from etl.spec.units import DAY
from etl.tables.declared_columns import counter_columns, history_attributes

ITEM_TABLE, USER_TABLE = "item", "user"  # embedding tables of item and user ids
TEACHER_EMBEDDING_WIDTH = 32  # numbers that GEM stores per impression, for its user's later ones


@dataclass(frozen=True)
class CounterTransform:
    """Positions of outcome counts, and of the impression count of the same key and period.

    The period of a decayed count is its half-life.
    """

    outcomes: tuple[int, ...]
    impressions: tuple[int, ...]
    column_names: tuple[str, ...]
    counters: tuple[Counter, ...]  # by column; a rate has that of its outcome

    def __call__(self, counters: Float32) -> Float32:
        """Counters (B, C) to ln(1 + x) and outcome rates ln((k + 0.1) / (n + 1)): (B, C + rates).

        Negative x, such as a sum of refunds, are -ln(1 - x). NaN, which stands for no such event,
        remains NaN.
        """
        outcomes, impressions = counters[:, self.outcomes], counters[:, self.impressions]
        rates = np.log((outcomes + 0.1) / (impressions + 1.0))
        logarithms = np.copysign(np.log1p(np.abs(counters)), counters)
        return np.concatenate((logarithms, rates), axis=1, dtype=np.float32)


def counter_transform(spec: DataSpec) -> CounterTransform:
    """The transform of a spec's counters; it has rates only where impressions are counted."""
    declared = spec.counters.columns
    positions = {counter: position for position, counter in enumerate(declared)}
    outcomes, impressions = [], []
    for position, counter in enumerate(declared):
        shown = positions.get(counter._replace(event=spec.impression_type))
        is_count = counter.aggregation in ("count", "decayed_count")
        if is_count and shown is not None and spec.events[counter.event].role == "outcome":
            outcomes.append(position)
            impressions.append(shown)
    rated = tuple(declared[position] for position in outcomes)
    names = [counter.column for counter in declared]
    return CounterTransform(
        outcomes=tuple(outcomes),
        impressions=tuple(impressions),
        column_names=(*names, *(f"rate_{counter.column}" for counter in rated)),
        counters=declared + rated,
    )


@dataclass(frozen=True)
class FeatureGroup:
    """Columns of one entity.

    `categorical` maps a column to the rows of its embedding table, `vectors` to the width of what
    models read. `bags` are those of `vectors` that are stored as the buckets of their values.
    """

    categorical: dict[str, int]
    numeric: tuple[str, ...]
    vectors: dict[str, int]
    bags: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.categorical, *self.numeric, *self.vectors)


@dataclass(frozen=True)
class PositionFeature:
    """The column of an impression's position, and the position for which rankers serve.

    `has_propensity` says whether logs have the probabilities with which positions were drawn.
    """

    column: str
    served_position: int
    has_propensity: bool


@dataclass(frozen=True)
class FeatureSchema:
    """All that a model may read of an impression, except for its history and its item's id.

    Also the names of what it predicts. `auxiliary_objectives`, which GEM alone learns, map a name
    to its target: `event` or `dwell`. `history_attributes` map a column of events in histories to
    the rows of its embedding.
    """

    user: FeatureGroup
    item: FeatureGroup
    context: FeatureGroup
    counters: tuple[str, ...]
    counter_transform: CounterTransform
    objectives: tuple[str, ...]
    auxiliary_objectives: dict[str, str]
    similarity_columns: tuple[str, ...]
    surfaces: tuple[str, ...]
    events: tuple[str, ...]
    value_objectives: tuple[str, ...]
    position: PositionFeature | None
    history_attributes: dict[str, int] = field(default_factory=dict)

    @property
    def numeric_columns(self) -> tuple[str, ...]:
        """Numbers of an impression, in the order of the batch: item, context, counters."""
        return (*self.item.numeric, *self.context.numeric, *self.counter_transform.column_names)

    @property
    def all_numeric_columns(self) -> tuple[str, ...]:
        """The numbers of an impression, and those of its user."""
        return (*self.numeric_columns, *self.user.numeric)

    @property
    def numeric_keys(self) -> tuple[CounterKey, ...]:
        """The counter key of each of `numeric_columns`; empty for those of item and context."""
        num_attributes = len(self.item.numeric) + len(self.context.numeric)
        keys = tuple(counter.key for counter in self.counter_transform.counters)
        return ((),) * num_attributes + keys


def feature_schema(spec: DataSpec) -> FeatureSchema:
    """The features of a spec, named as the columns of `examples` and `items`."""
    return FeatureSchema(
        user=_feature_group("user", spec.attributes.user),
        item=_feature_group("item", spec.attributes.item),
        context=_feature_group("ctx", spec.attributes.context),
        counters=tuple(counter_columns(spec)),
        counter_transform=counter_transform(spec),
        objectives=tuple(spec.objectives),
        auxiliary_objectives={
            name: auxiliary.target for name, auxiliary in spec.auxiliary_objectives.items()
        },
        similarity_columns=tuple(f"item_{name}" for name in spec.similarity_attributes),
        surfaces=tuple(spec.surfaces),
        events=tuple(spec.events),
        history_attributes={
            f"attr_{name}": attribute.num_embeddings
            if isinstance(attribute, CategoricalAttribute)
            else HISTORY_ATTRIBUTE_CODES
            for name, attribute in history_attributes(spec).items()
        },
        value_objectives=tuple(
            name for name, objective in spec.objectives.items() if objective.value
        ),
        position=_position_feature(spec),
    )


def _position_feature(spec: DataSpec) -> PositionFeature | None:
    bias = spec.position_bias
    if bias is None:
        return None
    has_propensity = any(log.columns.propensity for log in spec.log_sources.values())
    return PositionFeature(f"ctx_{bias.attribute}", bias.served_position, has_propensity)


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
            if isinstance(attribute, VectorAttribute | BagAttribute)
        },
        bags=tuple(
            column for column, attribute in columns.items() if isinstance(attribute, BagAttribute)
        ),
    )


def counter_horizon_days(spec: DataSpec) -> int:
    """Days before an example's landing day on which the events that it counts became visible.

    These are the longest window, the lateness with which impressions may land, and one day more:
    devices' clocks may run ahead, and a day on which clocks change has fewer hours.
    """
    return -(-(spec.counters.longest_window + spec.allowed_lateness) // DAY) + 1


def counter_input_days(spec: DataSpec) -> int:
    """Days before an example's landing day on which the events that it counts may have landed."""
    return counter_horizon_days(spec) + spec.visibility_delay_days
