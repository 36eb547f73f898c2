"""Tables against reference implementations, on simulated logs with every disorder."""

import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from etl.spec.units import format_duration
from etl.tables import schemas
from etl.tables.arrow import Snapshot, replace_rows, snapshot
from etl.tables.lake import Lake
from features import reference, validation_inputs
from features.history.codec import quantize_dwell
from features.validation import validate_examples
from gemline import main
from tests.conftest import FIRST, LAST
from tests.oracle import events as oracle
from tests.pipeline import rows
from tests.small_pipeline import SmallPipeline
from training.data.histories import histories_from_table

Row = dict[str, Any]
MICROS = 1_000_000
SAMPLE = 150


@pytest.fixture(scope="module")
def events(lake: Lake) -> list[Row]:
    index = {row["item_id"]: row["item_index"] for row in rows(lake, "items")}
    first: dict[object, Row] = {}
    for row in sorted(rows(lake, "item_versions"), key=lambda row: row["valid_from"]):
        first.setdefault(row["item_index"], row)
    events = rows(lake, "events")
    for event in events:
        item = first[index[event["item_id"]]]
        event["since"] = item["valid_from"] // MICROS
        event["category"] = item["key_category"] if event["since"] < event["visible_ts"] else None
    return events


@pytest.fixture(scope="module")
def sample(lake: Lake) -> list[Row]:
    return random.Random(0).sample(rows(lake, "examples"), SAMPLE)


def test_labels_equal_those_of_the_reference(lake: Lake, events: list[Row]) -> None:
    spec = lake.spec
    impressions = rows(lake, "impressions")
    converted = {e["user_id"] for e in events if e["type"] == spec.event_codes["conversion"]}
    of_converted = [row for row in impressions if row["user_id"] in converted]
    by_user = defaultdict(list)
    for event in events:
        by_user[event["user_id"]].append(event)
    positives, dwells = 0, 0
    for row in random.Random(1).sample(impressions, 60) + of_converted[:150]:
        for name, objective in spec.all_objectives.items():
            if row[f"label_{name}"] is None:
                continue
            touch = spec.attribution_touches(objective)[0].touch
            rule = oracle.LabelRule(
                spec.event_codes[objective.event],
                spec.event_codes[touch],
                objective.window * MICROS,
            )
            mature_ts = row[f"label_mature_ts_{name}"]
            outcomes = oracle.outcomes(by_user[row["user_id"]], row, rule, mature_ts)
            assert row[f"label_{name}"] == bool(outcomes), (name, row)
            positives += bool(outcomes)
            if objective.summed_column == "dwell_ms":
                dwell = sum(e["dwell_ms"] for e in outcomes) if outcomes else None
                assert row[f"dwell_ms_{name}"] == dwell
                dwells += dwell is not None
    assert positives > 5 < dwells


def test_labels_are_null_until_their_window_has_closed(lake: Lake) -> None:
    data_end = lake.spec.day_end(LAST) * MICROS
    code = lake.spec.event_codes[lake.spec.impression_type]
    impressions = [e for e in rows(lake, "events") if e["type"] == code]
    visible_ts = {e["impression_id"]: e["visible_ts"] * MICROS for e in impressions}
    for row in rows(lake, "impressions"):
        for name, objective in lake.spec.all_objectives.items():
            window_end = row["event_ts"] + objective.label_maturity_seconds * MICROS
            mature_ts = row[f"label_mature_ts_{name}"]
            assert mature_ts == max(window_end, visible_ts[row["impression_id"]])
            assert (row[f"label_{name}"] is None) == (mature_ts >= data_end)


