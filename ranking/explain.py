"""One page of text on one impression: what was known of it then, and what was said of it."""

import gzip
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import MICROS, format_duration
from etl.tables import arrow, contracts
from etl.tables.contract import Contract
from etl.tables.lake import Lake
from etl.tables.place import Place, place
from features.history.pack import dwell_ms
from training.data.histories import load_histories

RECENT = 20
Row = dict[str, Any]


def explain(lake: Lake, impression: str) -> str:
    """The page; raises UserError where no such impression is in the lake."""
    spec = lake.spec
    event = _one(lake, contracts.events(spec), impression, types=spec.event_codes[spec.impression])
    if event is None:
        raise UserError(
            f"no impression {impression!r} in {lake.root}; ids are in the column impression_id of "
            "table events"
        )
    where = {"day": event["day"], "bucket": event["bucket"]}
    shown = _one(lake, contracts.impressions(spec), impression, **where)
    example = _one(lake, contracts.examples(spec), impression, **where)
    as_of = example["as_of_ts"] * MICROS["s"] if example else event["event_ts"]
    sections = [
        _section(f"impression {impression}", _identity(spec, event)),
        _section("raw record", _raw(event)),
        _section("user, as of then", _attributes(lake, "user", event, as_of)),
        _section("item, as of then", _attributes(lake, "item", event, as_of)),
        _section("labels", _labels(spec, shown)),
        _section("what models read, as of then", _features(lake, event, example)),
        _section(f"history, the last {RECENT} events before it", _history(lake, event, example)),
        _section("GEM", _knowledge(lake, impression, where)),
        _section("ranker", _ranker(lake, impression, spec, event)),
    ]
    return "\n".join(sections)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, "-" * len(title), *(lines or ["none"]), ""])


def _one(
    lake: Lake, contract: Contract, impression: str, types: int | None = None, **where: object
) -> Row | None:
    """The row of an impression, in the given partitions."""
    if not lake.exists(contract.name):
        return None
    snapshot = arrow.snapshot(lake, contract)
    names = ["impression_id"] if types is None else ["impression_id", "type"]
    for path, values in snapshot.files:
        if any(values[key] != value for key, value in where.items() if key in values):
            continue
        part = snapshot.only(path)
        found = pc.equal(part.read(names)["impression_id"], impression)
        if types is not None:
            found = pc.and_(found, pc.equal(part.read(names)["type"], types))
        if pc.any(found).as_py():
            row: Row = part.read().filter(found).to_pylist()[0]
            return row
    return None


def time_of(micros: int) -> str:
    """Microseconds as people read them, in UTC."""
    return f"{datetime.fromtimestamp(micros / 1e6, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _identity(spec: DataSpec, event: Row) -> list[str]:
    surface = next(name for name, code in spec.surface_codes.items() if code == event["surface"])
    return [
        f"user {event['user_id']}, item {event['item_id']}, surface {surface}, "
        f"position {event['position']}",
        f"happened {time_of(event['event_ts'])}, ingested {time_of(event['ingest_ts'])}, "
        f"visible {time_of(event['visible_ts'] * MICROS['s'])}, landed {event['day']}",
        *(f"{name.removeprefix('x_')}: {v}" for name, v in event.items() if name.startswith("x_")),
    ]


def _raw(event: Row) -> list[str]:
    """The file and line that the event came from, if the file is still there."""
    path = place(unquote(event["source_file"].removeprefix("file://")))
    if not path.is_file():
        return [f"{path} (no longer there)"]
    whole, *parts = (
        re.compile(rf"(?<!\w){re.escape(key)}(?!\w)")
        for key in (event["event_id"], *event["event_id"].split("-"))
    )
    for number, line in enumerate(_lines(path), 1):
        if whole.search(line) or all(part.search(line) for part in parts):
            return [f"{path}:{number}", line.rstrip()]
    return [f"{path} (not a text file, or changed since)"]


def _lines(path: Place) -> Iterator[str]:
    if path.suffix == ".parquet":
        return
    if path.suffix == ".gz":
        with path.open("rb") as stored, gzip.open(stored, "rt", errors="replace") as packed:
            yield from packed
    else:
        with path.open(errors="replace") as plain:
            yield from plain


