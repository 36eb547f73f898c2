"""Encoding of attributes one value at a time, as `features/encoding/spark.py` does in Spark.

Also the four-bit encoding of teacher embeddings.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from math import copysign, isfinite, log1p, nan
from zoneinfo import ZoneInfo

import numpy as np
import xxhash

from etl.array_types import Bytes, Float32, Int64, UInt64
from etl.spec.attributes import (
    BagAttribute,
    CategoricalAttribute,
    LocalTimeAttribute,
    NumericAttribute,
    TextAttribute,
)

SPARK_XXHASH64_SEED = 42
XXHASH64_PRIMES = (
    *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
)
MAX_ABS_VALUE = 1e30
MISSING_CATEGORY = 0
# Control characters, spaces and punctuation: ASCII and Latin-1, Arabic, danda, Unicode's blocks for
# general and for CJK punctuation, full-width forms. The pattern means the same in Java.
WORD_SEPARATORS = (
    r"[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf"
    r"\u060c\u061b\u061f\u06d4\u0964\u0965\u1680\u2000-\u206f\u3000-\u303f"
    r"\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]+"
)
INT4_ZERO_POINT = 8  # of the 16 levels, 8 are below zero


def spark_xxhash64(text: str) -> int:
    """Spark's xxhash64 of a string: a signed 64-bit integer."""
    unsigned = xxhash.xxh64_intdigest(text.encode(), seed=SPARK_XXHASH64_SEED)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def spark_xxhash64_of_integers(values: Int64) -> UInt64:
    """Spark's xxhash64 of integers of 64 bits (N), as unsigned integers (N)."""
    first, second, third, fourth, fifth = map(np.uint64, XXHASH64_PRIMES)
    rounds = _rotate_left(values.astype(np.int64).view(np.uint64) * second, 31) * first
    mixed = (np.uint64(SPARK_XXHASH64_SEED + 8) + fifth) ^ rounds
    mixed = _rotate_left(mixed, 27) * first + fourth
    mixed = (mixed ^ mixed >> np.uint64(33)) * second
    mixed = (mixed ^ mixed >> np.uint64(29)) * third
    return mixed ^ mixed >> np.uint64(32)


def _rotate_left(values: UInt64, bits: int) -> UInt64:
    return values << np.uint64(bits) | values >> np.uint64(64 - bits)


def encode_categorical(attribute: CategoricalAttribute, raw: str | None) -> int:
    """The embedding row of a value: 0 if missing, 1 if not in the vocabulary."""
    if raw is None:
        return MISSING_CATEGORY
    if attribute.vocabulary is not None:
        return attribute.vocabulary.index(raw) + 2 if raw in attribute.vocabulary else 1
    return spark_xxhash64(raw) % (attribute.size - 1) + 1


def encode_numeric(attribute: NumericAttribute, raw: float | None) -> float:
    """The transformed number in single precision; NaN if missing or not finite."""
    if raw is None or not isfinite(raw) or abs(raw) >= MAX_ABS_VALUE:
        return nan
    scaled = copysign(log1p(abs(raw)), raw) if attribute.transform == "log" else raw
    return float(np.float32(scaled))


def encode_context_category(
    attribute: CategoricalAttribute | LocalTimeAttribute,
    raw: str | None,
    second: int,
    time_zone: str,
) -> int:
    """The embedding row of an attribute of the context; a clock shows an epoch second."""
    if isinstance(attribute, LocalTimeAttribute):
        return encode_local_time(attribute, second, time_zone)
    return encode_categorical(attribute, raw)


def encode_local_time(attribute: LocalTimeAttribute, second: int, time_zone: str) -> int:
    """The hour or the weekday of an epoch second in local time, counted from 1."""
    local = datetime.fromtimestamp(second, UTC).astimezone(_zone(time_zone))
    return local.hour + 1 if attribute.part == "hour" else local.isoweekday()


def encode_bag(attribute: BagAttribute, raw: str | Iterable[str] | None) -> list[int]:
    """The buckets, from 0, of the values or n-grams of an attribute: hashes or known values."""
    if raw is None:
        return []
    if isinstance(attribute, TextAttribute):
        assert isinstance(raw, str)
        return [spark_xxhash64(ngram) % attribute.size for ngram in ngrams(attribute, raw)]
    values = sorted(set(raw) - {""})
    if attribute.vocabulary is None:
        return [spark_xxhash64(value) % attribute.size for value in values]
    buckets = {value: 1 + position for position, value in enumerate(attribute.vocabulary)}
    return [buckets.get(value, 0) for value in values]


def ngrams(attribute: TextAttribute, text: str) -> list[str]:
    """The n-grams of a text, the shortest first."""
    words = [word for word in re.split(WORD_SEPARATORS, text.lower()) if word]
    of_words = attribute.analyzer == "word"
    units: Sequence[str] = words if of_words else " ".join(words)
    joint = " " if of_words else ""
    shortest, longest = attribute.ngram_range
    return [
        joint.join(units[start : start + length])
        for length in range(shortest, longest + 1)
        for start in range(len(units) - length + 1)
    ]


@lru_cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def quantize_int4(values: Float32) -> Bytes:
    """Numbers (..., Z) between -1 and 1, Z even, as four bits each: bytes (..., Z / 2)."""
    scaled = np.rint(values * INT4_ZERO_POINT)
    signed = np.clip(scaled, -INT4_ZERO_POINT, INT4_ZERO_POINT - 1).astype(np.int8)
    levels = (signed + INT4_ZERO_POINT).astype(np.uint8)
    return np.asarray(levels[..., ::2] << 4 | levels[..., 1::2])


def dequantize_int4(quantized: Bytes) -> Float32:
    """Bytes (..., Z / 2) of `quantize_int4` as numbers (..., Z)."""
    levels = np.stack((quantized >> 4, quantized & 15), -1).reshape(*quantized.shape[:-1], -1)
    return (levels.astype(np.float32) - np.float32(INT4_ZERO_POINT)) / np.float32(INT4_ZERO_POINT)
