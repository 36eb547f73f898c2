"""Validation of `examples`: a sample is recomputed from the events by brute force.

Slow by design. What events count, and how, is computed by `features/reference.py` alone. The code
that builds the tables shares the codec of histories, `run_starts`, and how many days of events
counters read (`counter_input_days`); serving shares the scalar encodings (`encode_categorical`).
"""

import math
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from functools import cached_property
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from etl.erasure.hashes import hash_user, read_salt
from etl.errors import UserError
from etl.spec.counters import Counter
from etl.spec.units import date_range
from etl.tables import schemas, user_schemas
from etl.tables.arrow import Snapshot, snapshot
from etl.tables.declared_columns import counted_columns, number_column
from etl.tables.lake import Lake
from features import reference
from features.encoding.scalar import (
    MISSING_CATEGORY,
    encode_categorical,
    encode_context_category,
    spark_xxhash64,
)
from features.history.codec import decode_rows, delta_decode
from features.ragged import run_starts
from features.reference import MICROS_PER_SECOND, Row
from features.schema import counter_input_days

EVENT_COLUMNS = (
    "event_id", "user_id", "item_id", "surface", "type", "event_ts", "ingest_ts", "visible_ts",
    "request_id", "impression_id", "dwell_ms", "value", "day",
)  # fmt: skip
KEY_COLUMNS = {"user": "user_id", "item": "item_id", "surface": "surface"}  # others: attributes
FLOAT_TOLERANCE = 2.0**-23  # the distance of two 32-bit floats near 1
SMALLEST_FLOAT = 2.0**-126  # below it, 32-bit floats have fewer digits
HistoryEvent = tuple[int, ...]  # visible_ts, item index, surface, type


class Difference(NamedTuple):
    """A column of an example, or its history, that differs from its recomputed value."""

    name: str
    stored: object
    expected: object


class ItemState(NamedTuple):
    """An item's index, the second since when it is known (None if never), and its counter keys."""

    item_index: int
    known_since: int | None
    keys: Row


def validate_examples(
    lake: Lake, sample_size: int, seed: int
) -> Iterator[tuple[str, list[Difference]]]:
    """Impression ids of sampled examples, each with its differences from the recomputed values.

    What was computed from erased data is left out: counters and attributes of users whose earlier
    data was erased, and counters of keys that users share. Raises UserError where there are no
    examples.
    """
    examples = sample_examples(lake, sample_size, seed)
    erased_until = lake.latest_day("erased_users")
    erased_hashes = _erased_hashes(lake)
    salt = read_salt(lake) if erased_hashes else ""
    counters = lake.spec.counters.columns
    shared = {counter.column for counter in counters if "user" not in counter.key}
    own = {counter.column for counter in counters} | {"user_known_since"}
    recomputer = ExampleRecomputer(lake, [row["day"] for row in examples])
    for example in tqdm(examples, desc="check", unit="example", disable=None):
        expected, history = recomputer.recompute(example)
        uncounted: set[str] = set()
        if erased_until and example["day"] <= erased_until:
            is_erased = hash_user(salt, example["user_id"]) in erased_hashes
            uncounted = own if is_erased else shared
        differences = [
            Difference(name, example[name], value)
            for name, value in expected.items()
            if name not in uncounted and not _is_equal(example[name], value)
        ]
        stored_history = recomputer.stored_history(example, history)
        if stored_history != history:
            differences.append(_first_difference(stored_history, history))
        yield example["impression_id"], differences


def _erased_hashes(lake: Lake) -> set[str]:
    """The hashes of all erased users."""
    schema = user_schemas.erased_users(lake.spec)
    if not lake.exists(schema.name):
        return set()
    return set(snapshot(lake, schema).read(["id_hash"])["id_hash"].to_pylist())


def sample_examples(lake: Lake, sample_size: int, seed: int) -> list[Row]:
    """Examples drawn uniformly without replacement; all of them if there are fewer."""
    table = snapshot(lake, schemas.examples(lake.spec))
    paths = [path for path, _ in table.files]
    sizes = [table.single_file(path).read(["impression_id"]).num_rows for path in paths]
    total = sum(sizes)
    if not total:
        raise UserError(f"there are no examples in {lake.root}; run `gemline features examples`")
    rng = np.random.default_rng(seed)
    drawn = np.sort(rng.choice(total, min(sample_size, total), replace=False))
    examples: list[Row] = []
    for path, (start, stop) in zip(paths, pairwise(np.cumsum([0, *sizes])), strict=True):
        positions = drawn[(drawn >= start) & (drawn < stop)] - start
        if len(positions):
            rows = table.single_file(path).read()
            examples += rows.take(pa.array(positions)).to_pylist()
    return examples


