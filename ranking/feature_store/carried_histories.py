"""Builds the histories of a feature store, from the store before it and the days since.

Days that have been written again are read again, with earlier days whose events became visible
since. The events of all days are read only if there is no earlier store, if it was built with
another history length or spec, if its first day was written again, if histories were compacted
since, or if histories of it lack events that it has dropped. Events that compaction has dropped
from the tables are left out.
"""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import cast

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.tables.arrow import Snapshot
from etl.tables.lake import Lake
from features.history.codec import quantize_dwell
from features.history.compacted import compacted_histories, first_events
from ranking.feature_store.histories import merge_rows, read_rows, without_dropped
from ranking.feature_store.items import registered_item_records
from ranking.feature_store.storage import (
    HISTORY_DTYPE,
    KeyValuePairs,
    group_rows,
    storage_key,
    storage_keys,
)
from ranking.feature_store.store import FeatureStore, open_store

log = logging.getLogger(__name__)
USERS_PER_TRANSACTION = 1000
FINGERPRINTS_KEY = b"history fingerprints"  # by day
COMPACTION_KEY = b"compacted histories"  # their fingerprint


@dataclass(frozen=True)
class CarriedHistories:
    """What was copied from an earlier store.

    Attributes:
        first_missing_day: The first landing day of events that are to be added.
        missing_from: The second from which events became visible that are to be added.
        shortened: Keys of users whose earlier events the store has dropped, and whose latest ones
            were not copied.
    """

    first_missing_day: date = date.min
    missing_from: int = 0
    shortened: tuple[bytes, ...] = ()


NOTHING_CARRIED = CarriedHistories()


