"""Point-in-time aggregations against a loop implementation, and what they may not depend on."""

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etl.array_types import Float64, Int64
from etl.spec import load_spec
from etl.spec.counters import FUNCTIONS
from features import reference
from features.counters.aggregations import (
    DistinctCount,
    EventRows,
    KeyedEvents,
    NumericAggregation,
    count_all_before,
)
from features.counters.distinct_counts import MISSING_ENTRY, entries_of
from features.counters.numeric_columns import fixed_point_of
from features.schema import feature_schema
from tests.oracle.disorder import SPEC

DAY = 86_400

WINDOWS, TYPES, LONGEST = (5, 40), (1, 2), 40
YEAR = 365 * DAY
HALF_LIVES = (1, 7, 1_000_000)
COLUMNS: tuple[str, ...] = ("dwell", "value")
DISTINCT = tuple(DistinctCount("item", type_) for type_ in TYPES)
NUMERIC = tuple(NumericAggregation(f, c, t) for f in FUNCTIONS for c in COLUMNS for t in TYPES)
# Key, second, type, dwell (ms), value, item.
Event = tuple[int, int, int, float | None, float | None, int | None]
Row = dict[str, Any]
dwells = st.none() | st.floats(0, 1e5) | st.sampled_from((0.0, 0.5, 1.5, 1e8, 1e299))
values = st.none() | st.floats(-1e5, 1e5) | st.sampled_from((0.0, -5e-5, 2.5e-4, -2e9, 1e299))
items = st.none() | st.integers(0, 9) | st.integers(-(2**63), 2**63 - 1)
events = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 90), st.integers(1, 3), dwells, values, items),
    max_size=60,
)
queries = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), min_size=1, max_size=20)


def align(events: list[Event], queries: list[tuple[int, int]], window: int) -> KeyedEvents:
    key, ts, type_ = (np.array([e[i] for e in events], np.int64) for i in range(3))
    numbers = {}
    for column, name in enumerate(COLUMNS, 3):
        stored = np.array([np.nan if e[column] is None else e[column] for e in events], np.float64)
        numbers[name] = fixed_point_of(name).round(stored)
    query_key, query_ts = np.array(queries, np.int64).reshape(-1, 2).T
    items = [event[5] for event in events]
    hashed = entries_of(np.array([item or 0 for item in items], np.int64))
    is_missing = np.array([item is None for item in items], bool)
    entries = {"item": np.where(is_missing, MISSING_ENTRY, hashed)}
    rows = EventRows.of_events(key, ts, type_, numbers, entries)
    return KeyedEvents.align(rows, query_key, query_ts, window)


def aggregate(aligned: KeyedEvents, windows: tuple[int, ...] = WINDOWS) -> Float64:
    """All aggregations of each query, side by side; the longest window is the last."""
    return np.concatenate(
        (
            aligned.counts(windows, TYPES),
            aligned.decayed_counts(HALF_LIVES, TYPES, windows[-1]),
            aligned.seconds_since_last(TYPES, windows[-1]),
            aligned.functions_of_numbers(windows, NUMERIC),
            aligned.distinct_counts(windows, DISTINCT),
        ),
        axis=1,
    )


def of_number(
    column: str, rows: list[Row], function: str, type_: int, now: int, window: int
) -> float | None:
    if column == "dwell":
        return reference.function_of_dwells(rows, function, type_, now, window)
    return reference.function_of_values(rows, column, function, type_, now, window)


def expected_values(
    events: list[Event], key: int, now: int, windows: tuple[int, ...] = WINDOWS
) -> list[float]:
    names = ("key", "visible_ts", "type", "dwell_ms", "value", "item")
    rows: list[Row] = [dict(zip(names, e, strict=True)) for e in events if e[0] == key]
    values: list[float | None] = [
        *(reference.count_matching_events(rows, {}, c, now, w) for w in windows for c in TYPES),
        *(reference.decayed_count(rows, c, now, windows[-1], h) for h in HALF_LIVES for c in TYPES),
        *(reference.time_since_last(rows, c, now, windows[-1]) for c in TYPES),
        *(of_number(n, rows, f, c, now, w) for w in windows for f, n, c in NUMERIC),
        *(
            reference.distinct_count([(row, row["item"]) for row in rows], c, now, w)
            for w in windows
            for _, c in DISTINCT
        ),
    ]
    return [np.nan if value is None else value for value in values]


@settings(max_examples=300)
@given(events, queries)
@example(
    [(0, second, 1, 1e299, -1e299, second) for second in range(64)],
    [(0, second) for second in range(70)],
)
def test_aggregations_equal_those_of_a_loop(
    events: list[Event], queries: list[tuple[int, int]]
) -> None:
    aligned = align(events, queries, LONGEST)
    expected = [expected_values(events, key, now) for key, now in queries]
    np.testing.assert_allclose(aggregate(aligned), expected, rtol=1e-9, atol=0)
    key, ts = (np.array([e[i] for e in events], np.int64) for i in range(2))
    query_key, query_ts = np.array(queries, np.int64).T
    totals = count_all_before(key, ts, query_key, query_ts)
    assert totals.tolist() == [sum(k == q and t < now for k, t, *_ in events) for q, now in queries]


@settings(max_examples=50)
@given(events, queries)
def test_aggregations_of_a_year_equal_those_of_a_loop(
    events: list[Event], queries: list[tuple[int, int]]
) -> None:
    unit = YEAR // LONGEST
    windows = 1 + 5 * unit, YEAR
    events = [(key, ts * unit, *others) for key, ts, *others in events]  # type: ignore[misc]
    queries = [(key, now * unit) for key, now in queries]
    expected = [expected_values(events, key, now, windows) for key, now in queries]
    actual = aggregate(align(events, queries, YEAR), windows)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-300)


