"""A ranker reads teacher embeddings of the compressor that it was trained with, and no others."""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from etl.tables import arrow, model_schemas
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from ranking.feature_store.materialize import (
    build_feature_store,
    materialize,
    required_lengths,
)
from ranking.feature_store.newer_store import newer_live_store
from ranking.feature_store.request import RankRequest
from ranking.feature_store.store import FeatureStore, StoreMetadata
from ranking.inputs.from_tables import load_teacher_history
from ranking.registry.export import export_ranker
from ranking.registry.manifest import RankerManifest, RankerTraining, read_manifest, write_manifest
from ranking.registry.ranker import ExportedRanker, live_pointer, load_ranker, rankers_folder
from ranking.scoring.calibration import PlattScaling
from ranking.scoring.offsets import RankerCalibration
from ranking.scoring.scorer import input_builder
from ranking.serving.loaded_rankers import LoadedRankers
from ranking.serving.rank import rank_request
from ranking.serving.worker import Worker
from ranking.student.config import StudentTrainConfig
from ranking.student.trained import TrainedStudent, new_student
from ranking.trainer.continuation import continue_training
from ranking.trainer.student_trainer import StudentTrainer
from tests.conftest import FIRST, LAST
from tests.ranking.conftest import SMALL, batch_of
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.teacher.embeddings import load_teacher_embeddings

READS = SMALL.model_copy(update={"teacher_history_length": 4})
CONFIG = StudentTrainConfig(model=READS, batch_rows=64).labels_only()
CONFIG = CONFIG.model_copy(update={"model": READS})
OTHER = "other"
EVE = LAST - timedelta(days=1)


@pytest.fixture(scope="module")
def own(gem_lake: Lake) -> str:
    """The compressor of all embeddings of the shared lake."""
    version = load_teacher_embeddings(gem_lake).compressor_version
    assert version and version != OTHER
    return version


@pytest.fixture
def changed_lake(own_gem_lake: Lake) -> Lake:
    """The embeddings of the last day are of another compressor, as after a new training of GEM."""
    schema = model_schemas.user_teacher_embeddings(own_gem_lake.spec)
    rows = arrow.snapshot(own_gem_lake, schema).read(day=EVE)
    column = rows.schema.get_field_index("compressor_version")
    other = rows.set_column(column, "compressor_version", pa.repeat(OTHER, len(rows)))
    arrow.replace_rows(own_gem_lake, schema, other, f"day = '{EVE}'", {})
    later = arrow.snapshot(own_gem_lake, schema).read(day=LAST).slice(0, 0)
    arrow.replace_rows(own_gem_lake, schema, later, f"day = '{LAST}'", {})
    return own_gem_lake


def reader_of(lake: Lake) -> ExampleReader:
    return ExampleReader.latest(lake, "behaviour", READS.max_length, ("feed",))


def student_of(lake: Lake) -> TrainedStudent:
    torch.manual_seed(0)
    reader = reader_of(lake)
    embeddings = load_teacher_history(lake, READS.input_limits)
    return new_student(reader, READS, len(reader.items), embeddings)


