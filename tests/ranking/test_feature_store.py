"""Online features equal offline features, and invariants of the feature store."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.units import DAY
from etl.tables import arrow, model_schemas, schemas
from etl.tables.lake import Lake
from etl.tables.schemas import RESERVED_ITEM_INDICES
from features.schema import ITEM_TABLE
from ranking.feature_store import attributes, events
from ranking.feature_store.attributes import (
    AttributeVersion,
    upsert_attributes,
    upsert_item,
    write_user_versions,
)
from ranking.feature_store.consistency import (
    check_consistency,
    mismatched_arrays,
    numeric_tolerance,
)
from ranking.feature_store.events import Event, ingest_event, validate_event
from ranking.feature_store.fetch import FeatureFetcher, RankInputs
from ranking.feature_store.items import read_item_records
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.feature_store.request import RankRequest
from ranking.feature_store.storage import (
    BID_DTYPE,
    TEACHER_HISTORY_DTYPE,
    UNKNOWN,
    Txn,
    group_rows,
    latest_versions,
    storage_key,
    storage_keys,
)
from ranking.feature_store.store import (
    MAX_REQUEST_AGE,
    METADATA_KEY,
    FeatureStore,
    StoreMetadata,
    create_store,
    open_store,
)
from ranking.inputs.recency_features import RecencyArrays
from ranking.scoring.bids import load_bids
from ranking.student.config import InputLimits
from tests.conftest import FIRST, LAST
from tests.ranking.conftest import EVE
from tests.small_pipeline import DAYS
from training.data.reader import ExampleReader

INPUT_LIMITS = InputLimits(
    max_length=40, encoded_events=12, teacher_history_length=6, user_hash_buckets=50
)
LENGTH = 40
DELAY = 300


def store_until(lake: Lake, day: date, limits: InputLimits, folder: Path) -> FeatureStore:
    """A store with all data up to the day before."""
    lengths = HistoryLengths("behaviour", limits.max_length, limits.teacher_history_length)
    return build_feature_store(lake, folder, lake.spec.day_start(day), lengths)


def test_online_features_of_logged_requests_equal_the_offline_features(
    gem_lake: Lake, tmp_path: Path
) -> None:
    store = store_until(gem_lake, LAST, INPUT_LIMITS, tmp_path / "store")
    report = check_consistency(store, gem_lake, LAST, INPUT_LIMITS)
    items = ExampleReader.latest(gem_lake, "behaviour", LENGTH).items
    index = np.arange(RESERVED_ITEM_INDICES, len(items))
    online = fetch(
        store, "u1", items.item_ids.take(pa.array(index)).to_pylist(), store.data_until
    ).bids
    store.close()
    assert report.num_requests > 100 and not report.mismatches
    times = np.full(len(index), store.data_until * MICRO)
    offline = load_bids(gem_lake, items, LAST).as_of(index, times)
    assert online.goals == offline.goals and (online.target_roas > 0).sum() > 3
    np.testing.assert_array_equal(online.target_roas, offline.target_roas)
    np.testing.assert_array_equal(online.bids, offline.bids)


def test_embeddings_that_are_not_visible_yet_hide_none_that_are(
    gem_lake: Lake, tmp_path: Path
) -> None:
    """A refresh within a day finds embeddings of its impressions, visible when the day ends."""
    noon = gem_lake.spec.day_start(LAST) + DAY // 2
    lengths = HistoryLengths("behaviour", LENGTH, 2)
    store = build_feature_store(gem_lake, tmp_path / "noon", noon, lengths)
    schema = model_schemas.user_teacher_embeddings(gem_lake.spec)
    stored = arrow.snapshot(gem_lake, schema).read(["user_id", "visible_ts"]).to_pylist()
    visible = Counter(row["user_id"] for row in stored if row["visible_ts"] < noon)
    hidden = Counter(row["user_id"] for row in stored if row["visible_ts"] >= noon)
    assert sum(hidden[user] >= 2 for user in visible) > 3
    with store.read_transaction() as txn:
        for user, count in visible.items():
            rows = np.frombuffer(txn.get("teacher_history", user.encode()), TEACHER_HISTORY_DTYPE)
            assert np.searchsorted(rows["visible_ts"], noon) >= min(2, count)
    store.close()


def test_online_features_respect_the_delay_of_a_source(
    small_lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check also detects online features that ignore the delay."""
    assert small_lake.spec.visibility_delays["ad_click"] == DELAY
    limits, day = replace(INPUT_LIMITS, teacher_history_length=0), DAYS[1]
    store = store_until(small_lake, day, limits, tmp_path / "store")
    report = check_consistency(store, small_lake, day, limits)
    store.close()
    assert report.num_requests > 50 and not report.mismatches
    monkeypatch.setattr(events, "visible_ts", lambda _, event: event.ingest_ts // MICRO)
    store = store_until(small_lake, day, limits, tmp_path / "other")
    report = check_consistency(store, small_lake, day, limits)
    store.close()
    assert any("age_seconds" in name for name in report.mismatches)
    assert any("numeric" in name for name in report.mismatches)


def test_the_earliest_request_has_complete_counters(lake: Lake, tmp_path: Path) -> None:
    """A store counts as of a day before its end what a store that ends there counts."""
    limits = replace(INPUT_LIMITS, teacher_history_length=0)
    users = arrow.snapshot(lake, schemas.events(lake.spec)).read(["user_id"], day=FIRST)["user_id"]
    counters = []
    for day in (EVE, LAST):
        store = store_until(lake, day, limits, tmp_path / f"{day}")
        as_of = lake.spec.day_start(EVE)
        assert store.earliest_request in (as_of - DAY, as_of)
        fetched = [fetch(store, user, ["ad-1"], as_of) for user in users.unique().to_pylist()[:40]]
        counters.append(np.stack([inputs.candidates.numeric for inputs in fetched]))
        store.close()
    np.testing.assert_array_equal(counters[0], counters[1])


MICRO = 1_000_000


def metadata(spec: DataSpec) -> StoreMetadata:
    return StoreMetadata(spec=spec, sequence="behaviour", history_length=LENGTH)


@pytest.fixture
def store(lake: Lake, tmp_path: Path) -> Iterator[FeatureStore]:
    store = create_store(tmp_path / "store", metadata(lake.spec))
    yield store
    store.close()


@pytest.fixture(scope="module")
def shared_store(
    lake_spec: DataSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FeatureStore]:
    """A store for all examples of a property; each example clears what it uses."""
    store = create_store(tmp_path_factory.mktemp("counters") / "store", metadata(lake_spec))
    yield store
    store.close()


def ingest_all(store: FeatureStore, *events: Event) -> None:
    with store.write_transaction() as txn:
        for event in events:
            ingest_event(store, txn, event)


def fetch(store: FeatureStore, user: str, candidates: list[str], as_of: int) -> RankInputs:
    request = RankRequest(user, "feed", candidates, as_of=as_of)
    return FeatureFetcher(store, INPUT_LIMITS)(request)


def test_an_event_is_visible_after_the_delay_of_its_source(
    lake_spec: DataSpec, lake: Lake, tmp_path: Path
) -> None:
    """The largest delay of the sources that declare its type; without one, immediately."""
    dump = lake_spec.model_dump()
    columns = dump["sources"]["events"]["columns"] | {"type": None}
    clicks = dump["sources"]["events"] | {"columns": columns, "event": "ad_click", "delay": "1h"}
    spec = DataSpec.model_validate(dump | {"sources": dump["sources"] | {"clicks": clicks}})
    store = create_store(tmp_path / "store", metadata(spec))
    click, view = make_event(lake), make_event(lake, event_id="e2", user="u2", type="ad_view")
    ingest_all(store, click, view)
    now = click.ingest_ts // MICRO
    for user, delay in (("u1", 3600), ("u2", 0)):
        for as_of, ages in ((now + delay, [0]), (now + delay + 1, [1])):
            inputs = fetch(store, user, ["a1"], as_of)
            assert inputs.requests.age_seconds.tolist() == [ages]
    store.close()


def test_a_history_keeps_visible_events_and_those_that_are_not_visible_yet(
    lake_spec: DataSpec, lake: Lake, tmp_path: Path
) -> None:
    """A request reads a full history for any number of events of a delayed source."""
    dump = lake_spec.model_dump()
    dump["sources"]["events"]["delay"] = "1d"
    for objective in (*dump["objectives"].values(), *dump["auxiliary_objectives"].values()):
        objective["label_grace_period"] = "1d"
    store = create_store(tmp_path / "store", metadata(DataSpec.model_validate(dump)))
    first = make_event(lake).ingest_ts
    for number in range(2 * LENGTH):
        ingest_all(store, make_event(lake, event_id=f"old-{number}"))
    later = first + 86_400 * MICRO + MICRO
    for number in range(10 * LENGTH):
        new = make_event(lake, event_id=f"new-{number}", event_ts=later, ingest_ts=later)
        ingest_all(store, new)
    with store.read_transaction() as txn:
        visible = store.histories.visible_events(txn, b"u1", later // MICRO + 1)
    assert len(visible) == LENGTH
    store.close()


VersionOfItem = tuple[str, int, int | None]  # value, valid from, posted at (None: in the tables)
VERSION = st.tuples(st.integers(0, 60), st.integers(-5, 60))  # hours: written at, valid from


@settings(max_examples=30)
@given(st.lists(VERSION, min_size=1, max_size=30), st.integers(0, 24))
def test_a_request_reads_the_newest_version_before_it_although_old_ones_are_dropped(
    shared_store: FeatureStore, versions: list[tuple[int, int]], later: int
) -> None:
    hour = 3600
    versions = sorted(versions, key=lambda version: version[0])
    with shared_store.write_transaction() as txn:
        txn.delete("bids", b"a")
        for number, (now, valid_from) in enumerate(versions):
            version = AttributeVersion("a", valid_from * hour * MICRO, {}, float(number), "traffic")
            upsert_attributes(shared_store, txn, "item", version, now * hour)
    as_of = versions[-1][0] * hour - MAX_REQUEST_AGE + later * hour
    bids = {valid_from * hour: number for number, (_, valid_from) in enumerate(versions)}
    expected = max((valid_from for valid_from in bids if valid_from < as_of), default=None)
    with shared_store.read_transaction() as txn:
        stored = txn.get("bids", b"a")
    rows = np.frombuffer(stored, BID_DTYPE)
    bid = latest_versions([stored], BID_DTYPE, as_of)["bid"][0]
    assert bid == (0 if expected is None else bids[expected])
    assert (rows["valid_from"] < (versions[-1][0] * hour - MAX_REQUEST_AGE) * MICRO).sum() <= 1


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 4)), max_size=12),
    st.integers(0, 6),
    st.integers(1, 5),
)
def test_versions_of_users_written_at_once_equal_those_written_one_by_one(
    shared_store: FeatureStore, named: list[tuple[str, int]], now: int, at_once: int
) -> None:
    hour = 3600
    with shared_store.write_transaction() as txn:
        name = next(iter(shared_store.spec.attributes.user))
        versions = [
            AttributeVersion(user, valid_from * hour * MICRO, {name: f"value {number}"})
            for number, (user, valid_from) in enumerate(sorted(named))
        ]
        txn.clear("users")
        for version in versions:
            upsert_attributes(shared_store, txn, "user", version, now * hour)
        expected = list(txn.iterate_from("users", b"\0"))
        txn.clear("users")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attributes, "ROWS_AT_ONCE", at_once)
            write_user_versions(shared_store, txn, versions, now * hour)
        assert list(txn.iterate_from("users", b"\0")) == expected