def test_a_count_that_no_integer_of_the_table_can_hold_is_the_largest_one() -> None:
    key, ts, type_ = (np.array(values, np.int64) for values in ([0, 0], [1, 2], [1, 1]))
    rows = EventRows(key, ts, type_, np.array([2**31 - 2, 2], np.int64))
    aligned = KeyedEvents.align(rows, key, ts + 1, LONGEST)
    assert aligned.counts((LONGEST,), (1,)).tolist() == [[2**31 - 2], [2**31 - 1]]


@settings(max_examples=200)
@given(events, queries, events, st.randoms(use_true_random=False))
def test_nothing_outside_a_window_changes_a_bit_of_an_aggregation(
    events: list[Event], queries: list[tuple[int, int]], others: list[Event], rng: random.Random
) -> None:
    """Leak test: later events, events before the window, other keys, other queries, any order."""
    key, now = queries[0]
    before = aggregate(align(events, queries[:1], LONGEST))
    outside = [e for e in others if e[0] != key or not now - LONGEST <= e[1] < now]
    disordered = rng.sample(events + outside, len(events + outside))
    after = aggregate(align(disordered, queries, LONGEST))
    assert before[0].tobytes() == after[0].tobytes()


def test_decayed_counts_do_not_depend_on_other_events_to_the_last_bit() -> None:
    """Tables that are built in parts hold the same events beside fewer others."""
    rng, window, half_lives = np.random.default_rng(0), 5000, (7, 333, 1_000_000)

    def sums(key: Int64, second: Int64) -> bytes:
        queries = np.arange(window, 2 * window, 97)
        same_key, type_ = np.full(len(queries), 5), np.ones_like(key)
        rows = EventRows.of_events(key, second, type_)
        aligned = KeyedEvents.align(rows, same_key, queries, window)
        return aligned.decayed_counts(half_lives, (1,), window).tobytes()

    second = rng.integers(0, 2 * window, 2000)
    alone = sums(np.full(2000, 5), second)
    for num_keys in (1, 2, 5):
        other_key, other_second = rng.integers(0, num_keys, 999), rng.integers(0, 9999, 999)
        later = np.full(100, 3 * window)
        key = np.concatenate((other_key, np.full(2100, 5)))
        assert sums(key, np.concatenate((other_second, second, later))) == alone


@pytest.mark.parametrize("half_life", [1, 600, DAY, 1000 * DAY])
def test_decayed_counts_of_400_days_neither_overflow_nor_lose_digits(half_life: int) -> None:
    """Against exact sums, also where almost all events are older than the window."""
    rng, window = np.random.default_rng(half_life), 400 * DAY
    events = np.sort(rng.integers(0, 3 * window, 20_000))
    queries = rng.integers(0, 3 * window, 50)
    queries = np.concatenate((queries, events[-50:] + 1, events[:50] + window))
    one = np.ones_like
    rows = EventRows.of_events(events, events, one(events))
    aligned = KeyedEvents.align(rows, one(queries), queries, window)
    assert aligned.counts((window,), (1,)).sum() == 0  # keys are the seconds of the events
    rows = EventRows.of_events(one(events), events, one(events))
    aligned = KeyedEvents.align(rows, one(queries), queries, window)
    sums = aligned.decayed_counts((half_life,), (1,), window)[:, 0]
    for query, value in zip(queries.tolist(), sums.tolist(), strict=True):
        ages = query - events[(events >= query - window) & (events < query)]
        expected = math.fsum(np.exp2(-ages / half_life))
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_model_inputs_are_logarithms_and_rates_of_counters(tmp_path: Path) -> None:
    """Each number has the key of its counter; those of no such event are missing."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = load_spec(tmp_path / "spec.yaml")
    features, rng = feature_schema(spec), np.random.default_rng(0)
    counters = rng.exponential(10, (4, len(features.counters))).astype(np.float32)
    counters[0] = np.nan
    inputs = dict(
        zip(
            features.counter_transform.column_names,
            features.counter_transform(counters).T,
            strict=True,
        )
    )
    raw = dict(zip(features.counters, counters.T, strict=True))
    for name, values in inputs.items():
        shown = re.sub("_(click|buy)_", "_shown_", name.removeprefix("rate_"))
        expected = (
            np.log((raw[name.removeprefix("rate_")] + 0.1) / (raw[shown] + 1))
            if name.startswith("rate_")
            else np.log(1 + raw[name])
        )
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
        assert np.isnan(values[0])
    rates = {name for name in inputs if name.startswith("rate_")}
    assert rates == {
        f"rate_{prefix}_{'_'.join(key)}_{event}_{period}"
        for prefix, periods in (("cnt", ("1h", "1d")), ("decayed", ("10m", "2d")))
        for key in spec.counters.keys
        for event in ("click", "buy")
        for period in periods
    }
    assert len(features.numeric_keys) == len(features.numeric_columns)
    for name, key in zip(features.numeric_columns, features.numeric_keys, strict=True):
        if not key:
            assert name == "ctx_screen"
            continue
        kind, events = r"(rate_)?[a-z]+_(count_)?", "(shown|click|buy|look)"
        column = "((dwell|value|quantity|screen|user|item|surface|device|hour|plan|brand|coupon)_)?"
        assert re.match(rf"{kind}{column}{'_'.join(key)}_{events}(_|$)", name)
