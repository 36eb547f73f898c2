"""Examples recomputed from the events by brute force, for whoever doubts the tables."""

from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from functools import cached_property
from itertools import takewhile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from etl.errors import UserError
from etl.spec.units import each_day
from etl.tables import contracts
from etl.tables.arrow import Snapshot, snapshot
from etl.tables.lake import Lake
from features import reference
from features.history.compact import days_back
from features.history.pack import visible_from
from features.history.planes import unpack
from features.reference import SECOND, Row

EVENT = (
    "event_id", "user_id", "item_id", "surface", "type", "event_ts", "ingest_ts", "visible_ts",
    "request_id", "impression_id", "day",
)  # fmt: skip
Difference = tuple[str, object, object]


def check(lake: Lake, sample: int, seed: int) -> Iterator[tuple[str, list[Difference]]]:
    """Examples drawn at random, each with the values that brute force finds otherwise.

    A difference is what differs, what is stored and what it should be. Raises UserError where
    there are no examples.
    """
    examples = drawn(lake, sample, seed)
    tables = Events(lake, [row["day"] for row in examples])
    for example in tqdm(examples, desc="check", unit="example", disable=None):
        found = tables.recompute(example)
        stored = {name: example[name] for name in found if name in example}
        stored["history"] = tables.history_of(example, found["history"])
        wrong = [name for name, value in found.items() if stored[name] != value]
        differences = [(name, *_apart(stored[name], found[name])) for name in wrong]
        yield example["impression_id"], differences


def drawn(lake: Lake, sample: int, seed: int) -> list[Row]:
    """Some examples of a lake, each with the same chance."""
    table = snapshot(lake, contracts.examples(lake.spec))
    sizes = [table.only(path).read(["impression_id"]).num_rows for path, _ in table.files]
    if not sum(sizes):
        raise UserError(f"there are no examples in {lake.root}; run `gemline features examples`")
    rng = np.random.default_rng(seed)
    places = np.sort(rng.choice(sum(sizes), min(sample, sum(sizes)), replace=False))
    starts = np.cumsum([0, *sizes])
    found: list[Row] = []
    for (path, _), start, stop in zip(table.files, starts[:-1], starts[1:], strict=True):
        inside = places[(places >= start) & (places < stop)] - start
        if len(inside):
            found += table.only(path).read().take(pa.array(inside)).to_pylist()
    return found