def make_event(lake: Lake, **changes: Any) -> Event:
    now = lake.spec.day_end(FIRST) * 1_000_000
    return replace(Event("e1", "u1", "a1", "feed", "ad_click", now, now), **changes)


def test_the_first_item_of_an_empty_store_gets_the_first_index(store: FeatureStore) -> None:
    with store.write_transaction() as txn:
        for name in ("first", "second"):
            upsert_attributes(store, txn, "item", AttributeVersion(name, 0, {}), 0)
    with store.read_transaction() as txn:
        indices = read_item_records(store.layout, txn, ["first", "second"])["index"].tolist()
    assert indices == [RESERVED_ITEM_INDICES, RESERVED_ITEM_INDICES + 1]


def item_record(store: FeatureStore, txn: Txn, name: str, *versions: VersionOfItem) -> np.ndarray:
    """The record of a new item after its versions."""
    txn.delete("items", storage_key(name))
    for value, valid_from, posted_at in versions:
        attributes = dict.fromkeys(store.spec.item_counter_keys, value)
        version = AttributeVersion(name, valid_from * MICRO, attributes)
        now, is_posted = posted_at or valid_from, posted_at is not None
        upsert_item(store, txn, version, now, is_posted=is_posted)
    record: np.ndarray = read_item_records(store.layout, txn, [name])[0]
    return record


