"""The rows of counters: events and impressions, once for each prefix of their keys.

A prefix is the first part of a key, such as the user. Keys with the same prefix are counted
together, so that rows are moved once per prefix and not once per key.
"""

import functools
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.spec.counters import CounterKey
from etl.spec.model import DataSpec
from etl.tables.declared_columns import number_column
from features.counters.distinct_counts import (
    MAX_RANK,
    MISSING_ENTRY,
    NUM_REGISTERS,
    RANKS,
    REGISTER_BITS,
)
from features.counters.numeric_columns import fixed_point_of

HOT_EVENTS = 1_000_000  # from so many events on, a prefix is hot
PREFIX = ("prefix_part", "prefix")  # number and value of the first part of a key


@dataclass(frozen=True)
class KeyPrefixes:
    """The keys of a spec by prefix; `keys` have numbers from 0 on, and `parts` are the prefixes."""

    keys: tuple[CounterKey, ...]
    parts: tuple[str, ...]

    @classmethod
    def from_spec(cls, spec: DataSpec) -> "KeyPrefixes":
        """The keys that a spec declares."""
        keys = spec.counters.keys
        return cls(keys, tuple(dict.fromkeys(("user", *(key[0] for key in keys)))))

    @property
    def user_part(self) -> int:
        """The number of the part `user`, which is always there."""
        return self.parts.index("user")

    def key_numbers(self, prefix_part: int) -> list[int]:
        """The numbers of the keys that begin with a part."""
        return [n for n, key in enumerate(self.keys) if key[0] == self.parts[prefix_part]]

    @property
    def hash_columns(self) -> list[str]:
        """Columns with the hashes of the keys of one prefix: `key_hash_0`, …."""
        most_keys = max(len(self.key_numbers(number)) for number in range(len(self.parts)))
        return [f"key_hash_{position}" for position in range(most_keys)]

    def explode(self, rows: DataFrame, *columns: Column | str) -> DataFrame:
        """A row for each row and each prefix that it has.

        `prefix_part`, `prefix`, the hashes of its keys (null where a part is missing), and the
        columns.
        """
        of_parts = []
        for prefix_part, part in enumerate(self.parts):
            hashes = [_hash_key(self.keys[number]) for number in self.key_numbers(prefix_part)]
            padding = [F.lit(None)] * (len(self.hash_columns) - len(hashes))
            named = zip(self.hash_columns, (*hashes, *padding), strict=True)
            of_parts.append(
                F.struct(
                    F.lit(prefix_part).alias("prefix_part"),
                    F.col(f"key_{part}").alias("prefix"),
                    *[value.cast("bigint").alias(name) for name, value in named],
                )
            )
        exploded = rows.select(*columns, F.inline(F.array(*of_parts)))
        return exploded.filter("prefix IS NOT NULL")


def find_hot_prefixes(spec: DataSpec, events: DataFrame, min_events: int = HOT_EVENTS) -> DataFrame:
    """The prefixes other than users with at least so many events; few rows."""
    prefixes = KeyPrefixes.from_spec(spec)
    rows = prefixes.explode(events, "type").filter(F.col("prefix_part") != prefixes.user_part)
    return rows.groupBy(*PREFIX).count().filter(F.col("count") >= min_events).select(*PREFIX)


def prefixes_to_keys(prefixes: KeyPrefixes, rows: DataFrame) -> DataFrame:
    """A row for each key of each row of `KeyPrefixes.explode`: `key`, `key_hash`, other columns."""
    pairs = [
        F.struct(
            F.when(F.col("prefix_part") == prefix_part, F.lit(number)).alias("key"),
            F.col(name).alias("key_hash"),
        )
        for prefix_part in range(len(prefixes.parts))
        for name, number in zip(
            prefixes.hash_columns, prefixes.key_numbers(prefix_part), strict=False
        )
    ]
    others = [name for name in rows.columns if name not in (*PREFIX, *prefixes.hash_columns)]
    keys = rows.select(*others, F.inline(F.array(*pairs)))
    return keys.filter("key IS NOT NULL AND key_hash IS NOT NULL")


def in_fixed_point(spec: DataSpec, name: str) -> Column:
    """A number of `events` as integers, as `FixedPoint.round` has them; null where missing."""
    fixed_point, stored = fixed_point_of(name), F.col(number_column(spec, name))
    limit = F.lit(fixed_point.limit)
    limited = F.greatest(F.least(stored, limit), -limit)
    is_finite = F.abs(stored) < F.lit(float("inf"))  # of NaN, which is the largest number, too
    return F.when(is_finite, F.rint(limited * fixed_point.scale).cast("bigint"))


def distinct_entry(part: str) -> Column:
    """The entry of a part of keys, as `features.counters.distinct_counts.entries_of` returns it."""
    value = F.col("item_hash" if part == "item" else f"key_{part}")
    hashed = F.xxhash64(value)
    rest = F.shiftrightunsigned(hashed, REGISTER_BITS)
    rank = F.least(F.bit_count(rest.bitwiseAND(-rest) - 1) + 1, F.lit(MAX_RANK))
    register = hashed.bitwiseAND(NUM_REGISTERS - 1)
    entry = F.when(value.isNotNull(), register * RANKS + rank).otherwise(MISSING_ENTRY)
    return entry.cast("smallint")


def number_field(name: str) -> str:
    """The field of a number in the rows of counters, beside `ts`, `type` and others."""
    return f"number_{name}"


def entry_field(part: str) -> str:
    """The field of the entries of a part of keys, or an attribute of events."""
    return f"entry_{part}"


def _hash_key(key: CounterKey) -> Column:
    """One integer for a combination of key parts; null where one of them is missing."""
    columns = [F.col(f"key_{part}") for part in key]
    is_complete = functools.reduce(Column.__and__, [column.isNotNull() for column in columns])
    return F.when(is_complete, columns[0] if len(columns) == 1 else F.xxhash64(*columns))
