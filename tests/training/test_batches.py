"""Batches: each row and label once, histories without the present, resume anywhere."""

from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import torch
from deltalake import DeltaTable

from etl.spec.units import date_range
from etl.tables import label_schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from tests.training.conftest import all_labels
from training.config import TrainConfig
from training.data.batch import Shuffle, batch_digest
from training.data.label_window import LabelWindow
from training.data.partition import hash_ids
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.trainer.resume import DayBatches, starting_point, verify_batches
from training.trainer.state import build_train_state, latest_reader
from training.trainer.throughput import ThroughputMeter, Timeline
from training.trainer.trainer import Trainer


def test_batches_hold_each_row_with_final_labels_once_and_resume_anywhere(
    reader: ExampleReader,
) -> None:
    days = list(date_range(FIRST, LAST))
    window = all_labels(reader)
    batches = list(reader.batches(days, window, 50, Shuffle(3)))
    ids = np.concatenate([b.impression_ids for b in batches])
    stored = reader.batches(days, window, 50, Shuffle(None))
    assert sorted(ids) == sorted(np.concatenate([b.impression_ids for b in stored]))
    assert len(set(ids)) == len(ids)
    for skip in (1, len(batches) // 2, len(batches) - 1):
        rest = list(reader.batches(days, window, 50, Shuffle(3), skip_batches=skip))
        assert [b.impression_ids.tolist() for b in rest] == [
            b.impression_ids.tolist() for b in batches[skip:]
        ]
        assert rest[0].history.age_seconds.equal(batches[skip].history.age_seconds)


def test_each_label_becomes_final_on_exactly_one_day(reader: ExampleReader) -> None:
    spec, days = reader.lake.spec, list(date_range(FIRST, LAST))
    labels: list[tuple[str, int]] = []
    for day in days:
        window = LabelWindow(0 if day == FIRST else spec.day_start(day), spec.day_end(day))
        days_so_far = list(date_range(FIRST, day))
        for batch in reader.batches(days_so_far, window, 200, Shuffle(None)):
            rows, objectives = np.nonzero(batch.label_mask.numpy())
            labels += list(zip(batch.impression_ids[rows], objectives, strict=True))
    assert len(labels) == len(set(labels))
    all_batches = reader.batches(days, all_labels(reader), 200, Shuffle(None))
    assert len(labels) == sum(int(batch.label_mask.sum()) for batch in all_batches)


def test_labels_of_an_id_that_two_impressions_have_are_those_of_each_day(own: Lake) -> None:
    """A log may give an id again days later: both impressions are examples."""
    second = FIRST + timedelta(days=1)
    rows = snapshot(own, label_schemas.impressions(own.spec)).read()
    key = ("day", "bucket", "label_click")
    first = {tuple(row[name] for name in key): row["impression_id"] for row in rows.to_pylist()}
    renamed = [first[FIRST, 0, 1], first[second, 0, 0]]
    predicate = " OR ".join(f"impression_id = '{name}'" for name in renamed)
    for table in ("impressions", "examples"):
        DeltaTable(own.table_uri(table)).update({"impression_id": "'again'"}, predicate=predicate)
    reader = ExampleReader.latest(own, max_length=0)
    column = list(own.spec.objectives).index("click")

    def labels(*days: date) -> list[float]:
        return [
            float(batch.labels[row, column])
            for batch in reader.batches(list(days), all_labels(reader), 200, Shuffle(None))
            for row in np.flatnonzero(batch.impression_ids == "again")
        ]

    assert labels(FIRST) == [1] and labels(second) == [0]
    assert sorted(labels(FIRST, second)) == [0, 1]


def test_histories_hold_only_events_before_the_request(reader: ExampleReader) -> None:
    batches = list(reader.batches([LAST], all_labels(reader), 200, Shuffle(None)))
    ages = torch.cat([batch.history.age_seconds for batch in batches])
    assert len(ages) and (ages >= 1).all()


def test_user_ids_are_hashed_equally_everywhere() -> None:
    first, second, repeated = hash_ids(pa.array(["u1", "u2", "u1"])).tolist()
    assert first == repeated != second and min(first, second) >= 0


def test_batches_of_a_day_that_fewer_processes_finish_are_verified_up_to_there(own: Lake) -> None:
    """Two processes made a step; one goes on, and reads both shards in turn."""
    config = TrainConfig(scale="tiny", max_length=8, batch_rows=64, item_table_rows=512, passes=1)
    with process_group():
        reader = latest_reader(own, config)
        manifest, _ = starting_point(own, reader, (FIRST, FIRST), config)
        manifest = manifest.model_copy(update={"num_shards": 2})
        first = next(DayBatches(own, reader, FIRST, manifest).shard_batches(0))
        progress = {"batches": 1, "steps": 1, "consumed_batches": (1, 1)}
        digests = {"first_batch_digests": (batch_digest(first),)}
        state = build_train_state(manifest.model_copy(update=progress | digests))
        Trainer(own, reader, state, ThroughputMeter(Timeline())).train_day(FIRST)
    assert state.manifest.batches > 3 and verify_batches(own, FIRST) == 1
