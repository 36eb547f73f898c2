"""Validation of `examples`: a sample is recomputed from the events by brute force.

Slow by design. What events count, and how, is computed by `features/reference.py` alone. The code
that builds the tables shares the codec of histories, and how many days of events counters read
(`counter_input_days`); serving shares the scalar encodings (`encode_categorical`).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from etl.erasure.hashes import hash_user, read_salt
from etl.spec.counters import Counter
from etl.tables import user_schemas
from etl.tables.arrow import snapshot
from etl.tables.declared_columns import number_column
from etl.tables.lake import Lake
from features import reference
from features.encoding.scalar import (
    MISSING_CATEGORY,
    encode_categorical,
    encode_context_category,
    spark_xxhash64,
)
from features.history.codec import decode_rows, delta_decode
from features.reference import MICROS_PER_SECOND, Row
from features.validation_inputs import (
    MAX_ITEM_EVENTS,
    MAX_SHARED_EVENTS,
    SampledRows,
    sample_examples,
)

KEY_COLUMNS = {"user": "user_id", "item": "item_id", "surface": "surface"}  # others: attributes
FLOAT_TOLERANCE = 2.0**-23  # the distance of two 32-bit floats near 1
SMALLEST_FLOAT = 2.0**-126  # below it, 32-bit floats have fewer digits
HistoryEvent = tuple[int, ...]  # visible_ts, item index, surface, type


class Difference(NamedTuple):
    """A column of an example, or its history, that differs from its recomputed value."""

    name: str
    stored: object
    expected: object


def validate_examples(
    lake: Lake, sample_size: int, seed: int
) -> Iterator[tuple[str, list[Difference]]]:
    """Impression ids of sampled examples, each with its differences from the recomputed values.

    What was computed from erased data is left out: counters and attributes of users whose earlier
    data was erased, and counters of keys that users share. Counters of keys without user and item
    are left out, too, where they need more than MAX_SHARED_EVENTS events, and those of keys without
    user for the most frequent items, where all need more than MAX_ITEM_EVENTS. Raises UserError
    where there are no examples.
    """
    examples = sample_examples(lake, sample_size, seed)
    erased_until = lake.latest_day("erased_users")
    erased = _erased_users(lake, {row["user_id"] for row in examples}) if erased_until else set()
    counters = lake.spec.counters.columns
    shared = {counter.column for counter in counters if "user" not in counter.key}
    own = {counter.column for counter in counters} | {"user_known_since"}
    recomputer = ExampleRecomputer(lake, examples)
    for key in lake.spec.counters.keys:
        if not recomputer.rows.can_count(key):
            print(
                f"counters of [{', '.join(key)}] are left out: they need all events of their days, "
                f"{recomputer.rows.num_shared_events:,}, of which {MAX_SHARED_EVENTS:,} can be read"
            )
    if left_out := recomputer.rows.num_uncounted_items:
        print(
            f"counters of items are not recomputed for {left_out} sampled items: of their events, "
            f"{MAX_ITEM_EVENTS:,} can be read"
        )
    for example in tqdm(examples, desc="check", unit="example", disable=None):
        expected, history = recomputer.recompute(example)
        uncounted: set[str] = set()
        if erased_until and example["day"] <= erased_until:
            uncounted = own if example["user_id"] in erased else shared
        differences = [
            Difference(name, example[name], value)
            for name, value in expected.items()
            if name not in uncounted and not _is_equal(example[name], value)
        ]
        stored_history = recomputer.stored_history(example, history)
        if stored_history != history:
            differences.append(_first_difference(stored_history, history))
        yield example["impression_id"], differences


def _erased_users(lake: Lake, users: set[str]) -> set[str]:
    """Those of some users who were erased."""
    salt = read_salt(lake)
    hashes = {hash_user(salt, user): user for user in users}
    table = snapshot(lake, user_schemas.erased_users(lake.spec))
    found = table.read_matching("id_hash", pa.array(list(hashes)), ["id_hash"])
    return {hashes[id_hash] for id_hash in found["id_hash"].to_pylist()}


class ExampleRecomputer:
    """Recomputes examples from the tables that they were built from."""

    def __init__(self, lake: Lake, examples: Sequence[Row]) -> None:
        self.spec, self.rows = lake.spec, SampledRows(lake, examples)

    def recompute(self, example: Row) -> tuple[Row, list[HistoryEvent]]:
        """What an example should hold, by column, and the events that its pointer should select."""
        user, as_of = example["user_id"], example["as_of_ts"]
        user_events = _filter_rows(self.rows.user_events, {"user_id": user})
        impression_type = self.spec.event_codes[self.spec.impression_type]
        impressions = {
            e["impression_id"]: e
            for e in user_events
            if e["type"] == impression_type and e["day"] == example["day"]
        }
        impression = impressions[example["impression_id"]]
        as_of_by_impression = reference.as_of_by_impression(
            impressions.values(), self.spec.request_session_gap, self.spec.day_end(example["day"])
        )
        history = reference.visible_history(user_events, user, as_of)
        user_attributes = reference.attribute_version_at(self.rows.user_versions(user), as_of)
        item = self.rows.item_states[impression["item_id"]]
        is_item_known = item.known_since is not None and item.known_since < as_of
        expected = {
            "as_of_ts": as_of_by_impression[example["impression_id"]],
            "history_length": len(history),
            "item_index": item.item_index,
            "user_known_since": user_attributes
            and user_attributes["valid_from"] // MICROS_PER_SECOND,
            "item_known_since": item.known_since if is_item_known else None,
            **self._recompute_counters(impression, as_of),
        }
        return expected, [
            (
                e["visible_ts"],
                self.rows.item_states[e["item_id"]].item_index,
                e["surface"],
                e["type"],
            )
            for e in history
        ]

    def stored_history(self, example: Row, expected: list[HistoryEvent]) -> list[HistoryEvent]:
        """The events that an example's pointer selects.

        Events that compaction dropped are taken from the `expected` ones: only their number is
        stored.
        """
        rows = self.rows.history_rows(example["user_id"], example["bucket"])
        rows = rows.sort_by([("day", "ascending"), ("chunk", "ascending")]).combine_chunks()
        lengths = rows["events"].to_numpy().astype(np.int64)
        lists = decode_rows(rows, lengths)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        visible_ts = delta_decode(rows["first_ts"].to_numpy(), lists["gaps"], offsets)
        columns = (visible_ts, lists["items"], lists["surfaces"], lists["types"])
        stored = list(zip(*(column.tolist() for column in columns), strict=True))
        dropped = int(pc.sum(rows["dropped"]).as_py() or 0)
        return [*expected[:dropped], *stored][: example["history_length"]]

    def _recompute_counters(self, impression: Row, as_of: int) -> Row:
        """The value of each counter column that can be checked."""
        declared = self.spec.counters
        keys = [key for key in declared.keys if self.rows.can_count(key, impression["item_id"])]
        events_by_key = {
            key: self._events_with_key(self._in_window(key, as_of), impression, key, as_of)
            for key in keys
        }
        return {
            counter.column: self._recompute_counter(counter, events_by_key[counter.key], as_of)
            for counter in declared.columns
            if counter.key in events_by_key
        }

    def _in_window(self, key: tuple[str, ...], as_of: int) -> pa.Table:
        """The events in the longest window that can have a key."""
        events = self.rows.events_of_key(key)
        visible_ts = events["visible_ts"]
        start = as_of - self.spec.counters.longest_window
        in_window = pc.and_(pc.greater_equal(visible_ts, start), pc.less(visible_ts, as_of))
        return events.filter(in_window)

    def _recompute_counter(self, counter: Counter, events: list[Row], as_of: int) -> object:
        """The value of a counter, from the events that have its key."""
        type_, longest = self.spec.event_codes[counter.event], self.spec.counters.longest_window
        match counter.aggregation, counter.period:
            case "count", int(window):
                return reference.count_matching_events(events, {}, type_, as_of, window)
            case "decayed_count", int(half_life):
                return reference.decayed_count(events, type_, as_of, longest, half_life)
            case "time_since_last", None:
                return reference.time_since_last(events, type_, as_of, longest)
            case "distinct_count", int(window):
                values = [(e, self._distinct_value(e, str(counter.input_column))) for e in events]
                return reference.distinct_count(values, type_, as_of, window)
            case function, int(window) if counter.input_column == "dwell":
                return reference.function_of_dwells(events, function, type_, as_of, window)
            case function, int(window):
                column = number_column(self.spec, str(counter.input_column))
                return reference.function_of_values(events, column, function, type_, as_of, window)
        raise AssertionError(f"no reference of {counter.column}")

    def _events_with_key(
        self, events: pa.Table, impression: Row, key: tuple[str, ...], as_of: int
    ) -> list[Row]:
        """Events with the impression's values of a key; none where one of those is unknown."""
        wanted = [self._key_value(impression, part, as_of, as_of) for part in key]
        if None in wanted:
            return []
        columns = [KEY_COLUMNS[part] for part in key if part in KEY_COLUMNS]
        rows = _filter_rows(events, {column: impression[column] for column in columns})

        def has_key(event: Row) -> bool:
            seconds = event["visible_ts"], event["event_ts"] // MICROS_PER_SECOND
            return [self._key_value(event, part, *seconds) for part in key] == wanted

        return [event for event in rows if has_key(event)]

    def _distinct_value(self, event: Row, key_part: str) -> int | None:
        """What counts as the value of an event where distinct values are counted."""
        seconds = event["visible_ts"], event["event_ts"] // MICROS_PER_SECOND
        value = self._key_value(event, key_part, *seconds)
        return spark_xxhash64(value) if isinstance(value, str) else value

    def _key_value(self, event: Row, key_part: str, second: int, occurred: int) -> int | str | None:
        """A part of a counter key: a column of the event, or an attribute as known at a second.

        Clocks show the second `occurred`.
        """
        if key_part in KEY_COLUMNS:
            value: int | str = event[KEY_COLUMNS[key_part]]
            return value
        if key_part in self.spec.distinct_event_attributes:
            raw: str | None = event[f"event_{key_part}"]
            return raw
        if key_part in self.spec.context_counter_keys:
            return self._context_key_value(event, key_part, occurred)
        if key_part in self.spec.user_counter_keys:
            return self._user_key_value(event["user_id"], key_part, second)
        item = self.rows.item_states[event["item_id"]]
        if item.known_since is None or item.known_since >= second:
            return None
        key: int | None = item.keys[f"key_{key_part}"]
        return key

    def _context_key_value(self, event: Row, name: str, occurred: int) -> int | None:
        """The encoded attribute of an event's context; None if it is missing."""
        attribute, raw = self.spec.context_counter_keys[name], event.get(f"ctx_{name}")
        category = encode_context_category(attribute, raw, occurred, self.spec.time_zone)
        return None if category == MISSING_CATEGORY else category

    def _user_key_value(self, user_id: str, name: str, second: int) -> int | None:
        """The encoded attribute of a user as of a second; None if it is not known."""
        version = reference.attribute_version_at(self.rows.user_versions(user_id), second)
        raw = version[f"attr_{name}"] if version else None
        attribute = self.spec.user_counter_keys[name]
        return None if raw is None else encode_categorical(attribute, raw)


def _is_equal(stored: object, expected: object) -> bool:
    """Whether two values are equal; a number with a fraction is stored as a 32-bit float."""
    if isinstance(stored, float) and isinstance(expected, float):
        return math.isclose(stored, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=SMALLEST_FLOAT)
    return stored == expected


def _first_difference(stored: list[HistoryEvent], expected: list[HistoryEvent]) -> Difference:
    """The first position at which two histories differ."""
    pairs = zip(stored, expected, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Difference(
        "history", f"{stored[same : same + 1]} at {same}", f"{expected[same : same + 1]}"
    )


def _filter_rows(table: pa.Table, equals: Row) -> list[Row]:
    """Rows whose columns have the given values."""
    for name, value in equals.items():
        table = table.filter(pc.equal(table[name], value))
    rows: list[Row] = table.to_pylist()
    return rows
