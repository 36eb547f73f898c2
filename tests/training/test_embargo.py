"""The embargo of calibration: a ranker is calibrated on rows of which no part of it has learned."""

from collections import Counter
from datetime import date, timedelta
from itertools import chain

import numpy as np
import pyarrow.compute as pc
import pytest

from etl.spec.units import each_day
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from training.data.reader import Reader
from training.data.ripened import Ripened
from training.split import Split

Label = tuple[str, int]


def labels(reader: Reader, days: list[date], ripened: Ripened) -> list[Label]:
    """Impression and objective of each label that a pass is about."""
    found = []
    for _, chunk in reader.chunks(days, range(reader.lake.spec.buckets), ripened):
        rows, columns = np.nonzero(chunk.known)
        found += zip(chunk.impressions[rows].tolist(), columns.tolist(), strict=True)
    return found


def span(lake: Lake, day: date) -> Ripened:
    """What a model learns on a day."""
    return Ripened(lake.spec.day_start(day), lake.spec.day_end(day), "training")


@pytest.fixture
def slow(own: Lake) -> Lake:
    """Tables in which conversions become final a day later than clicks."""
    contract, horizon = contracts.impressions(own.spec), own.spec.day_end(LAST) * 10**6
    table = arrow.snapshot(own, contract).read()
    ready = pc.add(table["ready_conversion"], 86_400 * 10**6)
    label = pc.if_else(pc.less(ready, horizon), table["label_conversion"], None)
    names = table.column_names
    table = table.set_column(names.index("ready_conversion"), "ready_conversion", ready)
    table = table.set_column(names.index("label_conversion"), "label_conversion", label)
    arrow.replace(own, contract, table, f"day >= '{FIRST}'", {})
    return own


@pytest.mark.parametrize("after", [1, 2])
def test_no_label_of_a_calibration_row_was_learned(slow: Lake, after: int) -> None:
    lake = slow
    reader, days = Reader.newest(lake), list(each_day(FIRST, LAST))
    train_last = FIRST + timedelta(days=after)
    split = Split(
        train_first=FIRST, train_last=train_last, calibration=train_last + timedelta(days=1),
        test_first=LAST, test_last=LAST, landed=LAST,
    )  # fmt: skip
    student = labels(reader, list(each_day(FIRST, train_last)), split.learning(lake.spec))
    daily = [labels(reader, days, span(lake, day)) for day in each_day(FIRST, train_last)]
    assert set(chain(*daily)) == set(student), "GEM and students keep to the same embargo"
    calibrating = labels(reader, days, split.calibrating(lake.spec))
    learned = {impression for impression, _ in student}
    assert not learned & {impression for impression, _ in calibrating}
    conversion = list(lake.spec.objectives).index("conversion")
    every = Ripened(0, lake.spec.day_end(LAST))
    earlier = {impression for impression, _ in labels(reader, days[: after + 1], every)}
    waited = [i for i, column in calibrating if column == conversion and i in earlier]
    assert len(waited) > 5, "requests that were held out"


def test_every_label_is_learned_once(slow: Lake) -> None:
    lake = slow
    reader, days = Reader.newest(lake), list(each_day(FIRST, LAST))
    learned = Counter(label for day in days for label in labels(reader, days, span(lake, day)))
    assert set(learned.values()) == {1}
    horizon = lake.spec.day_end(LAST)
    final = set(labels(reader, days, Ripened(0, horizon)))
    longest = list(lake.spec.objectives).index("conversion")
    complete = {impression for impression, column in final if column == longest}
    assert {label for label in final if label[0] in complete} <= learned.keys() <= final