def test_a_pointer_selects_exactly_the_visible_events(
    lake: Lake, events: list[Row], sample: list[Row]
) -> None:
    packed = snapshot(lake, schemas.history(lake.spec))
    index = {row["item_id"]: row["item_index"] for row in rows(lake, "items")}
    histories_by_bucket = {
        bucket: histories_from_table(packed.read(bucket=bucket))
        for bucket in range(lake.spec.buckets)
    }
    for example in sample:
        expected = reference.visible_history(events, example["user_id"], example["as_of_ts"])
        assert example["history_length"] == len(expected)
        if not expected:
            continue
        histories = histories_by_bucket[example["bucket"]]
        stored = histories.events
        user = histories.users.to_pylist().index(example["user_id"])
        start = stored.offsets[user]
        pointed = slice(start, start + example["history_length"])
        assert stored.visible_ts[pointed].tolist() == [e["visible_ts"] for e in expected]
        assert stored.event_ts[pointed].tolist() == [e["event_ts"] // MICROS for e in expected]
        assert stored.item_indexes[pointed].tolist() == [index[e["item_id"]] for e in expected]
        assert stored.types[pointed].tolist() == [e["type"] for e in expected]
        assert stored.surfaces[pointed].tolist() == [e["surface"] for e in expected]
        dwells = [float("nan") if e["dwell_ms"] is None else e["dwell_ms"] for e in expected]
        assert stored.dwells[pointed].tolist() == quantize_dwell(np.array(dwells)).tolist()


def test_counters_equal_those_of_the_reference(
    lake: Lake, events: list[Row], sample: list[Row]
) -> None:
    spec = lake.spec
    code = spec.event_codes[spec.impression_type]
    impressions = {e["impression_id"]: e for e in events if e["type"] == code}
    columns = {"user": "user_id", "item": "item_id"}
    for example in sample[:40]:
        impression = impressions[example["impression_id"]]
        since, as_of = impression["since"], example["as_of_ts"]
        is_known = since < as_of
        assert example["item_known_since"] == (since if is_known else None)
        for key in spec.counters.keys:
            names = [columns.get(part, part) for part in key]
            values = {name: impression[name] for name in names}
            matching = [e for e in events if all(e[n] == v for n, v in values.items())]
            matching = matching if is_known or "category" not in key else []
            for window in spec.counters.windows:
                for name in spec.counters.events:
                    column = f"cnt_{'_'.join(key)}_{name}_{format_duration(window)}"
                    code = spec.event_codes[name]
                    expected = reference.count_matching_events(matching, {}, code, as_of, window)
                    assert example[column] == expected, column


def test_validation_reports_wrong_columns_and_only_those(
    small_lake: Lake,
    small_pipeline: SmallPipeline,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of counters of all kinds."""
    lake, spec = small_lake, str(small_pipeline.spec)
    command = ["features", "check", "--spec", spec, "--sample", "25", "--lake"]
    assert main([*command, lake.root]) == 0
    assert capsys.readouterr().out == "25 examples recomputed, 0 differ\n"
    wrong = tmp_path / "lake"
    shutil.copytree(lake.root, wrong)
    contract = schemas.examples(lake.spec)
    counters = {"cnt_user_ad_impression_1d", "decayed_user_ad_impression_10m"}
    table = snapshot(lake, contract).read()
    for column in (*counters, "history_length"):
        increased = pc.add(table[column], pa.scalar(1, table[column].type))
        table = table.set_column(table.column_names.index(column), column, increased)
    replace_rows(Lake(str(wrong), lake.spec), contract, table, f"day >= '{FIRST}'", {})
    assert main([*command, str(wrong)]) == 2
    output = capsys.readouterr()
    assert "25 examples recomputed, 25 differ" in output.out
    assert "differ from the events" in output.err
    reported = {line.split()[1] for line in output.out.splitlines()[:-1]}
    assert {"history_length", *counters} <= reported
    assert reported <= {"history_length", *counters, "history"}


def test_validation_reads_only_rows_of_the_sampled_users_and_items(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counters of keys without user and item are left out where they need too many events."""
    read: list[pa.Table] = []

    def recording(method: Callable[..., pa.Table]) -> Callable[..., pa.Table]:
        def record(*args: Any, **kwargs: Any) -> pa.Table:
            read.append(method(*args, **kwargs))
            return read[-1]

        return record

    monkeypatch.setattr(validation_inputs, "MAX_SHARED_EVENTS", 10)
    with monkeypatch.context() as recorded:
        for method in (Snapshot.read, Snapshot.read_matching, Snapshot.take):
            recorded.setattr(Snapshot, method.__name__, recording(method))
        examples = validation_inputs.sample_examples(lake, 3, seed=1)
        assert sum(map(len, read)) == 3, "of examples, only the sampled rows are kept"
        assert not [found for found in validate_examples(lake, 3, seed=1) if found[1]]
    left_out = [key for key in lake.spec.counters.keys if not {"user", "item"} & {*key}]
    assert left_out and capsys.readouterr().out.count("are left out") == len(left_out)
    ids = {row["impression_id"] for row in examples}
    shown = [row for row in rows(lake, "impressions") if row["impression_id"] in ids]
    users, items = ({row[name] for row in shown} for name in ("user_id", "item_id"))
    for table in read:
        for row in table.to_pylist() if "user_id" in table.column_names else ():
            assert row["user_id"] in users or row.get("item_id") in items
    num_events = sum(len(table) for table in read if "event_id" in table.column_names)
    assert 0 < num_events < len(rows(lake, "events")) / 2


def test_validation_reads_a_bounded_number_of_events_of_items(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counters of the most frequent items are left out."""
    examples = validation_inputs.sample_examples(lake, 20, seed=1)
    sampled = {row["impression_id"] for row in examples}
    events = rows(lake, "events")
    items = {event["item_id"] for event in events if event["impression_id"] in sampled}
    counts = Counter(event["item_id"] for event in events if event["item_id"] in items)
    limit = sum(sorted(counts.values())[: len(items) // 2])
    monkeypatch.setattr(validation_inputs, "MAX_ITEM_EVENTS", limit)
    inputs = validation_inputs.SampledRows(lake, examples)
    assert 0 < len(inputs.events_of_key(["item"])) <= limit
    assert 0 < inputs.num_uncounted_items < len(items)
    assert not [found for found in validate_examples(lake, 20, seed=1) if found[1]]
    assert f"for {inputs.num_uncounted_items} sampled items" in capsys.readouterr().out
