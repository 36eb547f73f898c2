"""Online features: the cost of counters with many recent events, and consistency with tables.

The cost of one event and one ranking is compared between a store with millions of events in the
current hour and one with none, in CPU time, because disk waits would hide the difference.
Consistency replays logged requests and compares what the store returns with `examples`.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import BenchmarkResult
from benchmarks.system.request_load import sample_requests
from benchmarks.system.serving_args import ServingArgs
from etl.spec.units import MICROS
from etl.tables.lake import Lake
from etl.tables.uri import local_cache_path
from features.counters.distinct_counts import entries_of
from ranking.feature_store.consistency import ConsistencyReport, check_consistency
from ranking.feature_store.counter_keys import item_key_values
from ranking.feature_store.counter_rows import COUNTER_LEVELS, CountedEvents
from ranking.feature_store.events import Event, ingest_event
from ranking.feature_store.fetch import FeatureFetcher
from ranking.feature_store.items import registered_item_records
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.feature_store.request import RankRequest
from ranking.feature_store.store import FeatureStore, open_store
from ranking.feature_store.wal import feature_store_pointer
from ranking.registry.manifest import read_manifest
from ranking.registry.ranker import ExportedRanker, live_version, load_ranker
from ranking.student.config import InputLimits

EVENTS, CANDIDATES, ROUNDS, WARMUP_ROUNDS = 3_000_000, 500, 110, 10
HALF_HOUR = 1800


@dataclass
class CpuSeconds:
    """CPU seconds of each round: an event and its commit, fetching features, and ranking."""

    event: list[float]
    features: list[float]
    ranking: list[float]

    def median_ms(self, *parts: str) -> float:
        """Median milliseconds of the sum of some parts, without the warm-up rounds."""
        rounds = sum(np.array(getattr(self, part)[WARMUP_ROUNDS:]) for part in parts)
        return 1e3 * float(np.median(rounds))


def measure_counter_cost(args: ServingArgs, result: BenchmarkResult) -> None:
    """`counter_cost_ratio`, half an hour after the store's data ends."""
    lake = args.open_lake()
    ranker = load_ranker(live_version(lake.root, args.surface))
    requests = sample_requests(lake, args.surface, args.day, CANDIDATES, ROUNDS)
    live_folder = feature_store_pointer(lake.root).live_folder
    assert live_folder
    with tempfile.TemporaryDirectory() as folder:
        stores = []
        for name in ("empty", "filled"):
            Path(folder, name).mkdir()
            source = open_store(local_cache_path(live_folder), lake.spec)
            source.env.copy(str(Path(folder, name)))
            source.close()
            stores.append(open_store(Path(folder, name), lake.spec))
        now = stores[0].data_until + HALF_HOUR
        requests = [replace(request, as_of=now) for request in requests]
        insert_events(stores[1], requests, args.surface)
        empty, filled = measure_costs(stores, ranker, requests)
        for store in stores:
            store.close()
    add_cost_rows(empty, filled, result)


def insert_events(store: FeatureStore, requests: Sequence[RankRequest], surface: str) -> None:
    """Count events of other users on the surface and the candidates, in the last half hour."""
    rng, counters, spec = np.random.default_rng(0), store.counters, store.spec
    items = pa.array(sorted({item for request in requests for item in request.candidates}))
    second = store.data_until + HALF_HOUR - 1 - rng.integers(0, HALF_HOUR, EVENTS)
    item = items.take(pa.array(rng.integers(0, len(items), EVENTS)))
    item_records = registered_item_records(store, pa.chunked_array([item]))
    key_values = item_key_values(store.layout, item_records, second)
    key_values["surface"] = np.full(EVENTS, spec.surface_codes[surface])
    types = rng.choice(sorted(counters.layout.event_types), EVENTS)
    numbers = {
        name: rng.integers(0, 60_000, EVENTS) for name in counters.aggregations.input_columns
    }
    entries = {
        name: entries_of(rng.integers(0, 1000, EVENTS))
        for name in counters.aggregations.distinct_columns
    }
    events = CountedEvents(second, types, numbers, entries)
    for table, records in counters.build_records(key_values, events):
        with store.write_transaction() as txn:
            if table == COUNTER_LEVELS[0].table:  # append to the earlier hours
                txn.put_many(table, [(key, txn.get(table, key) + rows) for key, rows in records])
            else:
                txn.put_many(table, records)


