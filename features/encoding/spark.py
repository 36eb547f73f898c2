"""Encoding of attributes in Spark: rows of embedding tables, and transformed numbers."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from etl.ingest.timestamps import to_local_seconds
from etl.spec.attributes import (
    CategoricalAttribute,
    LocalTimeAttribute,
    NumericAttribute,
    VectorAttribute,
)
from etl.spec.model import DataSpec
from etl.spec.units import DAY
from features.encoding.scalar import MAX_ABS_VALUE, MISSING_CATEGORY


def encode_attribute(
    attribute: CategoricalAttribute | NumericAttribute | VectorAttribute, raw: Column
) -> Column:
    """A raw value as a model input: an embedding row (0 is missing), a number, or a vector."""
    if isinstance(attribute, VectorAttribute):
        return F.when(F.size(raw) == attribute.width, raw)
    if isinstance(attribute, NumericAttribute):
        return _encode_numeric(attribute, raw)
    if attribute.vocabulary is not None:
        known = F.array(*[F.lit(word) for word in attribute.vocabulary])
        position = F.array_position(known, raw)  # from 1
        row = F.when(F.array_contains(known, raw), position + 1).otherwise(1)
    else:
        row = F.pmod(F.xxhash64(raw), F.lit(attribute.size - 1)) + 1
    return F.when(raw.isNull(), MISSING_CATEGORY).otherwise(row).cast("int")


def _encode_numeric(attribute: NumericAttribute, raw: Column) -> Column:
    finite = F.when(~F.isnan(raw) & (F.abs(raw) < MAX_ABS_VALUE), raw)
    scaled = F.signum(finite) * F.log1p(F.abs(finite)) if attribute.transform == "log" else finite
    return scaled.cast("float")


def encode_local_time(spec: DataSpec, attribute: LocalTimeAttribute, seconds: Column) -> Column:
    """The hour or the weekday of an epoch second in the spec's local time, counted from 1."""
    local = to_local_seconds(spec, seconds)
    if attribute.part == "hour":
        return (F.pmod(local, F.lit(DAY)) / 3600).cast("int") + 1
    return F.pmod((local / DAY).cast("bigint") + 3, F.lit(7)).cast("int") + 1
