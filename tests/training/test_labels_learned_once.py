"""Each label is trained on once, and calibrations see only labels that were not trained on."""

from collections import Counter
from datetime import date, timedelta
from itertools import chain

import numpy as np
import pyarrow.compute as pc
import pytest

from etl.spec.units import MICROS, DaySplit, date_range
from etl.tables import arrow, label_schemas
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader

Label = tuple[str, int]


def labels(reader: ExampleReader, days: list[date], window: LabelWindow) -> list[Label]:
    """Impression and objective of each label in a window."""
    in_window: list[Label] = []
    for _, partition in reader.partitions(days, range(reader.lake.spec.buckets), window):
        rows, columns = np.nonzero(partition.label_mask)
        impressions = partition.impression_ids[rows].tolist()
        in_window += zip(impressions, columns.tolist(), strict=True)
    return in_window


def day_window(lake: Lake, day: date) -> LabelWindow:
    """The labels that a model is trained on on a day."""
    return LabelWindow(lake.spec.day_start(day), lake.spec.day_end(day))


@pytest.fixture
def slow_lake(own: Lake) -> Lake:
    """Tables in which conversions mature a day later than clicks."""
    schema, data_until = label_schemas.impressions(own.spec), own.spec.day_end(LAST) * MICROS["s"]
    table = arrow.snapshot(own, schema).read()
    mature_ts = pc.add(table["label_mature_ts_conversion"], 86_400 * MICROS["s"])
    label = pc.if_else(pc.less(mature_ts, data_until), table["label_conversion"], None)
    for name, column in (("label_mature_ts_conversion", mature_ts), ("label_conversion", label)):
        table = table.set_column(table.column_names.index(name), name, column)
    arrow.replace_rows(own, schema, table, f"day >= '{FIRST}'", {})
    return own


@pytest.mark.parametrize("train_days", [2, 3])
def test_calibration_reads_all_labels_that_became_final_since_training(
    slow_lake: Lake, train_days: int
) -> None:
    lake = slow_lake
    reader, days = ExampleReader.latest(lake), list(date_range(FIRST, LAST))
    train_last = FIRST + timedelta(days=train_days - 1)
    split = DaySplit(
        train_first=FIRST, train_last=train_last, calibration=train_last + timedelta(days=1),
        test_first=LAST, test_last=LAST, data_until=LAST,
    )  # fmt: skip
    window = LabelWindow.for_training(split, lake.spec)
    student = labels(reader, list(date_range(FIRST, train_last)), window)
    gem = [labels(reader, days, day_window(lake, day)) for day in date_range(FIRST, train_last)]
    assert set(chain(*gem)) == set(student), "GEM and students learn the same labels"
    calibration = set(labels(reader, days, LabelWindow.for_calibration(split, lake.spec)))
    assert not calibration & set(student)
    until = LabelWindow(0, lake.spec.day_end(train_last + timedelta(days=1)))
    assert calibration | set(student) == set(labels(reader, days, until))
    conversion = list(lake.spec.objectives).index("conversion")
    learned_clicks = {impression for impression, _ in student}
    assert any(c == conversion and i in learned_clicks for i, c in calibration)


def test_every_label_is_trained_on_once(slow_lake: Lake) -> None:
    lake = slow_lake
    reader, days = ExampleReader.latest(lake), list(date_range(FIRST, LAST))
    counts = Counter(label for day in days for label in labels(reader, days, day_window(lake, day)))
    assert set(counts.values()) == {1}
    assert counts.keys() == set(labels(reader, days, LabelWindow(0, lake.spec.day_end(LAST))))