@dataclass(frozen=True)
class HistoryBuilder:
    """Writes the histories of a new store that has the data of all days up to one."""

    lake: Lake
    store: FeatureStore
    events: Snapshot
    items: Snapshot
    data_until_day: date

    def build(self, earlier_stores: Sequence[Path]) -> None:
        """Write both tables of histories.

        Those of final days are copied from the first of the earlier stores that can be used.
        """
        carried = self._carry_from_first(earlier_stores)
        all_numbered = self._add_final_days(carried)
        if self._lack_events(carried.shortened):
            log.info("all events are read: days that were written again have fewer of some users")
            with self.store.write_transaction() as txn:
                txn.clear("history")
            all_numbered = self._add_final_days(NOTHING_CARRIED)
        self._leave_out_dropped_events()
        for bucket in range(self.lake.spec.buckets):
            self._add_events("recent_history", [self.data_until_day], bucket)
        if all_numbered:
            fingerprints = json.dumps(self._fingerprints(self.data_until_day)).encode()
            with self.store.write_transaction() as txn:
                txn.put("meta", FINGERPRINTS_KEY, fingerprints)
                txn.put("meta", COMPACTION_KEY, self._compaction_fingerprint)

    def _add_final_days(self, carried: CarriedHistories) -> bool:
        """Add the events that copied histories lack; returns whether all items have an index."""
        first_day = carried.first_missing_day
        days = [day for day in self.events.days() if first_day <= day < self.data_until_day]
        buckets = range(self.lake.spec.buckets)
        numbered = [self._add_events("history", days, b, carried.missing_from) for b in buckets]
        return all(numbered)

    def _leave_out_dropped_events(self) -> None:
        """Remove the events that compaction has dropped, which offline features lack, too."""
        if self._compacted is None:
            return
        for bucket in range(self.lake.spec.buckets):
            first = first_events(self._compacted, bucket, self.store.histories.event_codes)
            columns = first.users.to_pylist(), first.visible_ts, first.num_events
            with self.store.write_transaction() as txn:
                for user, visible_ts, num_events in zip(*columns, strict=True):
                    key = storage_key(user)
                    rows = read_rows(txn, "history", key)
                    kept = without_dropped(rows, visible_ts, num_events)
                    if not len(kept):
                        txn.delete("history", key)
                    elif len(kept) < len(rows):
                        txn.put("history", key, kept.tobytes())

    @cached_property
    def _compacted(self) -> Snapshot | None:
        return compacted_histories(self.lake, self.data_until_day)

    @property
    def _compaction_fingerprint(self) -> bytes:
        """Identifies the compacted histories by their files; empty without any."""
        files = self._compacted.files if self._compacted else ()
        return _fingerprint(path for path, _ in files).encode() if files else b""

    def _lack_events(self, users: Sequence[bytes]) -> bool:
        """Whether the histories of some users are shorter than histories that dropped events."""
        with self.store.read_transaction() as txn:
            rows = (read_rows(txn, "history", key) for key in users)
            return any(not self.store.histories.is_full(r, self.store.data_until) for r in rows)

    def _carry_from_first(self, earlier_stores: Sequence[Path]) -> CarriedHistories:
        """Copy the final histories of the first earlier store that can be used, if any."""
        for folder in earlier_stores:
            try:
                return self._carry(folder)
            except (UserError, lmdb.Error) as error:
                log.info("the histories of %s are not reused: %s", folder, error)
        return NOTHING_CARRIED

    def _carry(self, folder: Path) -> CarriedHistories:
        """Copy the final histories of a store, without what days that were written again may have.

        Raises:
            UserError: The store cannot be read, or its histories are of no use.
            lmdb.Error: The store is damaged, or open in this process.
        """
        earlier, spec = open_store(folder, self.lake.spec), self.lake.spec
        try:
            end = spec.last_day_before(earlier.data_until)
            changed_day = self._first_changed_day(earlier, end)
            if changed_day == end:
                self._copy_histories(earlier)
                return CarriedHistories(end)
            # Events are not visible before the day on which they land.
            missing_from = spec.day_start(changed_day)
            shortened = self._copy_histories(earlier, missing_from)
            first_day = changed_day - timedelta(days=spec.visibility_delay_days)
            return CarriedHistories(first_day, missing_from, shortened)
        except lmdb.Error:
            with self.store.write_transaction() as txn:
                txn.clear("history")
            raise
        finally:
            earlier.close()

    def _first_changed_day(self, earlier: FeatureStore, end: date) -> date:
        """The first day before `end` with other rows than a store was built from; else `end`."""
        if earlier.histories != self.store.histories:
            raise UserError("it has other events or another history length")
        if earlier.data_until > self.store.data_until:
            raise UserError("it has later events")
        with earlier.read_transaction() as txn:
            stored = txn.get("meta", FINGERPRINTS_KEY)
            compaction = txn.get("meta", COMPACTION_KEY)
        if not stored:
            raise UserError("it does not record what it was built from")
        if compaction != self._compaction_fingerprint:
            raise UserError("histories were compacted or built again since")
        before, now = json.loads(stored), self._fingerprints(end)
        days = sorted(before.keys() | now.keys())
        changed = [day for day in days if before.get(day) != now.get(day)]
        if changed[:1] == days[:1] != []:
            raise UserError("its first day was written again")
        return date.fromisoformat(changed[0]) if changed else end

    def _copy_histories(
        self, earlier: FeatureStore, visible_before: int | None = None
    ) -> tuple[bytes, ...]:
        """Copy histories, or what was visible before a second; returns the shortened ones."""
        shortened: list[bytes] = []
        with earlier.read_transaction() as source:
            stored = source.iterate_from("history", b"")
            while users := list(islice(stored, USERS_PER_TRANSACTION)):
                copied: KeyValuePairs = []
                for key, value in users:
                    rows = kept = np.frombuffer(value, HISTORY_DTYPE)
                    if visible_before is not None:
                        kept = rows[: np.searchsorted(rows["visible_ts"], visible_before)]
                    is_full = self.store.histories.is_full(rows, earlier.data_until)
                    shortened += [key] if is_full and len(kept) < len(rows) else []
                    if len(kept):
                        retained = self.store.histories.retained(kept, self.store.data_until)
                        copied.append((key, retained.tobytes()))
                with self.store.write_transaction() as txn:
                    txn.put_many("history", copied)
        return tuple(shortened)

    def _fingerprints(self, end: date) -> dict[str, str]:
        """Identifies the rows of events and items of each day before one by their files."""
        paths = defaultdict(list)
        for table in (self.events, self.items):
            for path, partition in table.files:
                if cast(date, partition["day"]) < end:
                    paths[str(partition["day"])].append(path)
        return {day: _fingerprint(files) for day, files in paths.items()}

    def _add_events(
        self, table: str, days: Sequence[date], bucket: int, visible_from: int = 0
    ) -> bool:
        """Add the events of days that became visible from a second on to a table.

        Returns whether all their items have an index. Items without one get an index of the store,
        which may be another one in the next store.
        """
        schema, histories = self.events.schema, self.store.histories
        columns = [n for n in schema.columns if not n.startswith("ctx_") and n != "source_file"]
        events = self.events.read(columns, day=days, bucket=bucket)
        if visible_from:
            events = events.filter(pc.greater_equal(events["visible_ts"], visible_from))
        if histories.event_codes:
            codes = pa.array(histories.event_codes, pa.int8())
            events = events.filter(pc.is_in(events["type"], codes))
        events = events.sort_by([(name, "ascending") for name in schema.order_by]).combine_chunks()
        rows = history_rows(self.store, events)
        with self.store.write_transaction() as txn:
            pairs: KeyValuePairs = []
            for key, added in group_rows(storage_keys(events["user_id"].to_pylist()), rows):
                merged = merge_rows(read_rows(txn, table, key), added)
                retained = histories.retained(merged, self.store.data_until)
                pairs.append((key, retained.tobytes()))
            txn.put_many(table, pairs)
        return bool((rows["item"] < self.store.metadata.num_items).all())


def _fingerprint(paths: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest()[:16]


def history_rows(store: FeatureStore, events: pa.Table) -> np.ndarray:
    """The rows of a table of events."""
    rows = np.zeros(len(events), HISTORY_DTYPE)
    rows["visible_ts"], rows["event_ts"] = events["visible_ts"], events["event_ts"]
    rows["event"] = np.array([id_.encode() for id_ in events["event_id"].to_pylist()], np.bytes_)
    rows["item"] = registered_item_records(store, events["item_id"])["index"]
    rows["surface"], rows["type"] = events["surface"], events["type"]
    rows["dwell"] = quantize_dwell(events["dwell_ms"].to_numpy())
    return rows
