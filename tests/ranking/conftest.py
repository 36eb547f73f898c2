"""A ranker that has learned nothing, exported: enough for all that is not about quality."""

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from ranking.calibration import Platt
from ranking.online.attributes import upsert_attributes
from ranking.online.build import build
from ranking.online.live import stores
from ranking.package.versions import current, versions
from ranking.serve.app import create
from ranking.serve.settings import NAME, Limits, Settings
from ranking.serve.worker import Worker
from ranking.student.config import StudentConfig
from ranking.student.export import export
from ranking.student.trained import TrainedStudent, new_student
from tests.conftest import LAST
from tests.ranking.served import ITEMS, advertised
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened
from training.knowledge.earlier import Earlier

SMALL = StudentConfig(
    max_length=40, row_width=4, event_width=8, hidden=(16, 8), events=8, user_rows=50
)
FITTED = Platt(slope=1.1, intercept=-0.2)
EVE = LAST - timedelta(days=1)
MOST_BYTES = 1_000_000


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


@pytest.fixture(scope="session")
def served_lake(lake, folder: Path, tmp_path_factory) -> Path:
    """A lake with rankers and stores only: of the eve, and of the last day."""
    root = tmp_path_factory.mktemp("served")
    for version in ("one", "two"):
        shutil.copytree(folder, versions(str(root), "feed") / version)
    for day in (EVE, LAST):
        store = build(lake, root / "online" / f"{day}", day, "behaviour", SMALL.max_length, 0)
        with store.writing() as txn:
            for item in ITEMS:
                upsert_attributes(store, txn, "item", advertised(item), store.first_request)
        store.close()
    return root


@pytest.fixture
def settings(served_lake: Path, spec_path: Path, tmp_path: Path) -> Settings:
    root = tmp_path / "lake"
    shutil.copytree(served_lake, root)
    current(str(root), "feed").swap("one")
    stores(str(root)).swap(str(EVE))
    return Settings(spec=spec_path, lake=str(root), limits=Limits(body_bytes=MOST_BYTES))


@pytest.fixture
def worker(settings: Settings) -> Iterator[Worker]:
    made = Worker(settings)
    yield made
    made.close()


@pytest.fixture
def client(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv(NAME, settings.model_dump_json())
    local = "http://localhost"
    with TestClient(create(), local, raise_server_exceptions=False) as found:
        yield found
