"""A feature store built from the one before it equals one that is built from all events."""

import gzip
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from etl.errors import UserError
from etl.ingest.run import ingest
from etl.tables.lake import Lake
from features.history import compact
from features.items import index_items
from ranking.feature_store import histories
from ranking.feature_store.consistency import check_consistency
from ranking.feature_store.events import Event, ingest_event
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.feature_store.storage import HISTORY_DTYPE
from ranking.feature_store.store import METADATA_KEY, STORE_TABLES, FeatureStore, open_store
from ranking.student.config import InputLimits
from tests.oracle import disorder
from tests.oracle.disorder import FIRST, build_lake, generate_records

pytestmark = pytest.mark.spark

DAYS = 5
LAST = FIRST + timedelta(days=DAYS - 1)
LENGTHS = HistoryLengths("behaviour", events=3)
LIMITS = InputLimits(max_length=40, encoded_events=8, teacher_history_length=0, user_hash_buckets=0)


@pytest.fixture(scope="module")
def built_once(spark: object, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake of disordered logs, whose events are visible a day after their ingest."""
    with pytest.MonkeyPatch.context() as patch:
        text = disorder.SPEC.replace("window: ", "label_grace_period: 1d, window: ")
        patch.setattr(disorder, "SPEC", text.replace("delay: 30s", "delay: 1d"))
        folder = tmp_path_factory.mktemp("lake")
        return build_lake(folder, generate_records(7, 12, DAYS), [(0, DAYS - 1)])


@pytest.fixture
def built(built_once: Lake, tmp_path: Path) -> Lake:
    """The same, in a folder of the test, with its logs."""
    shutil.copytree(Path(built_once.root).parent, tmp_path / "copy")
    return Lake(str(tmp_path / "copy" / Path(built_once.root).name), built_once.spec)


@pytest.fixture(autouse=True)
def short_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores drop events of these small logs."""
    monkeypatch.setattr(histories, "SPARE_EVENTS", 1)


def contents(store: FeatureStore) -> dict[str, dict[bytes, bytes]]:
    """All records of a store, by table."""
    with store.read_transaction() as txn:
        return {name: dict(txn.iterate_from(name, b"\0")) for name in STORE_TABLES}


@contextmanager
def store_until(
    lake: Lake, folder: Path, data_until: int, previous: Path | None = None
) -> Iterator[FeatureStore]:
    store = build_feature_store(lake, folder, data_until, LENGTHS, [previous] if previous else [])
    yield store
    store.close()


def test_stores_of_consecutive_hours_and_days_equal_those_of_all_events(
    built: Lake, tmp_path: Path
) -> None:
    previous, num_full = None, 0
    noon = built.spec.day_start(LAST) + 12 * 3600
    ends = [built.spec.day_end(FIRST + timedelta(days=n)) for n in range(DAYS)]
    for end in (*ends[:3], ends[3] - 7200, ends[3] - 3600, ends[3], noon, ends[4]):
        with store_until(built, tmp_path / f"whole-{end}", end) as store:
            expected = contents(store)
        with store_until(built, tmp_path / f"carried-{end}", end, previous) as store:
            assert contents(store) == expected, end
        previous = tmp_path / f"carried-{end}"
        full_bytes = (LENGTHS.events + histories.SPARE_EVENTS) * HISTORY_DTYPE.itemsize
        num_full += sum(len(rows) == full_bytes for rows in expected["history"].values())
    assert num_full > 10, "no history was cut"


def mark(folder: Path, lake: Lake, data_until: int) -> None:
    """Build a store in which a user that no event names has a history."""
    with store_until(lake, folder, data_until) as store, store.write_transaction() as txn:
        txn.put("history", b"copied", np.zeros(1, HISTORY_DTYPE).tobytes())


def is_copied(lake: Lake, folder: Path, previous: Path, lengths: HistoryLengths = LENGTHS) -> bool:
    """Whether a store of all days has the histories of an earlier store."""
    end = lake.spec.day_end(LAST)
    store = build_feature_store(lake, folder, end, lengths, [previous])
    with store.read_transaction() as txn:
        found = bool(txn.get("history", b"copied"))
    store.close()
    return found


def test_histories_are_copied_unless_the_first_day_or_the_length_changed(
    built: Lake, tmp_path: Path
) -> None:
    raw, before = str(Path(built.root).parent / "raw"), LAST - timedelta(days=1)
    previous = tmp_path / "previous"
    mark(previous, built, built.spec.day_end(before))
    assert is_copied(built, tmp_path / "daily", previous)
    assert not is_copied(built, tmp_path / "longer", previous, HistoryLengths("behaviour", 5))
    for first in (before, before - timedelta(days=1), FIRST):
        ingest(built, raw, (first, LAST))
        index_items(built, (first, LAST))
        assert is_copied(built, tmp_path / f"again from {first}", previous) == (first != FIRST)


@pytest.mark.parametrize("is_late", [True, False])
def test_days_that_were_written_again_are_replaced_in_copied_histories(
    built: Lake, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_late: bool
) -> None:
    """By more events of a late file, or by fewer: then dropped ones are read again, too."""
    previous, changed = tmp_path / "previous", LAST - timedelta(days=1)
    with store_until(built, previous, built.spec.day_end(LAST)):
        pass
    raw = Path(built.root).parent / "raw"
    file = raw / "log" / f"{changed}" / "0.json.gz"
    records = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    for record in records:
        record["id"] += "-late"
        if "imp" in record:
            record["imp"] += "-late"
    lines = "".join(json.dumps(record) + "\n" for record in records[: len(records) // 4])
    file = file.with_name("late.json.gz") if is_late else file
    file.write_bytes(gzip.compress(lines.encode()))
    ingest(built, str(raw), (changed, LAST))
    index_items(built, (changed, LAST))
    end = built.spec.day_end(LAST)
    with store_until(built, tmp_path / "whole", end) as store:
        expected = contents(store)
    with (
        caplog.at_level(logging.INFO),
        store_until(built, tmp_path / "carried", end, previous) as store,
    ):
        assert contents(store) == expected
    assert "are not reused" not in caplog.text
    assert ("all events are read" in caplog.text) != is_late


@pytest.mark.parametrize("max_age_hours", [0, 30])
def test_events_that_compaction_has_dropped_are_left_out_as_offline(
    built: Lake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    max_age_hours: int,
) -> None:
    """With histories of an earlier store, built before or after the compaction, or without."""
    until, eve = FIRST + timedelta(days=2), LAST - timedelta(days=1)
    caplog.set_level(logging.INFO)
    long = HistoryLengths("behaviour", LIMITS.max_length)

    def build(name: str, end: int, *earlier: str) -> FeatureStore:
        folders = [tmp_path / folder for folder in earlier]
        return build_feature_store(built, tmp_path / name, end, long, folders)

    with closing(build("before", built.spec.day_start(eve))) as store:
        before = contents(store)["history"]
    history = built.spec.history.model_copy(update={"max_age": max_age_hours * 3600})
    short = built.spec.model_copy(update={"history": history})
    monkeypatch.setattr(compact, "last_compactable_day", lambda _: until)
    compact.compact_history(Lake(built.root, short), until)
    with closing(build("after", built.spec.day_start(eve), "before")) as store:
        after = contents(store)["history"]
    assert sum(map(len, after.values())) < sum(map(len, before.values())) * 3 / 4
    with closing(build("whole", built.spec.day_start(LAST))) as store:
        expected = contents(store)
    for earlier in ("before", "after"):
        caplog.clear()
        with closing(build(f"from {earlier}", built.spec.day_start(LAST), earlier)) as store:
            assert ("are not reused: histories were compacted" in caplog.text) == (
                earlier == "before"
            )
            assert contents(store) == expected, earlier
            report = check_consistency(store, built, LAST, LIMITS)
        assert report.num_requests > 5 and not report.mismatches, earlier


def test_of_events_of_one_second_those_are_left_out_that_compaction_has_dropped() -> None:
    rows = np.zeros(6, HISTORY_DTYPE)
    rows["visible_ts"], rows["item"] = [1, 3, 3, 3, 4, 4], range(6)

    def kept(first_ts: int, num_at_first: int) -> list[int]:
        items: list[int] = histories.without_dropped(rows, first_ts, num_at_first)["item"].tolist()
        return items

    assert kept(3, 2) == [2, 3, 4, 5] and kept(3, 9) == [1, 2, 3, 4, 5]
    assert kept(4, 0) == [] and kept(2, 0) == [1, 2, 3, 4, 5] and kept(0, 1) == [*range(6)]


def test_a_later_store_is_not_the_source_of_an_earlier_one(built: Lake, tmp_path: Path) -> None:
    with store_until(built, tmp_path / "later", built.spec.day_end(LAST)):
        pass
    end = built.spec.day_end(FIRST)
    with store_until(built, tmp_path / "whole", end) as store:
        expected = contents(store)
    with store_until(built, tmp_path / "earlier", end, tmp_path / "later") as store:
        assert contents(store) == expected


def test_posted_events_are_not_carried_into_the_next_store(built: Lake, tmp_path: Path) -> None:
    """They land in the tables, or are applied from the log of posted events."""
    end = built.spec.day_end(LAST - timedelta(days=1))
    posted = Event("posted", "u1", "hat", "home", "shown", end * 1_000_000, end * 1_000_000)
    with store_until(built, tmp_path / "live", end) as store, store.write_transaction() as txn:
        ingest_event(store, txn, posted)
    last = built.spec.day_end(LAST)
    with store_until(built, tmp_path / "next", last, tmp_path / "live") as store:
        found = contents(store)
    with store_until(built, tmp_path / "whole", last) as store:
        assert found == contents(store)
        assert not any(b"posted" in rows for rows in found["recent_history"].values())


@pytest.mark.parametrize("metadata", [None, b'{"record_format": 2}', b"{"])
def test_a_store_of_another_version_is_not_used(
    built: Lake, tmp_path: Path, metadata: bytes | None
) -> None:
    """Neither is a folder without a store; the store before it is."""
    end, previous, other = built.spec.day_end(LAST), tmp_path / "previous", tmp_path / "other"
    mark(previous, built, built.spec.day_end(LAST - timedelta(days=1)))
    if metadata is not None:
        with store_until(built, other, end) as store, store.write_transaction() as txn:
            txn.put("meta", METADATA_KEY, metadata)
        with pytest.raises(UserError, match="run `gemline rank materialize` again"):
            open_store(other, built.spec)
    store = build_feature_store(built, tmp_path / "next", end, LENGTHS, [other, previous])
    assert b"copied" in contents(store)["history"]
    store.close()
    assert not is_copied(built, tmp_path / "alone", other)
