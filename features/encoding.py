"""Attributes as models read them: row numbers of embedding tables, and transformed numbers."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from etl.local_time import local_seconds
from etl.spec.attributes import Categorical, Clock, Numeric, Vector
from etl.spec.model import DataSpec
from etl.spec.units import DAY


def encode(attribute: Categorical | Numeric | Vector, raw: Column) -> Column:
    """A raw value as a model reads it: a row (0 is missing), a number, or a list of numbers."""
    if isinstance(attribute, Vector):
        return F.when(F.size(raw) == attribute.width, raw)
    if isinstance(attribute, Numeric):
        return _number(attribute, raw)
    if attribute.vocabulary is not None:
        known = F.array(*[F.lit(word) for word in attribute.vocabulary])
        row = F.when(F.array_contains(known, raw), F.array_position(known, raw) + 1).otherwise(1)
    else:
        row = F.pmod(F.xxhash64(raw), F.lit(attribute.size - 1)) + 1
    return F.when(raw.isNull(), 0).otherwise(row).cast("int")


def _number(attribute: Numeric, raw: Column) -> Column:
    finite = F.when(~F.isnan(raw) & (F.abs(raw) < 1e30), raw)
    scaled = F.signum(finite) * F.log1p(F.abs(finite)) if attribute.transform == "log" else finite
    return scaled.cast("float")


def clock(spec: DataSpec, part: Clock, seconds: Column) -> Column:
    """The hour or the weekday of an epoch second, from 1, in the spec's local time."""
    local = local_seconds(spec, seconds)
    if part.part == "hour":
        return (F.pmod(local, F.lit(DAY)) / 3600).cast("int") + 1
    return F.pmod((local / DAY).cast("bigint") + 3, F.lit(7)).cast("int") + 1