@given(st.integers(0, 3 * DAY), st.integers(0, 3 * DAY), st.integers(-30 * DAY, 30 * DAY))
def test_a_posted_version_keeps_the_counter_keys_that_are_known(
    shared_store: FeatureStore, known_since: int, later: int, stated: int
) -> None:
    """Whatever its `valid_from`."""
    first = shared_store.spec.day_start(FIRST) + known_since
    known = ("brand A", first, None)
    with shared_store.write_transaction() as txn:
        before = item_record(shared_store, txn, "a", known)
        posted = ("brand B", first + stated, first + later)
        after = item_record(shared_store, txn, "a", known, posted)
    assert len(before["keys"]) and UNKNOWN not in before["keys"]
    assert after["keys"].tolist() == before["keys"].tolist()
    assert after["known_since"] == before["known_since"] == first


@given(st.integers(0, 3 * DAY), st.integers(-30 * DAY, 30 * DAY))
def test_an_item_without_a_version_gets_the_counter_keys_of_a_posted_one(
    shared_store: FeatureStore, posted_at: int, stated: int
) -> None:
    """From its `valid_from` on, but not from before its day began."""
    day_start = shared_store.spec.day_start(FIRST)
    valid_from, posted_at = day_start + stated, day_start + posted_at
    with shared_store.write_transaction() as txn:
        in_tables = item_record(shared_store, txn, "a", ("brand B", valid_from, None))
        record = item_record(shared_store, txn, "a", ("brand B", valid_from, posted_at))
    assert record["keys"].tolist() == in_tables["keys"].tolist()
    assert record["known_since"] == max(valid_from, posted_at - (posted_at - day_start) % DAY)


