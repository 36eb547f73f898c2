"""What a model reads, derived from the data spec: columns, and the rows of each table."""

from collections.abc import Mapping
from dataclasses import dataclass

from etl.spec.attributes import Categorical, Clock, Numeric, Vector
from etl.spec.model import DataSpec
from etl.tables.contracts import counter_columns
from features.counter_inputs import CounterInputs, counter_inputs

Attribute = Categorical | Numeric | Vector | Clock
ITEM, USER = "item", "user"  # tables of ids
KEPT_WIDTH = 32  # numbers that GEM keeps of an impression, for later ones of its user


@dataclass(frozen=True)
class Group:
    """Columns of one entity. `ids` maps a categorical column to the rows of its table."""

    ids: dict[str, int]
    numbers: tuple[str, ...]
    vectors: dict[str, int]


@dataclass(frozen=True)
class Features:
    """Everything that a model may read about an impression, but its history and its item's id."""

    user: Group
    item: Group
    context: Group
    counters: tuple[str, ...]
    counter_inputs: CounterInputs
    objectives: tuple[str, ...]
    match: tuple[str, ...]
    surfaces: tuple[str, ...]
    events: tuple[str, ...]
    valued: tuple[str, ...]

    @property
    def row_numbers(self) -> tuple[str, ...]:
        """Numbers of an impression, in the order of the batch: item's, context's, counters."""
        return (*self.item.numbers, *self.context.numbers, *self.counter_inputs.names)


def features_of(spec: DataSpec) -> Features:
    """The features of a spec, named as the columns of `examples` and `items`."""
    return Features(
        user=_group("u", spec.attributes.user),
        item=_group("i", spec.attributes.item),
        context=_group("x", spec.attributes.context),
        counters=tuple(counter_columns(spec)),
        counter_inputs=counter_inputs(spec),
        objectives=tuple(spec.objectives),
        match=tuple(f"i_{name}" for name in spec.match),
        surfaces=tuple(spec.surfaces),
        events=tuple(spec.events),
        valued=tuple(name for name, told in spec.objectives.items() if told.value),
    )


def _group(prefix: str, declared: Mapping[str, Attribute]) -> Group:
    named = {f"{prefix}_{name}": attribute for name, attribute in declared.items()}
    return Group(
        ids={n: a.rows for n, a in named.items() if isinstance(a, Categorical | Clock)},
        numbers=tuple(n for n, a in named.items() if isinstance(a, Numeric)),
        vectors={n: a.width for n, a in named.items() if isinstance(a, Vector)},
    )
