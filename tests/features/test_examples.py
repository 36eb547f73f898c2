"""The tables against naive references, on simulated logs with every disorder."""

import random
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from etl.spec.units import format_duration
from etl.tables import contracts
from etl.tables.arrow import replace, snapshot
from etl.tables.lake import Lake
from features import reference
from features.history.pack import dwell_byte
from gemline import main
from tests.conftest import FIRST, LAST
from tests.oracle import events as oracle
from tests.pipeline import rows
from training.data.histories import unpacked

SAMPLE = 150


@pytest.fixture(scope="module")
def events(lake: Lake) -> list[dict]:
    index = {row["item_id"]: row["item_ix"] for row in rows(lake, "items")}
    first: dict[object, dict] = {}
    for row in sorted(rows(lake, "item_versions"), key=lambda row: row["valid_from"]):
        first.setdefault(row["item_ix"], row)
    found = rows(lake, "events")
    for event in found:
        item = first[index[event["item_id"]]]
        event["since"] = item["valid_from"] // 1_000_000
        event["category"] = item["k_category"] if event["since"] < event["visible_ts"] else None
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
                spec.event_codes[spec.attribution_of(objective)[0].touch],
                objective.window * 1_000_000,
                row[f"ready_{name}"],
            )
            assert row[f"label_{name}"] == expected, (name, row)
            positives += expected
    assert positives > 5


def test_labels_are_null_until_their_window_has_closed(lake: Lake) -> None:
    horizon = lake.spec.day_end(LAST) * 1_000_000
    code = lake.spec.event_codes[lake.spec.impression]
    shown = [e for e in rows(lake, "events") if e["type"] == code]
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
    stored = {bucket: unpacked(packed.read(bucket=bucket)) for bucket in range(lake.spec.buckets)}
    for example in sample:
        expected = reference.history(events, example["user_id"], example["as_of_ts"])
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
    code = spec.event_codes[spec.impression]
    shown = {e["impression_id"]: e for e in events if e["type"] == code}
    columns = {"user": "user_id", "item": "item_id"}
    for example in sample[:40]:
        impression = shown[example["impression_id"]]
        since = impression["since"]
        known = since < example["as_of_ts"]
        assert example["item_since"] == (since if known else None)
        for key in spec.counters.keys:
            names = [columns.get(part, part) for part in key]
            matches = {name: impression[name] for name in names}
            relevant = [e for e in events if all(e[n] == v for n, v in matches.items())]
            relevant = relevant if known or "category" not in key else []
            for window in spec.counters.windows:
                for name in spec.counters.events:
                    column = f"n_{'_'.join(key)}_{name}_{format_duration(window)}"
                    code, now = spec.event_codes[name], example["as_of_ts"]
                    expected = reference.count(relevant, {}, code, now, window)
                    assert example[column] == expected, column


def test_brute_force_finds_what_is_wrong_and_nothing_else(
    lake: Lake, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["features", "check", "--spec", str(spec_path), "--sample", "25", "--lake"]
    assert main([*asked, lake.root]) == 0
    assert capsys.readouterr().out == "25 examples recomputed, 0 differ\n"
    wrong = tmp_path / "lake"
    shutil.copytree(lake.root, wrong)
    contract, counter = contracts.examples(lake.spec), "n_user_ad_impression_1d"
    table = snapshot(lake, contract).read()
    for column in (counter, "hist_len"):
        more = pc.add(table[column], pa.scalar(1, pa.int32()))
        table = table.set_column(table.column_names.index(column), column, more)
    replace(Lake(str(wrong), lake.spec), contract, table, f"day >= '{FIRST}'", {})
    assert main([*asked, str(wrong)]) == 2
    said = capsys.readouterr()
    assert "25 examples recomputed, 25 differ" in said.out and "differ from the events" in said.err
    told = {line.split()[1] for line in said.out.splitlines()[:-1]}
    assert {"hist_len", counter} <= told <= {"hist_len", counter, "history"}
