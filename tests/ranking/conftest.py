"""Fixtures of rankers and of the service: an untrained ranker, exported, and lakes with it."""

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from etl.spec import DataSpec
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from ranking.feature_store.attributes import upsert_attributes
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.feature_store.wal import feature_store_pointer
from ranking.registry.export import export_ranker
from ranking.registry.ranker import live_pointer, rankers_folder
from ranking.scoring.calibration import PlattScaling
from ranking.scoring.offsets import RankerCalibration
from ranking.serving.app import create_app
from ranking.serving.settings import SETTINGS_VARIABLE, ServiceLimits, Settings
from ranking.serving.worker import Worker
from ranking.student.config import StudentConfig
from ranking.student.trained import TrainedStudent, new_student
from tests.conftest import LAST
from tests.ranking.forecasts import EVERYTHING, World
from tests.ranking.served import ITEMS, advertised
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.teacher.embeddings import TeacherEmbeddings

SMALL = StudentConfig(
    max_length=40,
    embedding_dim=4,
    event_width=8,
    hidden=(16, 8),
    encoded_events=8,
    user_hash_buckets=50,
)
FITTED = PlattScaling(slope=1.1, intercept=-0.2)
EVE = LAST - timedelta(days=1)
MOST_BYTES = 1_000_000


@pytest.fixture(scope="session")
def sampled_world() -> World:
    return World(0, 4000)


@pytest.fixture(scope="session")
def complete_world() -> World:
    return World(0, EVERYTHING)


@pytest.fixture(scope="session")
def reader(lake: Lake) -> ExampleReader:
    return ExampleReader.latest(lake, "behaviour", 40, ("feed",))


def batch_of(reader: ExampleReader, rows: int) -> Batch:
    """The first batch of the last day, with about the given number of examples."""
    window = LabelWindow(0, reader.lake.spec.day_end(LAST))
    return next(reader.batches([LAST], window, rows, Shuffle(None)))


@pytest.fixture(scope="session")
def batch(reader: ExampleReader) -> Batch:
    return batch_of(reader, 40)


def untrained_student(reader: ExampleReader, seed: int) -> TrainedStudent:
    """A student of random weights that knows all items."""
    torch.manual_seed(seed)
    student = new_student(reader, SMALL, len(reader.items), TeacherEmbeddings.empty())
    student.student.eval()
    return student


def other_inputs(spec: DataSpec) -> dict[str, dict[str, object]]:
    """Changes of what models read and tables do not depend on, by key."""
    stream = spec.sequences["behaviour"].model_copy(update={"events": ("ad_click",)})
    assert spec.similarity_attributes and spec.position_bias
    return {
        "similarity_attributes": {"similarity_attributes": ()},
        "sequences": {"sequences": {**spec.sequences, "behaviour": stream}},
        "position_bias": {
            "position_bias": spec.position_bias.model_copy(update={"served_position": 1})
        },
    }


@pytest.fixture(scope="session")
def student(reader: ExampleReader) -> TrainedStudent:
    torch.manual_seed(0)
    seen = reader.items.seen_by(LAST - timedelta(days=1))
    num_items = 1 + int(np.flatnonzero(seen).max())
    student = new_student(reader, SMALL, num_items, TeacherEmbeddings.empty())
    student.student.eval()
    return student


@pytest.fixture(scope="session")
def folder(
    student: TrainedStudent, reader: ExampleReader, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of an exported ranker."""
    path = tmp_path_factory.mktemp("rankers") / "v1"
    calibration = RankerCalibration(dict.fromkeys(reader.lake.spec.objectives, FITTED))
    example = student.input_builder(batch_of(reader, 30))
    exported = export_ranker(path, student, calibration, example)
    assert isinstance(exported, Path)
    return exported


@pytest.fixture(scope="session")
def served_lake(lake: Lake, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake without tables: two rankers, and feature stores of the last day and the one before."""
    root = tmp_path_factory.mktemp("served")
    for version in ("one", "two"):
        shutil.copytree(folder, local_path(rankers_folder(str(root), "feed") / version))
    for day in (EVE, LAST):
        lengths = HistoryLengths("behaviour", SMALL.max_length)
        end = lake.spec.day_end(day)
        store = build_feature_store(lake, root / "feature_store" / f"{day}", end, lengths)
        with store.write_transaction() as txn:
            for item in ITEMS:
                upsert_attributes(store, txn, "item", advertised(item), store.earliest_request)
        store.close()
    return root


@pytest.fixture
def settings(served_lake: Path, spec_path: Path, tmp_path: Path) -> Settings:
    root = tmp_path / "lake"
    shutil.copytree(served_lake, root)
    live_pointer(str(root), "feed").promote("one")
    feature_store_pointer(str(root)).promote(str(EVE))
    return Settings(spec=spec_path, lake=str(root), limits=ServiceLimits(max_body_bytes=MOST_BYTES))


@pytest.fixture
def worker(settings: Settings) -> Iterator[Worker]:
    worker = Worker(settings)
    yield worker
    worker.close()


@pytest.fixture
def client(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
    local = "http://localhost"
    with TestClient(create_app(), local, raise_server_exceptions=False) as test_client:
        yield test_client
