"""What the validation of sampled examples reads: rows of their users and items, row group by group.

Only counters of keys without user and item need all events of their days.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.spec.units import date_range
from etl.tables import schemas
from etl.tables.arrow import Snapshot, snapshot
from etl.tables.declared_columns import counted_columns
from etl.tables.lake import Lake
from features.ragged import run_starts
from features.reference import MICROS_PER_SECOND, Row
from features.schema import counter_input_days

EVENT_COLUMNS = (
    "event_id", "user_id", "item_id", "surface", "type", "event_ts", "ingest_ts", "visible_ts",
    "request_id", "impression_id", "dwell_ms", "value", "day",
)  # fmt: skip
MAX_SHARED_EVENTS = 3_000_000  # of all users and items, in memory: about 4 GB as rows of Python
MAX_ITEM_EVENTS = 1_000_000  # of the sampled items together


class ItemState(NamedTuple):
    """An item's index, the second since when it is known (None if never), and its counter keys."""

    item_index: int
    known_since: int | None
    keys: Row


def sample_examples(lake: Lake, sample_size: int, seed: int) -> list[Row]:
    """Examples drawn uniformly without replacement; all of them if there are fewer."""
    table = snapshot(lake, schemas.examples(lake.spec))
    actions = pa.table(table.table.get_add_actions(flatten=True))
    sizes = dict(zip(*(actions[name].to_pylist() for name in ("path", "num_records")), strict=True))
    paths = [path for path, _ in table.files]
    ends = np.cumsum([sizes[path] for path in paths])
    if not len(ends) or not ends[-1]:
        raise UserError(f"there are no examples in {lake.root}; run `gemline features examples`")
    rng = np.random.default_rng(seed)
    drawn = np.sort(rng.choice(ends[-1], min(sample_size, ends[-1]), replace=False))
    of_file = np.searchsorted(ends, drawn, side="right")
    examples: list[Row] = []
    for number in np.unique(of_file).tolist():
        first = ends[number] - sizes[paths[number]]
        positions = drawn[of_file == number] - first
        examples += table.single_file(paths[number]).take(positions.tolist()).to_pylist()
    return examples


