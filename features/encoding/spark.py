"""Encoding of attributes in Spark: rows of embedding tables, and transformed numbers."""

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F

from etl.ingest.attribute_values import evaluate_once
from etl.ingest.timestamps import to_local_seconds
from etl.spec.attributes import (
    BagAttribute,
    LocalTimeAttribute,
    LoggedAttribute,
    NumericAttribute,
    TextAttribute,
    VectorAttribute,
)
from etl.spec.model import DataSpec
from etl.spec.units import DAY
from features.encoding.scalar import MAX_ABS_VALUE, MISSING_CATEGORY, WORD_SEPARATORS


def encode_attribute(attribute: LoggedAttribute, raw: Column) -> Column:
    """A raw value as a model input: an embedding row (0 is missing), a number, or a vector.

    Of a bag of values or n-grams, their buckets, from 0 and in ascending order.
    """
    if isinstance(attribute, BagAttribute):
        return _encode_bag(attribute, raw)
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


def _encode_bag(attribute: BagAttribute, raw: Column) -> Column:
    values = _ngrams(attribute, raw) if isinstance(attribute, TextAttribute) else raw
    if isinstance(attribute, TextAttribute) or attribute.vocabulary is None:
        size = F.lit(attribute.size)
        buckets = F.transform(values, lambda value: F.pmod(F.xxhash64(value), size))
    else:
        known = F.array(*[F.lit(word) for word in attribute.vocabulary])
        buckets = F.transform(values, lambda value: F.array_position(known, value))
    return F.when(raw.isNotNull(), F.array_sort(buckets).cast("array<int>"))


def _ngrams(attribute: TextAttribute, text: Column) -> Column:
    """The n-grams of a text, as `features.encoding.scalar.ngrams` returns them."""
    words = F.filter(F.split(F.lower(text), WORD_SEPARATORS), lambda word: word != "")
    if attribute.analyzer == "word":
        return evaluate_once(
            words, lambda bound: _runs(attribute, bound, F.size(bound), _joined_words)
        )
    joined = F.array_join(words, " ")
    return evaluate_once(
        joined, lambda bound: _runs(attribute, bound, F.length(bound), F.substring)
    )


def _joined_words(words: Column, start: Column, length: Column) -> Column:
    return F.array_join(F.slice(words, start, length), " ")


def _runs(
    attribute: TextAttribute,
    units: Column,
    count: Column,
    run: Callable[[Column, Column, Column], Column],
) -> Column:
    """All runs of the lengths of an attribute; `run` returns one from its start (1) and length."""

    def runs_of(length: int) -> Column:
        starts = F.sequence(F.lit(1), count - (length - 1))
        runs = F.transform(starts, lambda start: run(units, start, F.lit(length)))
        return F.when(count >= length, runs).otherwise(F.array().cast("array<string>"))

    shortest, longest = attribute.ngram_range
    return F.flatten(F.array(*map(runs_of, range(shortest, longest + 1))))


def encode_local_time(spec: DataSpec, attribute: LocalTimeAttribute, seconds: Column) -> Column:
    """The hour or the weekday of an epoch second in the spec's local time, counted from 1."""
    local = to_local_seconds(spec, seconds)
    if attribute.part == "hour":
        return (F.pmod(local, F.lit(DAY)) / 3600).cast("int") + 1
    return F.pmod((local / DAY).cast("bigint") + 3, F.lit(7)).cast("int") + 1