def measure_costs(
    stores: Sequence[FeatureStore], ranker: ExportedRanker, requests: Sequence[RankRequest]
) -> tuple[CpuSeconds, CpuSeconds]:
    """CPU seconds with each of two stores, their rounds interleaved."""
    costs = CpuSeconds([], [], []), CpuSeconds([], [], [])
    type_ = next(iter(stores[0].spec.counters.events))
    now = (stores[0].data_until + HALF_HOUR) * MICROS["s"]
    for number, request in enumerate(requests):
        event = Event(
            f"bench-{number}", request.user, request.candidates[0], request.surface, type_, now, now
        )
        for store, store_costs in zip(stores, costs, strict=True):
            start = time.process_time()
            with store.write_transaction() as txn:
                ingest_event(store, txn, event)
            committed = time.process_time()
            inputs = FeatureFetcher(store, ranker.manifest.input_limits)(request)
            fetched = time.process_time()
            ranker.rank(inputs.requests, inputs.candidates, inputs.bids)
            ranked = time.process_time()
            store_costs.event.append(committed - start)
            store_costs.features.append(fetched - committed)
            store_costs.ranking.append(ranked - fetched)
    return costs


def add_cost_rows(empty: CpuSeconds, filled: CpuSeconds, result: BenchmarkResult) -> None:
    """Add the cost ratio of the filled to the empty store, with and without the ranking."""
    total_empty, total_filled = (
        costs.median_ms("event", "features", "ranking") for costs in (empty, filled)
    )
    store_empty, store_filled = (costs.median_ms("event", "features") for costs in (empty, filled))
    result.rows += [
        (
            f"an event and a ranking, {EVENTS:,} events this hour",
            f"{total_filled:.1f} ms, {total_filled / total_empty:.2f} times the empty store",
            f"{total_empty:.1f} ms with the empty store",
            "<= 1.2 times",
        ),
        (
            "the same without the ranker's programs",
            f"{store_filled:.1f} ms: event {filled.median_ms('event'):.2f}, "
            f"features {filled.median_ms('features'):.1f}",
            f"{store_empty:.1f} ms: {empty.median_ms('event'):.2f}, "
            f"{empty.median_ms('features'):.1f}",
            "",
        ),
    ]
    result.record("counter_cost_ratio", total_filled / total_empty, "")
    result.record("counter_cost_without_programs_ratio", store_filled / store_empty, "")


def measure_online_offline(args: ServingArgs, result: BenchmarkResult) -> None:
    """`online_offline_differences` in the requests of a day, and of earlier days if needed."""
    lake = args.open_lake()
    manifest = read_manifest(live_version(lake.root, args.surface))
    reports = list(
        _compare_by_day(lake, args.day, manifest.sequence, manifest.input_limits, args.requests)
    )
    differences = sum(len(report.mismatches) for report in reports)
    requests = sum(report.num_requests for report in reports)
    compared = f"{requests:,} requests of {len(reports)} days"
    result.rows.append(("online against tables", f"{differences} differences", compared, "0"))
    reason = f"no request before {args.day} or on it has a day before it"
    result.record("online_offline_differences", differences if requests else None, reason)
    result.figures["online_offline_requests"] = requests


def _compare_by_day(
    lake: Lake, last_day: date, sequence: str, limits: InputLimits, num_requests: int
) -> Iterator[ConsistencyReport]:
    """Reports of days, newest first; each posts a day's events to a store of the days before."""
    first_day, _ = lake.day_range("examples")
    day, remaining = last_day, num_requests
    while remaining > 0 and day > first_day:
        with tempfile.TemporaryDirectory() as folder:
            lengths = HistoryLengths(sequence, limits.max_length, limits.teacher_history_length)
            start = lake.spec.day_start(day)
            store = build_feature_store(lake, Path(folder, "store"), start, lengths)
            report = check_consistency(store, lake, day, limits, remaining)
            store.close()
        yield report
        remaining -= report.num_requests
        day -= timedelta(days=1)
