"""The tables against naive references, on simulated logs with every disorder."""

import random
from collections import defaultdict
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from etl.spec.units import format_duration
from etl.tables import contracts
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from features.history.pack import dwell_byte
from tests.conftest import FIRST, LAST
from tests.oracle import events as oracle
from tests.pipeline import build_tables, rows
from training.data.histories import load_histories

SAMPLE = 150


@pytest.fixture(scope="module")
def events(lake: Lake) -> list[dict]:
    items = {row["item_id"]: row for row in rows(lake, "items")}
    found = rows(lake, "events")
    for event in found:
        event["category"] = items[event["item_id"]]["k_category"]
    return found


@pytest.fixture(scope="module")
def sample(lake: Lake) -> list[dict]:
    return random.Random(0).sample(rows(lake, "examples"), SAMPLE)


def test_labels_are_those_of_the_reference(lake: Lake, events: list[dict]) -> None:
    spec = lake.spec
    shown = rows(lake, "impressions")
    converted = {e["user_id"] for e in events if e["type"] == spec.event_codes["conversion"]}
    interesting = [row for row in shown if row["user_id"] in converted]
    by_user = defaultdict(list)
    for event in events:
        by_user[event["user_id"]].append(event)
    positives = 0
    for row in random.Random(1).sample(shown, 60) + interesting[:150]:
        for name, objective in spec.objectives.items():
            if row[f"label_{name}"] is None:
                continue
            expected = oracle.label(
                by_user[row["user_id"]],
                row,
                spec.event_codes[objective.event],
                spec.event_codes[objective.credit or spec.impression],
                objective.window * 1_000_000,
                row[f"ready_{name}"],
            )
            assert row[f"label_{name}"] == expected, (name, row)
            positives += expected
    assert positives > 5


def test_labels_are_null_until_their_window_has_closed(lake: Lake) -> None:
    horizon = lake.spec.day_end(LAST) * 1_000_000
    shown = [e for e in rows(lake, "events") if e["type"] == 1]
    landed = {e["impression_id"]: e["visible_ts"] for e in shown}
    for row in rows(lake, "impressions"):
        for name, objective in lake.spec.objectives.items():
            settled = row["event_ts"] + objective.ripens_after * 1_000_000
            assert row[f"ready_{name}"] == max(settled, landed[row["impression_id"]] * 1_000_000)
            assert (row[f"label_{name}"] is None) == (row[f"ready_{name}"] >= horizon)


def test_a_pointer_cuts_exactly_what_was_visible(
    lake: Lake, events: list[dict], sample: list[dict]
) -> None:
    packed = snapshot(lake, contracts.history(lake.spec))
    index = {row["item_id"]: row["item_ix"] for row in rows(lake, "items")}
    stored = {bucket: load_histories(packed, bucket) for bucket in range(lake.spec.buckets)}
    for example in sample:
        expected = oracle.history(events, example["user_id"], example["as_of_ts"])
        assert example["hist_len"] == len(expected)
        bucket = stored[example["bucket"]]
        if not expected:
            continue
        user = bucket.users.to_pylist().index(example["user_id"])
        at = slice(start := bucket.events.offsets[user], start + example["hist_len"])
        got = bucket.events
        assert got.visible_ts[at].tolist() == [e["visible_ts"] for e in expected]
        assert got.event_ts[at].tolist() == [e["event_ts"] // 1_000_000 for e in expected]
        assert got.items[at].tolist() == [index[e["item_id"]] for e in expected]
        assert got.types[at].tolist() == [e["type"] for e in expected]
        assert got.surfaces[at].tolist() == [e["surface"] for e in expected]
        dwells = [float("nan") if e["dwell_ms"] is None else e["dwell_ms"] for e in expected]
        assert got.dwells[at].tolist() == dwell_byte(np.array(dwells)).tolist()


def test_counters_are_those_of_the_reference(
    lake: Lake, events: list[dict], sample: list[dict]
) -> None:
    spec = lake.spec
    shown = {e["impression_id"]: e for e in events if e["type"] == 1}
    columns = {"user": "user_id", "item": "item_id"}
    for example in sample[:40]:
        impression = shown[example["impression_id"]]
        for key in spec.counters.keys:
            names = [columns.get(part, part) for part in key]
            matches = {name: impression[name] for name in names}
            relevant = [e for e in events if all(e[n] == v for n, v in matches.items())]
            for window in spec.counters.windows:
                for name in spec.counters.events:
                    column = f"n_{'_'.join(key)}_{name}_{format_duration(window)}"
                    code, now = spec.event_codes[name], example["as_of_ts"]
                    expected = oracle.count(relevant, {}, code, now, window)
                    assert example[column] == expected, column


@pytest.mark.proof
def test_day_by_day_gives_the_tables_of_one_range(lake: Lake, raw: Path, tmp_path: Path) -> None:
    by_day = Lake(str(tmp_path / "lake"), lake.spec)
    for first, last in ((FIRST, FIRST), (date(2026, 1, 2), LAST), (LAST, LAST)):
        build_tables(by_day, raw, (first, last))
    for name in ("events", "quarantine", "items", "history", "examples", "impressions"):
        assert rows(by_day, name) == rows(lake, name), name