def _attributes(lake: Lake, entity: str, event: Row, as_of: int) -> list[str]:
    """The version of a user's or an item's attributes that held strictly before a time, in µs."""
    contract, key = contracts.attributes(lake.spec, entity), f"{entity}_id"
    if not lake.exists(contract.name):
        return []
    stored = arrow.snapshot(lake, contract).read()
    held = pc.and_(pc.equal(stored[key], event[key]), pc.less(stored["valid_from"], as_of))
    versions = stored.filter(held).sort_by("valid_from").to_pylist()
    if not versions:
        return ["no version of its attributes was known before"]
    newest = versions[-1]
    values = [
        f"{name.removeprefix('x_')}: {value}"
        for name, value in newest.items()
        if name not in {key, "valid_from", "day"}
    ]
    return [f"valid from {time_of(newest['valid_from'])}, landed {newest['day']}", *values]


def _labels(spec: DataSpec, shown: Row | None) -> list[str]:
    if shown is None:
        return []
    lines = []
    for name, objective in spec.objectives.items():
        label, ready = shown[f"label_{name}"], time_of(shown[f"ready_{name}"])
        said = "not final yet" if label is None else f"{label}"
        worth = f", value {shown[f'value_{name}']}" if objective.value and label else ""
        window = format_duration(objective.window)
        lines.append(f"{name} within {window}: {said}{worth} (final from {ready})")
    return lines


def _features(lake: Lake, event: Row, example: Row | None) -> list[str]:
    if example is None:
        return []
    spec = lake.spec
    versions = arrow.snapshot(lake, contracts.item_versions(spec)).read()
    before = pc.less(versions["valid_from"], example["as_of_ts"] * MICROS["s"])
    held = pc.and_(pc.equal(versions["item_ix"], example["item_ix"]), before)
    item = versions.filter(held).sort_by("valid_from").to_pylist()
    read = example | (item[-1] if item else {})
    named = [f"{n}: {v}" for n, v in read.items() if n[:2] in {"u_", "x_", "i_"}]
    lines = [f"encoded: {', '.join(named)}", "counters that are not zero:"]
    columns = iter(contracts.counter_columns(spec))
    for key in spec.counters.keys:
        for window in spec.counters.windows:
            counts = [(event, example[next(columns)]) for event in spec.counters.events]
            said = ", ".join(f"{event} {n}" for event, n in counts if n)
            lines += [f"{' x '.join(key)}, {format_duration(window)}: {said}"] if said else []
    return lines


def _history(lake: Lake, event: Row, example: Row | None) -> list[str]:
    if example is None or not example["hist_len"]:
        return []
    spec = lake.spec
    contract = contracts.history(spec)
    stored = load_histories(arrow.snapshot(lake, contract), event["bucket"])
    as_of, length = np.array([example["as_of_ts"]]), np.array([example["hist_len"]])
    recent = stored.slices(stored.find(pa.array([event["user_id"]])), as_of, length, RECENT).events
    items = arrow.snapshot(lake, contracts.items(spec)).read(["item_id", "item_ix"])
    names = dict(zip(items["item_ix"].to_pylist(), items["item_id"].to_pylist(), strict=True))
    types = {code: name for name, code in spec.event_codes.items()}
    surfaces = {code: name for name, code in spec.surface_codes.items()}
    lines = [f"{example['hist_len']} events in all, version {example['history_version']}"]
    for one, dwell in zip(recent, dwell_ms(recent["dwell"]), strict=True):
        lines.append(
            f"{example['as_of_ts'] - one['visible_ts']:>9,} s before  {types[one['type']]:<14} "
            f"{surfaces[one['surface']]:<10} {names.get(one['item'])}"
            + ("" if np.isnan(dwell) else f"  {dwell / 1000:.1f} s")
        )
    return lines


def _knowledge(lake: Lake, impression: str, where: Row) -> list[str]:
    row = _one(lake, contracts.knowledge(lake.spec), impression, **where)
    if row is None:
        return []
    said = [
        f"{name}: {1 / (1 + np.exp(-row[f'logit_{name}'])):.5f}"
        for name in lake.spec.objectives
        if row[f"logit_{name}"] is not None
    ]
    return [f"{row['fm_version']}, trained until {row['fm_trained_until']}", *said]


def _ranker(lake: Lake, impression: str, spec: DataSpec, event: Row) -> list[str]:
    surface = next(name for name, code in spec.surface_codes.items() if code == event["surface"])
    row = _one(lake, contracts.scores(spec), impression, surface=surface, day=event["day"])
    if row is None:
        return []
    said = [f"{name}: {row[f'p_{name}']:.5f}" for name in spec.objectives]
    price = f"bid {row['bid']}, " if spec.auction else ""
    place = "out of the auction" if row["place"] is None else f"place {row['place']} of its request"
    worth = f"{price}expected value {row['expected_value']:.6f}, {place}"
    return [f"ranker {row['ranker']} of {surface}", *said, worth]