class ExampleRecomputer:
    """Recomputes examples of some days from the tables that they were built from."""

    def __init__(self, lake: Lake, days: Sequence[date]) -> None:
        self.lake, self.spec = lake, lake.spec
        self._read_versions: dict[str, list[Row]] = {}
        self._events, self._history = self._snapshot("events"), self._snapshot("history")
        self._event_columns = list(dict.fromkeys((*EVENT_COLUMNS, *counted_columns(self.spec))))
        first_day = min(days) - timedelta(days=counter_input_days(self.spec))
        self._recent_events = self._events.read(
            self._event_columns, day=set(date_range(first_day, max(days)))
        )

    def recompute(self, example: Row) -> tuple[Row, list[HistoryEvent]]:
        """What an example should hold, by column, and the events that its pointer should select."""
        user, as_of = example["user_id"], example["as_of_ts"]
        events = self._events.read(self._event_columns, bucket=example["bucket"])
        user_events = _filter_rows(events, {"user_id": user})
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
        user_attributes = reference.attribute_version_at(self._user_versions(user), as_of)
        item = self._item_states[impression["item_id"]]
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
            (e["visible_ts"], self._item_states[e["item_id"]].item_index, e["surface"], e["type"])
            for e in history
        ]

    def stored_history(self, example: Row, expected: list[HistoryEvent]) -> list[HistoryEvent]:
        """The events that an example's pointer selects.

        Events that compaction dropped are taken from the `expected` ones: only their number is
        stored.
        """
        rows = self._history.read(bucket=example["bucket"])
        rows = rows.filter(pc.equal(rows["user_id"], example["user_id"]))
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
        """The value of each counter column."""
        declared = self.spec.counters
        visible_ts = self._recent_events["visible_ts"]
        in_longest_window = pc.and_(
            pc.greater_equal(visible_ts, as_of - declared.longest_window),
            pc.less(visible_ts, as_of),
        )
        recent = self._recent_events.filter(in_longest_window)
        events_by_key = {
            key: self._events_with_key(recent, impression, key, as_of) for key in declared.keys
        }
        return {
            counter.column: self._recompute_counter(counter, events_by_key[counter.key], as_of)
            for counter in declared.columns
        }

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
        item = self._item_states[event["item_id"]]
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
        version = reference.attribute_version_at(self._user_versions(user_id), second)
        raw = version[f"attr_{name}"] if version else None
        attribute = self.spec.user_counter_keys[name]
        return None if raw is None else encode_categorical(attribute, raw)

    def _user_versions(self, user_id: str) -> list[Row]:
        """A user's versions, with the attributes that are parts of counter keys."""
        if user_id not in self._read_versions:
            table, rows_of_users = self._versions_by_user
            rows = rows_of_users.get(user_id, range(0))
            self._read_versions[user_id] = table.slice(rows.start, len(rows)).to_pylist()
        return self._read_versions[user_id]

    @cached_property
    def _versions_by_user(self) -> tuple[pa.Table, dict[str, range]]:
        """The versions of all users, sorted by user, and the rows of each."""
        names = [f"attr_{name}" for name in self.spec.user_counter_keys]
        columns = ["user_id", "valid_from", "day", *names]
        table = snapshot(self.lake, schemas.attributes(self.spec, "user")).read(columns)
        table = table.sort_by("user_id").combine_chunks()
        users = table["user_id"].combine_chunks()
        starts = run_starts(users)
        rows = map(range, starts.tolist(), [*starts[1:].tolist(), len(users)])
        return table, dict(zip(users.take(pa.array(starts)).to_pylist(), rows, strict=True))

    @cached_property
    def _item_states(self) -> dict[str, ItemState]:
        """Each item's index and first attributes, by item id."""
        first_versions: dict[int, Row] = {}
        versions = self._snapshot("item_versions").read().to_pylist()
        for version in sorted(versions, key=lambda v: (v["valid_from"], v["day"])):
            first_versions.setdefault(version["item_index"], version)
        states = {}
        for row in self._snapshot("items").read().to_pylist():
            first = first_versions.get(row["item_index"])
            known_since = first["valid_from"] // MICROS_PER_SECOND if first else None
            states[row["item_id"]] = ItemState(row["item_index"], known_since, first or {})
        return states

    def _snapshot(self, name: str) -> Snapshot:
        return snapshot(self.lake, schemas.table_schema(self.spec, name))


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
