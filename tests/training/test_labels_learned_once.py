"""Each label is trained on once, and calibrations see only labels that were not trained on."""

from collections import Counter
from collections.abc import Iterable
from datetime import date, timedelta
from itertools import chain

import numpy as np
import pyarrow.compute as pc
import pytest

from etl.spec import DataSpec
from etl.spec.units import DAY, MICROS, DaySplit, date_range
from etl.tables import arrow, label_schemas
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from training.config import TrainConfig
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.trainer.resume import DayBatches, starting_point
from training.trainer.state import latest_reader

CONFIG = TrainConfig(scale="tiny", max_length=0)
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


def delay_labels(lake: Lake, objectives: Iterable[str], days: int) -> None:
    """Let labels of some objectives mature some days later."""
    schema, data_until = label_schemas.impressions(lake.spec), lake.spec.day_end(LAST) * MICROS["s"]
    table = arrow.snapshot(lake, schema).read()
    for objective in objectives:
        mature_ts = pc.add(table[f"label_mature_ts_{objective}"], days * DAY * MICROS["s"])
        label = pc.if_else(pc.less(mature_ts, data_until), table[f"label_{objective}"], None)
        for name, column in (
            (f"label_mature_ts_{objective}", mature_ts),
            (f"label_{objective}", label),
        ):
            table = table.set_column(table.column_names.index(name), name, column)
    arrow.replace_rows(lake, schema, table, f"day >= '{FIRST}'", {})


@pytest.fixture
def slow_lake(own: Lake) -> Lake:
    """Tables in which conversions mature a day later than clicks."""
    delay_labels(own, ["conversion"], 1)
    return own


@pytest.fixture
def late_lake(own: Lake) -> Lake:
    """Tables of impressions that are ingested two days after their landing day."""
    delay_labels(own, own.spec.objectives, 2)
    assert own.spec.allowed_lateness == 2 * DAY
    return own


@pytest.fixture
def delayed_lake(own: Lake) -> Lake:
    """Tables of impressions that are visible three days after their ingest, and so their labels."""
    delay_labels(own, own.spec.objectives, 3)
    dump = own.spec.model_dump()
    log = dump["sources"]["events"]
    columns = log["columns"] | {"type": None}
    dump["sources"]["impressions"] = log | {"columns": columns, "types": {}, "delay": "3d"}
    spec = DataSpec.model_validate(dump)
    vars(spec)["hash"] = own.spec.hash  # that of the tables, which are not built again
    return Lake(own.root, spec)


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


@pytest.mark.parametrize("fixture", ["slow_lake", "late_lake", "delayed_lake"])
def test_every_label_is_trained_on_once(request: pytest.FixtureRequest, fixture: str) -> None:
    """On the days of impressions that the training of a day reads."""
    lake, counts = request.getfixturevalue(fixture), Counter[Label]()
    with process_group():
        reader = latest_reader(lake, CONFIG)
        manifest, _ = starting_point(lake, reader, (FIRST, FIRST), CONFIG)
        for day in date_range(FIRST, LAST):
            epoch = DayBatches(lake, reader, day, manifest).epoch(0)
            counts.update(labels(reader, list(epoch.days), epoch.label_window))
    days = list(date_range(FIRST, LAST))
    assert counts.keys() == set(labels(reader, days, LabelWindow(0, lake.spec.day_end(LAST))))
    assert len(counts) > 500 and set(counts.values()) == {1}
