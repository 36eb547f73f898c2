"""Batches: each row and label once, histories without the present, resume anywhere."""

import numpy as np
import pyarrow as pa

from etl.spec.units import date_range
from tests.conftest import FIRST, LAST
from tests.training.conftest import all_labels
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.partition import hash_ids
from training.data.reader import ExampleReader


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


def test_histories_hold_only_events_before_the_request(reader: ExampleReader) -> None:
    window = all_labels(reader)
    for batch in reader.batches([LAST], window, 200, Shuffle(None)):
        assert (batch.history.age_seconds >= 1).all()


def test_user_ids_are_hashed_equally_everywhere() -> None:
    first, second, repeated = hash_ids(pa.array(["u1", "u2", "u1"])).tolist()
    assert first == repeated != second and min(first, second) >= 0