@pytest.fixture(scope="module")
def exported(gem_lake: Lake, own: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker that reads teacher embeddings, with the record of its training."""
    student = student_of(gem_lake)
    student.student.eval()
    snapshot = StudentTrainer(student, CONFIG, None).snapshot(FIRST, 0)
    calibration = RankerCalibration(dict.fromkeys(gem_lake.spec.objectives, PlattScaling()))
    example = student.input_builder(batch_of(reader_of(gem_lake), 30))
    path = tmp_path_factory.mktemp("rankers") / "v1"
    return local_path(export_ranker(path, student, calibration, example, snapshot))


def trained_with(manifest: RankerManifest, compressor: str | None) -> RankerManifest:
    training = manifest.training or RankerTraining(
        config=CONFIG, first_day=FIRST, labels_until=0, newest_labels={}
    )
    training = training.model_copy(update={"compressor_version": compressor})
    return manifest.model_copy(update={"training": training})


def ranker_of(exported: Path, compressor: str | None) -> ExportedRanker:
    ranker = load_ranker(exported)
    return replace(ranker, manifest=trained_with(ranker.manifest, compressor))


def store_of(lake: Lake, folder: Path, *manifests: RankerManifest) -> FeatureStore:
    lengths = required_lengths(manifests)
    return build_feature_store(lake, folder, lake.spec.day_end(LAST), lengths)


def test_a_ranker_records_the_compressor_of_the_embeddings_that_it_learned(
    gem_lake: Lake, exported: Path, own: str
) -> None:
    assert read_manifest(exported).compressor_version == own
    without = new_student(
        reader_of(gem_lake), SMALL, 10, load_teacher_history(gem_lake, SMALL.input_limits)
    )
    assert (
        StudentTrainer(without, CONFIG, None).snapshot(FIRST, 0).record.compressor_version is None
    )


def test_scores_read_the_embeddings_of_the_rankers_compressor_alone(
    changed_lake: Lake, exported: Path, own: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A ranker that was saved before its compressor was recorded reads the latest one."""
    for compressor, expected in ((own, own), (OTHER, OTHER), (None, OTHER)):
        caplog.clear()
        found = input_builder(ranker_of(exported, compressor), changed_lake).teacher_embeddings
        schema = model_schemas.user_teacher_embeddings(changed_lake.spec)
        stored = arrow.snapshot(changed_lake, schema).read(["compressor_version"])
        count = stored["compressor_version"].to_pylist().count(expected)
        assert found.compressor_version == expected and len(found.sort_keys) == count > 0
        is_warned = f"trained with those of {own} reads these alone" in caplog.text
        assert is_warned == (compressor == own)


def test_a_refit_reads_the_embeddings_of_the_rankers_compressor(
    gem_lake: Lake, changed_lake: Lake, own: str
) -> None:
    trainer, until = StudentTrainer(student_of(gem_lake), CONFIG, None), gem_lake.spec.day_end
    trainer.train([FIRST], LabelWindow(0, until(FIRST)))
    snapshot = trainer.snapshot(FIRST, until(FIRST))
    refit = continue_training(reader_of(changed_lake), snapshot, [FIRST], LAST)
    assert refit.student.input_builder.teacher_embeddings.compressor_version == own
    assert refit.snapshot(FIRST, until(LAST)).record.compressor_version == own


def test_a_feature_store_has_the_latest_embeddings_that_promoted_rankers_read(
    changed_lake: Lake, exported: Path, own: str, tmp_path: Path
) -> None:
    manifest = read_manifest(exported)
    versions = [(own,), (OTHER,), (own, OTHER), (None,), ("gone",)]
    expected = [own, OTHER, OTHER, OTHER, None]
    for number, compressors in enumerate(versions):
        manifests = [trained_with(manifest, compressor) for compressor in compressors]
        store = store_of(changed_lake, tmp_path / f"{number}", *manifests)
        assert store.metadata.compressor_version == expected[number]
        with store.read_transaction() as txn:
            assert bool(list(txn.iterate_from("teacher_history", b""))) == bool(expected[number])
        store.close()


@pytest.fixture
def other_store(changed_lake: Lake, exported: Path, tmp_path: Path) -> Iterator[FeatureStore]:
    """A store with embeddings of the other compressor."""
    manifest = trained_with(read_manifest(exported), OTHER)
    store = store_of(changed_lake, tmp_path / "store", manifest)
    yield store
    store.close()


def test_requests_are_ranked_without_embeddings_of_another_compressor(
    changed_lake: Lake, exported: Path, own: str, other_store: FeatureStore, tmp_path: Path
) -> None:
    manifest = read_manifest(exported).model_copy(update={"teacher_history_length": 0})
    empty = store_of(changed_lake, tmp_path / "empty", manifest)
    schema = model_schemas.user_teacher_embeddings(changed_lake.spec)
    user = arrow.snapshot(changed_lake, schema).read(["user_id"], day=EVE)["user_id"][0].as_py()
    items = reader_of(changed_lake).items.item_ids.to_pylist()
    request = RankRequest(user, "feed", items[-3:], as_of=empty.data_until)

    def scores(compressor: str | None, store: FeatureStore) -> np.ndarray:
        ranker = ranker_of(exported, compressor)
        response = rank_request(ranker, store, changed_lake.spec, request)
        found = {ad.item: list(ad.probabilities.values()) for ad in response.ranking}
        return np.array([found[item] for item in sorted(found)])

    without = scores(own, empty)
    assert without.size
    np.testing.assert_array_equal(scores(own, other_store), without)
    for reads in (OTHER, None):
        assert not np.array_equal(scores(reads, other_store), without)
    empty.close()


def test_the_service_reports_once_that_a_ranker_is_served_without_embeddings(
    worker: Worker, own: str, caplog: pytest.LogCaptureFixture
) -> None:
    lake, stored = worker.settings.lake, worker.feature_store.store.metadata
    folder = local_path(rankers_folder(lake, "feed") / "one")
    write_manifest(folder, trained_with(read_manifest(folder), own))
    other, fits = (stored.model_copy(update={"compressor_version": c}) for c in (OTHER, own))
    with caplog.at_level(logging.WARNING, "uvicorn.error"):
        rankers = LoadedRankers(lake, other, False)
        rankers.refresh(other)
        message = f"those of compressor {own}, the feature store has those of {OTHER}"
        assert caplog.text.count(message) == 1 and rankers.versions and not rankers.errors
        LoadedRankers(lake, fits, False)
    assert caplog.text.count("is served without teacher embeddings") == 1


def test_a_newer_store_with_embeddings_that_no_ranker_reads_is_replaced(
    changed_lake: Lake, exported: Path, own: str
) -> None:
    folder = local_path(rankers_folder(changed_lake.root, "feed") / "one")
    shutil.copytree(exported, folder)
    manifest = read_manifest(folder)
    write_manifest(folder, trained_with(manifest, own))
    live_pointer(changed_lake.root, "feed").promote("one")
    materialize(changed_lake, changed_lake.spec.day_end(LAST))
    earlier = changed_lake.spec.day_end(EVE)
    assert newer_live_store(changed_lake, earlier) is not None
    write_manifest(folder, trained_with(manifest, OTHER))
    assert newer_live_store(changed_lake, earlier) is None


def test_stores_and_rankers_of_earlier_versions_load(exported: Path, gem_lake: Lake) -> None:
    """Their compressors are not known: embeddings are read as they were."""
    stored = StoreMetadata(spec=gem_lake.spec, sequence="behaviour", history_length=1)
    old = stored.model_dump_json(exclude={"compressor_version"})
    assert StoreMetadata.model_validate_json(old).compressor_version is None
    manifest = read_manifest(exported)
    text = manifest.model_dump_json(exclude={"training": {"compressor_version"}})
    loaded = RankerManifest.model_validate_json(text)
    assert loaded.compressor_version is None
    assert loaded.limits_with(OTHER) == manifest.limits_with(None) == manifest.input_limits
