"""Columns that the attributes, counters and auction of a spec add to tables, and their types."""

from etl.spec.attributes import (
    Attribute,
    BagAttribute,
    LocalTimeAttribute,
    LoggedAttribute,
    MultiCategoricalAttribute,
    NumericAttribute,
    VectorAttribute,
)
from etl.spec.model import DataSpec


def logged_sql_type(attribute: Attribute) -> str:
    """Spark SQL type of an attribute as logged."""
    if isinstance(attribute, VectorAttribute):
        return "array<float>"
    if isinstance(attribute, MultiCategoricalAttribute):
        return "array<string>"
    return "double" if isinstance(attribute, NumericAttribute) else "string"


def encoded_sql_type(attribute: Attribute) -> str:
    """Spark SQL type of an attribute as models read it; a bag has the buckets of its values."""
    if isinstance(attribute, BagAttribute):
        return "array<int>"
    if isinstance(attribute, VectorAttribute):
        return "array<float>"
    return "float" if isinstance(attribute, NumericAttribute) else "int"


def logged_context_attributes(spec: DataSpec) -> dict[str, LoggedAttribute]:
    """Context attributes that have a column in the logs."""
    context = spec.attributes.context
    return {name: a for name, a in context.items() if not isinstance(a, LocalTimeAttribute)}


def event_columns(spec: DataSpec) -> dict[str, LoggedAttribute]:
    """Columns of `events` with attributes that are logged with each event, as they are stored."""
    context = {f"ctx_{name}": a for name, a in logged_context_attributes(spec).items()}
    return context | {f"event_{name}": a for name, a in spec.attributes.event.items()}


def history_attributes(spec: DataSpec) -> dict[str, LoggedAttribute]:
    """The attributes of events in histories, by name."""
    return {name: spec.attributes.event[name] for name in spec.history.attributes}


def history_attribute_columns(spec: DataSpec) -> list[str]:
    """The columns of `history` with attributes of events: `attr_quantity`."""
    return [f"attr_{name}" for name in spec.history.attributes]


def number_column(spec: DataSpec, name: str) -> str:
    """The column of `events` of a number of which counters have functions."""
    if name == "dwell":
        return "dwell_ms"
    if name == "value":
        return name
    return f"event_{name}" if name in spec.attributes.event else f"ctx_{name}"


AUCTION_TYPES = {"bid": "double", "goal": "string", "target_roas": "double"}


def auction_columns(spec: DataSpec) -> dict[str, str]:
    """Raw column of each item column that the auction needs."""
    auction = spec.auction
    if auction is None:
        return {}
    columns = {"bid": auction.bid, "goal": auction.goal}
    return columns | ({"target_roas": auction.target_roas} if auction.target_roas else {})


def counter_columns(spec: DataSpec) -> dict[str, str]:
    """SQL type of each counter's column, in their order."""
    return {counter.column: counter.sql_type for counter in spec.counters.columns}


def item_counter_key_columns(spec: DataSpec) -> list[str]:
    """Columns with hashes of the item attributes that are counter keys: `key_author_id`."""
    return [f"key_{name}" for name in spec.item_counter_keys]


def counted_columns(spec: DataSpec) -> list[str]:
    """Columns of `events` with the numbers and the attributes that counters read of an event."""
    logged = logged_context_attributes(spec)
    keys = [f"ctx_{name}" for name in spec.context_counter_keys if name in logged]
    distinct = [f"event_{name}" for name in spec.distinct_event_attributes]
    numbers = [number_column(spec, each.column) for each in spec.counters.numeric_aggregations]
    return list(dict.fromkeys((*keys, *distinct, *numbers)))
