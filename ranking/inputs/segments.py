"""Segments in whose values a ranker is calibrated: categories, and whether an item is new to it."""

from collections.abc import Collection, Mapping

import numpy as np

from etl.array_types import Int64
from etl.spec.attributes import CategoricalAttribute, LocalTimeAttribute
from etl.spec.model import DataSpec
from etl.spec.sections import NEW_ITEM
from ranking.inputs.arrays import is_known_item

SegmentValues = dict[str, Int64]
OLD, NEW = 0, 1  # values of segment NEW_ITEM


def segment_columns(spec: DataSpec) -> dict[str, str]:
    """The feature column of each segment of a spec but NEW_ITEM, by segment."""
    groups: dict[str, Collection[str]] = {
        "user": spec.attributes.user,
        "item": spec.attributes.item,
        "ctx": spec.attributes.context,
    }
    return {
        segment: f"{prefix}_{segment}"
        for segment in spec.calibration_segments
        for prefix, attributes in groups.items()
        if segment in attributes
    }


def segment_values(
    spec: DataSpec, columns: Mapping[str, Int64], item_index: Int64, num_items: int
) -> SegmentValues:
    """The value of each segment, in the shape of `item_index` (…).

    Args:
        spec: The data spec, which names the segments.
        columns: Arrays of categories that broadcast to that shape, by feature column.
        item_index: Items.
        num_items: Items from this index on are new to the ranker, like those without an index.
    """
    values = {
        segment: np.broadcast_to(columns[column], item_index.shape)
        for segment, column in segment_columns(spec).items()
    }
    if NEW_ITEM in spec.calibration_segments:
        values[NEW_ITEM] = np.where(is_known_item(item_index, num_items), OLD, NEW)
    return values


def segment_value_name(spec: DataSpec, segment: str, value: int) -> str:
    """A segment's value for readers, such as `format video`; `category #7` if it is hashed."""
    if segment == NEW_ITEM:
        return "new items" if value == NEW else "old items"
    for attributes in (spec.attributes.user, spec.attributes.item, spec.attributes.context):
        attribute = attributes.get(segment)
        if value == 0 and attribute is not None:
            return f"{segment} missing"
        if isinstance(attribute, LocalTimeAttribute):
            return f"{segment} {value - 1 if attribute.part == 'hour' else value}"
        if isinstance(attribute, CategoricalAttribute) and attribute.vocabulary is not None:
            return f"{segment} {('unknown', *attribute.vocabulary)[value - 1]}"
    return f"{segment} #{value}"