class Events:
    """The events that some days' examples were made of, and what was known of their items."""

    def __init__(self, lake: Lake, days: list[date]) -> None:
        self.lake, self.spec = lake, lake.spec
        self._all, self._history = self._snapshot("events"), self._snapshot("history")
        back = timedelta(days=2 * days_back(self.spec) + 1)
        recent = set(each_day(min(days) - back, max(days)))
        self._recent = self._all.read(EVENT, day=recent)

    def recompute(self, example: Row) -> Row:
        """What an example should hold, by the names of its columns, and its `history`."""
        user, as_of = example["user_id"], example["as_of_ts"]
        own = _rows(self._all.read(EVENT, bucket=example["bucket"]), user_id=user)
        impression = self.spec.event_codes[self.spec.impression]
        mine = [e for e in own if e["type"] == impression and e["day"] == example["day"]]
        ranked = reference.ranked_at(mine, self.spec.request_gap, self.spec.day_end(example["day"]))
        seen = reference.history(own, user, as_of)
        (shown,) = (e for e in mine if e["impression_id"] == example["impression_id"])
        versions = _rows(self._attributes, user_id=user)
        attributes = reference.version_at(versions, as_of)
        _, since, _ = self._items[shown["item_id"]]
        return {
            "as_of_ts": ranked[shown["impression_id"]],
            "hist_len": len(seen),
            "history": [
                (e["visible_ts"], self._items[e["item_id"]][0], e["surface"], e["type"])
                for e in seen
            ],
            "item_ix": self._items[shown["item_id"]][0],
            "user_since": attributes and attributes["valid_from"] // SECOND,
            "item_since": since if since is not None and since < as_of else None,
            **self._counters(shown, as_of),
        }

    def history_of(self, example: Row, gone: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """What an example's pointer shows; what compaction gave up is taken from `gone`."""
        rows = self._history.read(bucket=example["bucket"])
        rows = rows.filter(pc.equal(rows["user_id"], example["user_id"]))
        rows = rows.sort_by([(name, "ascending") for name in ("day", "chunk")]).combine_chunks()
        lengths = rows["events"].to_numpy().astype(np.int64)
        flat = unpack(rows, lengths)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        visible = visible_from(rows["first_ts"].to_numpy(), flat["gaps"], offsets)
        columns = (visible, flat["items"], flat["surfaces"], flat["types"])
        dropped = int(pc.sum(rows["dropped"]).as_py() or 0)
        kept = list(zip(*(column.tolist() for column in columns), strict=True))
        return [*gone[:dropped], *kept][: example["hist_len"]]

    def _counters(self, shown: Row, as_of: int) -> Row:
        spec, widest = self.spec, max(self.spec.counters.windows)
        ts = self._recent["visible_ts"]
        inside = pc.and_(pc.greater_equal(ts, as_of - widest), pc.less(ts, as_of))
        recent = self._recent.filter(inside)
        columns, found = iter(contracts.counter_columns(spec)), {}
        for key in spec.counters.keys:
            wanted = [self._key(shown, part, as_of) for part in key]
            like = [
                e
                for e in self._candidates(recent, shown, key)
                if [self._key(e, part, e["visible_ts"]) for part in key] == wanted
            ]
            like = [] if None in wanted else like
            for window in spec.counters.windows:
                for event in spec.counters.events:
                    code = spec.event_codes[event]
                    found[next(columns)] = reference.count(like, {}, code, as_of, window)
        return found

    def _candidates(self, recent: pa.Table, shown: Row, key: Iterable[str]) -> list[Row]:
        plain = {"user": "user_id", "item": "item_id", "surface": "surface"}
        return _rows(recent, **{plain[p]: shown[plain[p]] for p in key if p in plain})

    def _key(self, event: Row, part: str, second: int) -> object:
        """One key of a counter: a column of the event, or what was known of its item by then."""
        if part in {"user", "item"}:
            return event[f"{part}_id"]
        if part == "surface":
            return event["surface"]
        _, since, keys = self._items[event["item_id"]]
        return keys[f"k_{part}"] if since is not None and since < second else None

    @cached_property
    def _items(self) -> dict[str, tuple[int, int | None, Row]]:
        """Index, the second since which anything is known, and the first keys, of each item."""
        first: dict[int, Row] = {}
        for row in self._snapshot("item_versions").read().to_pylist():
            before = first.setdefault(row["item_ix"], row)
            if (row["valid_from"], row["day"]) < (before["valid_from"], before["day"]):
                first[row["item_ix"]] = row
        index = self._snapshot("items").read().to_pylist()
        return {
            row["item_id"]: (ix, known["valid_from"] // SECOND, known)
            if (known := first.get(ix := row["item_ix"]))
            else (ix, None, {})
            for row in index
        }

    @cached_property
    def _attributes(self) -> pa.Table:
        contract = contracts.attributes(self.spec, "user")
        return snapshot(self.lake, contract).read(["user_id", "valid_from", "day"])

    def _snapshot(self, name: str) -> Snapshot:
        return snapshot(self.lake, getattr(contracts, name)(self.spec))


def _apart(stored: object, found: object) -> tuple[object, object]:
    """The two values; of lists the first place where they differ."""
    if not (isinstance(stored, list) and isinstance(found, list)):
        return stored, found
    pairs = zip(stored, found, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return f"{stored[same:][:1]} at {same}", f"{found[same:][:1]}"


def _rows(table: pa.Table, **equal: object) -> list[Row]:
    for name, value in equal.items():
        table = table.filter(pc.equal(table[name], value))
    found: list[Row] = table.to_pylist()
    return found
