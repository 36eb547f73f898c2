"""Values of attributes as posted or in a request, validated and encoded.

n versions or contexts, F numeric features, V width of all vectors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from etl.array_types import Float32, Int64
from etl.errors import UserError
from etl.spec.attributes import (
    CategoricalAttribute,
    LoggedAttribute,
    MultiCategoricalAttribute,
    NumericAttribute,
    TextAttribute,
    VectorAttribute,
)
from features.encoding.scalar import encode_bag, encode_categorical, encode_numeric
from features.encoding.vectors import bag_vector, concat_vectors
from features.schema import FeatureGroup

AttributeValues = Mapping[str, object]
ENTITIES = {"user": "user", "item": "item", "ctx": "context"}  # by prefix of columns


@dataclass(frozen=True)
class EncodedAttributes:
    """Attributes of an entity: `ids` (n, C) by table, `numbers` (n, F) and `vectors` (n, V)."""

    ids: Int64
    numbers: Float32
    vectors: Float32

    def repeated(self, times: int) -> "EncodedAttributes":
        """Each row, several times."""
        return EncodedAttributes(
            ids=np.repeat(self.ids, times, axis=0),
            numbers=np.repeat(self.numbers, times, axis=0),
            vectors=np.repeat(self.vectors, times, axis=0),
        )


def encode_attributes(
    declared: Mapping[str, LoggedAttribute],
    group: FeatureGroup,
    prefix: str,
    rows: Sequence[AttributeValues],
) -> EncodedAttributes:
    """Encode attributes by their names in the spec; what a row leaves out is missing.

    Columns of `group` that are not among the declared attributes are zeros.

    Raises:
        UserError: A value has the wrong type.
    """
    size, categorical, numeric = len(rows), list(group.categorical), list(group.numeric)
    ids = np.zeros((size, len(categorical)), np.int64)
    numbers = np.zeros((size, len(numeric)), np.float32)
    vectors = {
        column: np.zeros((size, width), np.float32) for column, width in group.vectors.items()
    }
    for name, attribute in declared.items():
        column, label = f"{prefix}_{name}", f"{name} of the {ENTITIES[prefix]}"
        values = [row.get(name) for row in rows]
        if column in vectors:
            vectors[column][:] = [_encode_vector(attribute, label, value) for value in values]
        elif isinstance(attribute, NumericAttribute):
            numbers[:, numeric.index(column)] = [
                encode_numeric(attribute, validated_float(label, value)) for value in values
            ]
        else:
            assert isinstance(attribute, CategoricalAttribute)
            ids[:, categorical.index(column)] = [
                encode_categorical(attribute, validated_string(label, value)) for value in values
            ]
    return EncodedAttributes(ids, numbers, concat_vectors([*vectors.values()], size))


def _encode_vector(attribute: LoggedAttribute, label: str, value: object) -> Float32:
    """The vector of an attribute that has one (W)."""
    if isinstance(attribute, TextAttribute):
        text = validated_string(label, value)
        return bag_vector(encode_bag(attribute, text), attribute.width)
    if isinstance(attribute, MultiCategoricalAttribute):
        strings = _validated_strings(label, value)
        return bag_vector(encode_bag(attribute, strings), attribute.width)
    assert isinstance(attribute, VectorAttribute)
    return _validated_vector(label, value, attribute.width)


def validated_float(label: str, value: object) -> float | None:
    """The value; raises UserError if it is neither a number nor missing."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{label} is {value!r}; it is a number")
    return float(value)


def validated_string(label: str, value: object) -> str | None:
    """The value; raises UserError if it is neither a string nor missing."""
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"{label} is {value!r}; it is a string")


def _validated_strings(label: str, value: object) -> Sequence[str] | None:
    if value is None:
        return None
    if _is_list(value) and all(isinstance(element, str) for element in value):
        return value
    raise UserError(f"{label} is {value!r}; it is a list of strings")


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _validated_vector(label: str, value: object, width: int) -> Float32:
    """A vector (W): zeros if missing, and in place of non-finite values."""
    if value is None:
        return np.zeros(width, np.float32)
    if not (_is_list(value) and len(value) == width and all(map(_is_number, value))):
        raise UserError(f"{label} is {value!r}; it is a list of {width} numbers")
    return np.nan_to_num(np.array(value, np.float32), nan=0.0, posinf=0.0, neginf=0.0)
