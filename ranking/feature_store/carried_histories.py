"""Builds the histories of a feature store, from the store before it and the days since.

The events of all days are read only if there is no earlier store, or if it was built from other
rows: days that have been written again, another history length or another spec.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
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
from ranking.feature_store.histories import merge_rows, read_rows
from ranking.feature_store.items import registered_item_records
from ranking.feature_store.storage import HISTORY_DTYPE, KeyValuePairs, group_rows, storage_keys
from ranking.feature_store.store import FeatureStore, open_store

log = logging.getLogger(__name__)
USERS_PER_TRANSACTION = 1000
FINGERPRINT_KEY = b"history fingerprint"


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
        covered_until = self._carry_from_first(earlier_stores)
        final_days = [day for day in self.events.days() if day < self.data_until_day]
        added_days = [day for day in final_days if covered_until is None or day >= covered_until]
        all_numbered = True
        for bucket in range(self.lake.spec.buckets):
            all_numbered &= self._add_events("history", added_days, bucket)
            self._add_events("recent_history", [self.data_until_day], bucket)
        if all_numbered:
            with self.store.write_transaction() as txn:
                txn.put("meta", FINGERPRINT_KEY, self._fingerprint(self.data_until_day))

    def _carry_from_first(self, earlier_stores: Sequence[Path]) -> date | None:
        """Copy the final histories of an earlier store; returns the first day that they lack.

        None if no store can be used.
        """
        for folder in earlier_stores:
            try:
                return self._carry(folder)
            except (UserError, lmdb.Error) as error:
                log.info("the histories of %s are not reused: %s", folder, error)
        return None

    def _carry(self, folder: Path) -> date:
        """Copy the final histories of a store; returns the first day that they lack.

        Raises:
            UserError: The store cannot be read, or its histories are not those of the tables.
            lmdb.Error: The store is damaged, or open in this process.
        """
        earlier = open_store(folder, self.lake.spec)
        try:
            first_day = self.lake.spec.last_day_before(earlier.data_until)
            self._check_carriable(earlier, first_day)
            self._copy_histories(earlier)
        except lmdb.Error:
            with self.store.write_transaction() as txn:
                txn.clear("history")
            raise
        finally:
            earlier.close()
        return first_day

    def _check_carriable(self, earlier: FeatureStore, first_day: date) -> None:
        if earlier.histories != self.store.histories:
            raise UserError("it has other events or another history length")
        if earlier.data_until > self.store.data_until:
            raise UserError("it has later events")
        with earlier.read_transaction() as txn:
            if txn.get("meta", FINGERPRINT_KEY) != self._fingerprint(first_day):
                raise UserError("days that it has were written again")

    def _copy_histories(self, earlier: FeatureStore) -> None:
        with earlier.read_transaction() as source:
            stored = source.iterate_from("history", b"")
            while users := list(islice(stored, USERS_PER_TRANSACTION)):
                with self.store.write_transaction() as txn:
                    txn.put_many("history", [(key, self._retained(rows)) for key, rows in users])

    def _retained(self, stored: bytes) -> bytes:
        rows = np.frombuffer(stored, HISTORY_DTYPE)
        return self.store.histories.retained(rows, self.store.data_until).tobytes()

    def _fingerprint(self, first_day: date) -> bytes:
        """Identifies the rows of events and items of all days before one by their files."""
        paths = [
            path
            for table in (self.events, self.items)
            for path, partition in table.files
            if cast(date, partition["day"]) < first_day
        ]
        return hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest().encode()

    def _add_events(self, table: str, days: Sequence[date], bucket: int) -> bool:
        """Add the events of days to a table; returns whether all their items have an index.

        Items without one get an index of the store, which may be another one in the next store.
        """
        schema, histories = self.events.schema, self.store.histories
        columns = [n for n in schema.columns if not n.startswith("ctx_") and n != "source_file"]
        events = self.events.read(columns, day=days, bucket=bucket)
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


def history_rows(store: FeatureStore, events: pa.Table) -> np.ndarray:
    """The rows of a table of events."""
    rows = np.zeros(len(events), HISTORY_DTYPE)
    rows["visible_ts"], rows["event_ts"] = events["visible_ts"], events["event_ts"]
    rows["event"] = np.array([id_.encode() for id_ in events["event_id"].to_pylist()], np.bytes_)
    rows["item"] = registered_item_records(store, events["item_id"])["index"]
    rows["surface"], rows["type"] = events["surface"], events["type"]
    rows["dwell"] = quantize_dwell(events["dwell_ms"].to_numpy())
    return rows
