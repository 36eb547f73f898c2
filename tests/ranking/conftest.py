"""A ranker that has learned nothing, exported: enough for all that is not about quality."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from ranking.calibration import Platt
from ranking.student.config import StudentConfig
from ranking.student.export import export
from ranking.student.trained import TrainedStudent, new_student
from tests.conftest import LAST
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened
from training.knowledge.earlier import Earlier

SMALL = StudentConfig(
    max_length=40, row_width=4, event_width=8, hidden=(16, 8), events=8, user_rows=50
)
FITTED = Platt(slope=1.1, intercept=-0.2)


@pytest.fixture(scope="session")
def reader(lake) -> Reader:
    return Reader.newest(lake, "behaviour", 40, ("feed",))


def batch_of(reader: Reader, rows: int) -> Batch:
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    return next(reader.batches([LAST], ripened, rows, Shuffle(None)))


@pytest.fixture(scope="session")
def student(reader: Reader) -> TrainedStudent:
    torch.manual_seed(0)
    known = reader.items.known_by(LAST - timedelta(days=1))
    items = 1 + int(np.flatnonzero(known).max())
    made = new_student(reader, SMALL, items, Earlier.nothing())
    made.student.eval()
    return made


@pytest.fixture(scope="session")
def folder(student: TrainedStudent, reader: Reader, tmp_path_factory) -> Path:
    versions = tmp_path_factory.mktemp("rankers")
    spec = reader.lake.spec
    fitted = dict.fromkeys(spec.objectives, FITTED)
    return export(versions, student, spec, "v1", fitted, student.assembly(batch_of(reader, 30)))