class SampledRows:
    """Rows of the tables from which some examples were built."""

    def __init__(self, lake: Lake, examples: Sequence[Row]) -> None:
        self.lake, self.spec = lake, lake.spec
        self._examples = examples
        self._read_versions: dict[str, list[Row]] = {}
        self._users = pa.array(sorted({example["user_id"] for example in examples}))
        self._buckets = {example["bucket"] for example in examples}
        self._event_columns = list(dict.fromkeys((*EVENT_COLUMNS, *counted_columns(self.spec))))

    @cached_property
    def user_events(self) -> pa.Table:
        """All events of the examples' users."""
        events = self._snapshot("events")
        columns = self._event_columns
        return events.read_matching("user_id", self._users, columns, bucket=self._buckets)

    @cached_property
    def num_shared_events(self) -> int:
        """The number of events, of all users, on the days that counters read."""
        rows = self.lake.rows_by_day("events")
        return sum(n for day, n in rows.items() if day in self._counted_days)

    def can_count(self, key: Sequence[str], item_id: str | None = None) -> bool:
        """Whether few enough events are needed to count a key, for impressions of an item."""
        if "user" in key:
            return True
        if "item" in key:
            return item_id is None or item_id in self._countable_items
        return self.num_shared_events <= MAX_SHARED_EVENTS

    @property
    def num_uncounted_items(self) -> int:
        """How many sampled items have too many events to count keys with the item alone."""
        keys = self.spec.counters.keys
        if not any("item" in key and "user" not in key for key in keys):
            return 0
        return len(self._sampled_items) - len(self._countable_items)

    def events_of_key(self, key: Sequence[str]) -> pa.Table:
        """Events that have all those that the examples count with a key."""
        if "user" in key:
            return self.user_events
        return self._item_events if "item" in key else self._shared_events

    def history_rows(self, user: str, bucket: int) -> pa.Table:
        """The rows of a user's history."""
        history = self._snapshot("history")
        return history.read_matching("user_id", pa.array([user]), bucket=bucket)

    def user_versions(self, user_id: str) -> list[Row]:
        """A user's versions, with the attributes that are parts of counter keys."""
        if user_id not in self._read_versions:
            table, rows_of_users = self._versions_by_user
            rows = rows_of_users.get(user_id, range(0))
            self._read_versions[user_id] = table.slice(rows.start, len(rows)).to_pylist()
        return self._read_versions[user_id]

    @cached_property
    def item_states(self) -> dict[str, ItemState]:
        """The index and first attributes of each item of the events, by item id."""
        items = self._snapshot("items").read_matching("item_id", self._unique("item_id"))
        indices = items["item_index"].combine_chunks()
        versions = self._snapshot("item_versions").read_matching("item_index", indices)
        first_versions: dict[int, Row] = {}
        for version in sorted(versions.to_pylist(), key=lambda v: (v["valid_from"], v["day"])):
            first_versions.setdefault(version["item_index"], version)
        states = {}
        for row in items.to_pylist():
            first = first_versions.get(row["item_index"])
            known_since = first["valid_from"] // MICROS_PER_SECOND if first else None
            states[row["item_id"]] = ItemState(row["item_index"], known_since, first or {})
        return states

    @cached_property
    def _counted_days(self) -> set[date]:
        before = timedelta(days=counter_input_days(self.spec))
        days = {example["day"] for example in self._examples}
        return {day for last in days for day in date_range(last - before, last)}

    @cached_property
    def _sampled_items(self) -> pa.Array:
        sampled = pa.array([example["impression_id"] for example in self._examples])
        is_sampled = pc.is_in(self.user_events["impression_id"], sampled)
        return pc.unique(self.user_events["item_id"].filter(is_sampled))

    @cached_property
    def _countable_items(self) -> frozenset[str]:
        """The sampled items, the rarest first, that have at most MAX_ITEM_EVENTS events together.

        Of events on the days that counters read.
        """
        events, counts = self._snapshot("events"), Counter[str]()
        for day in sorted(self._counted_days):
            ids = events.read_matching("item_id", self._sampled_items, ["item_id"], day=day)
            of_day = ids["item_id"].value_counts().to_pylist()
            counts.update({row["values"]: row["counts"] for row in of_day})
        rarest = sorted(counts, key=lambda item_id: (counts[item_id], item_id))
        ends = np.cumsum([counts[item_id] for item_id in rarest])
        return frozenset(rarest[: np.searchsorted(ends, MAX_ITEM_EVENTS, side="right")])

    @cached_property
    def _item_events(self) -> pa.Table:
        """Events with the countable items of the examples, on the days that counters read."""
        items = pa.array(sorted(self._countable_items), pa.string())
        events = self._snapshot("events")
        return events.read_matching("item_id", items, self._event_columns, day=self._counted_days)

    @cached_property
    def _shared_events(self) -> pa.Table:
        """All events on the days that counters read."""
        return self._snapshot("events").read(self._event_columns, day=self._counted_days)

    def _unique(self, column: str) -> pa.Array:
        """The values of a column in all events that are read."""
        keys = [key for key in self.spec.counters.keys if self.can_count(key)]
        tables = [self.user_events, *map(self.events_of_key, keys)]
        return pc.unique(pa.concat_tables(table.select([column]) for table in tables)[column])

    @cached_property
    def _versions_by_user(self) -> tuple[pa.Table, dict[str, range]]:
        """The versions of the users, sorted by user, and the rows of each."""
        names = [f"attr_{name}" for name in self.spec.user_counter_keys]
        users = self._unique("user_id") if names else self._users
        columns = ["user_id", "valid_from", "day", *names]
        table = self._snapshot("attributes_user").read_matching("user_id", users, columns)
        table = table.sort_by("user_id").combine_chunks()
        users = table["user_id"].combine_chunks()
        starts = run_starts(users)
        rows = map(range, starts.tolist(), [*starts[1:].tolist(), len(users)])
        return table, dict(zip(users.take(pa.array(starts)).to_pylist(), rows, strict=True))

    def _snapshot(self, name: str) -> Snapshot:
        return snapshot(self.lake, schemas.table_schema(self.spec, name))
