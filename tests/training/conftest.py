"""Batches of the small lake, for tests of the model."""

import pytest

from etl.tables.lake import Lake
from tests.conftest import LAST
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader


def all_labels(reader: ExampleReader) -> LabelWindow:
    """The window of all labels that are final at the end of the data."""
    return LabelWindow(0, reader.lake.spec.day_end(LAST))


@pytest.fixture(scope="module")
def reader(lake: Lake) -> ExampleReader:
    return ExampleReader.latest(lake, "behaviour", 64)


@pytest.fixture(scope="module")
def batch(reader: ExampleReader) -> Batch:
    window = all_labels(reader)
    return next(reader.batches([LAST], window, 64, Shuffle(0)))