def test_ids_that_end_with_a_zero_byte_have_their_own_rows() -> None:
    groups = dict(group_rows(storage_keys(["a", "a\0", "a\0"]), np.arange(3)))
    assert {key: rows.tolist() for key, rows in groups.items()} == {b"a": [0], b"a\0": [1, 2]}


def test_reading_an_item_that_was_never_seen_does_not_register_it(store: FeatureStore) -> None:
    fetch(store, "u1", ["never-seen"], 10**9)
    with store.read_transaction() as txn:
        assert not txn.get("items", storage_key("never-seen"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surface": "moon"}, "unknown surface 'moon'; known: feed"),
        ({"type": "yawn"}, "unknown event type 'yawn'"),
        ({"user": ""}, "needs a user"),
        ({"event_ts": 0}, "before 2000"),
        ({"dwell_ms": float("nan")}, "a dwell of nan"),
    ],
)
def test_an_invalid_event_is_refused_with_the_reason(
    lake: Lake, changes: dict[str, Any], message: str
) -> None:
    validate_event(lake.spec, make_event(lake))
    with pytest.raises(UserError, match=message):
        validate_event(lake.spec, make_event(lake, **changes))


@given(
    st.integers(0, 400 * DAY * MICRO),
    st.sampled_from([-1, 0, 1]) | st.integers(-DAY * MICRO, DAY * MICRO),
    st.sampled_from(["UTC", "Europe/Berlin"]),
)
def test_an_event_is_refused_as_late_exactly_where_ingest_excludes_it(
    lake_spec: DataSpec, ingested: int, distance: int, time_zone: str
) -> None:
    """More than `allowed_lateness` before its landing day began: see etl/ingest/copies.py."""
    spec = lake_spec.model_copy(update={"time_zone": time_zone})
    ingest_ts = spec.day_start(FIRST) * MICRO + ingested
    landing_day = spec.day_of(ingest_ts // MICRO)
    earliest = (spec.day_start(landing_day) - spec.allowed_lateness) * MICRO
    event = Event("e1", "u1", "a1", "feed", "ad_click", earliest + distance, ingest_ts)
    if distance >= 0:
        validate_event(spec, event)
        return
    with pytest.raises(UserError, match="more than the spec's allowed_lateness before"):
        validate_event(spec, event)


def test_a_damaged_store_is_refused_with_what_to_do(lake_spec: DataSpec, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"no store")
    with pytest.raises(UserError, match="is damaged: run `gemline rank materialize` again"):
        open_store(tmp_path, lake_spec)


def test_a_missing_store_or_one_of_another_spec_is_refused(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `gemline rank materialize` first"):
        open_store(tmp_path / "nowhere", lake.spec)
    create_store(tmp_path / "store", metadata(lake.spec)).close()
    other = DataSpec.model_validate(lake.spec.model_dump() | {"allowed_lateness": "1h"})
    with pytest.raises(UserError, match="run `gemline rank materialize` again"):
        open_store(tmp_path / "store", other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surface": "moon"}, "no ads on surface 'moon'"),
        ({"candidates": []}, "without candidates"),
        ({"candidates": ["a"] * 100_000}, "100,000 candidates"),
        ({"context": {"colour": "red"}}, "has no colour; it has .*position"),
        ({"context": {"device": 3}}, "device of the context is 3; it is a string"),
        ({"context": {"position": "first"}}, "it is a number"),
        ({"context": [{}, {}]}, "or a context for each candidate"),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(
    store: FeatureStore, changes: dict[str, Any], message: str
) -> None:
    request = replace(RankRequest("u1", "feed", ["a"], as_of=10**9), **changes)
    with pytest.raises(UserError, match=message):
        FeatureFetcher(store, INPUT_LIMITS)(request)


def test_mismatched_arrays_are_named(store: FeatureStore) -> None:
    live = fetch(store, "nobody", ["x", "y"], 10**9)
    known = np.ones(RESERVED_ITEM_INDICES + 1, bool)
    tolerance = numeric_tolerance(store.layout.features)

    def names(online: object, offline: object, known: np.ndarray = known) -> list[str]:
        return list(mismatched_arrays(online, offline, known, tolerance))

    assert not names(live.requests, live.requests)
    for name in ("types", "surfaces", "dwells", "age_seconds"):
        other = replace(live.requests, **{name: getattr(live.requests, name) + 1})
        assert names(other, live.requests) == [name]
    recency = tuple(
        RecencyArrays(features.last_age + 1, features.span, features.gap_count)
        for features in live.candidates.recency
    )
    other_candidates = replace(live.candidates, recency=recency)
    assert "recency.0.last_age" in names(other_candidates, live.candidates)
    items = replace(
        live.candidates.items,
        categorical=live.candidates.items.categorical
        | {ITEM_TABLE: np.full((1, 2), RESERVED_ITEM_INDICES)},
    )
    moved = replace(live.candidates, items=items)
    assert names(moved, live.candidates) == [f"items.categorical.{ITEM_TABLE}"]
    assert not names(moved, live.candidates, known[:-1])


def test_only_decayed_counts_may_be_rounded_differently(small_lake: Lake, tmp_path: Path) -> None:
    store = create_store(tmp_path / "store", metadata(small_lake.spec))
    live, features = fetch(store, "nobody", ["x"], 10**9), store.layout.features
    store.close()
    assert "decayed_user_ad_click_10m" in features.numeric_columns
    candidates = replace(live.candidates, numeric=np.ones_like(live.candidates.numeric))
    known, tolerance = np.ones(RESERVED_ITEM_INDICES, bool), numeric_tolerance(features)
    for column, name in enumerate(features.numeric_columns):
        numeric = candidates.numeric.copy()
        numeric[0, 0, column] = np.nextafter(np.float32(1), np.float32(2))
        rounded = replace(candidates, numeric=numeric)
        names = list(mismatched_arrays(rounded, candidates, known, tolerance))
        assert names == ([] if "decayed_" in name else ["numeric"]), name
        numeric[0, 0, column] = np.nan if "decayed_" in name else 1.0001
        assert list(mismatched_arrays(rounded, candidates, known, tolerance)) == ["numeric"]


def test_a_store_of_another_record_format_is_refused(lake: Lake, tmp_path: Path) -> None:
    store = create_store(tmp_path / "store", metadata(lake.spec))
    earlier = store.metadata.model_copy(update={"record_format": 1})
    with store.write_transaction() as txn:
        txn.put("meta", METADATA_KEY, earlier.model_dump_json().encode())
    store.close()
    with pytest.raises(UserError, match="written by another version of Gemline"):
        open_store(tmp_path / "store", lake.spec)


def test_a_user_and_items_never_seen_are_read_as_unknown(store: FeatureStore) -> None:
    live = fetch(store, "nobody", ["x", "y"], 10**9)
    assert (live.requests.age_seconds == 0).all() and (
        live.candidates.items.categorical[ITEM_TABLE] == 0
    ).all()
    assert live.bids.bids.tolist() == [0.0, 0.0] and live.bids.goals == [None, None]
    assert not live.is_known_item.any()
