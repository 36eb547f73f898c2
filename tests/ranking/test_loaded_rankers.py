"""A surface whose ranker cannot be loaded does not affect the other surfaces."""

import asyncio
import logging
import shutil
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from etl.errors import UserError
from etl.spec import DataSpec
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from ranking.feature_store.materialize import materialize
from ranking.feature_store.store import METADATA_KEY, StoreMetadata, open_store
from ranking.feature_store.wal import feature_store_pointer
from ranking.registry.manifest import (
    MANIFEST,
    TABLES_FILE,
    TEST_VECTORS_FILE,
    USER_ONNX,
    RankerTraining,
    read_manifest,
    write_manifest,
)
from ranking.registry.ranker import ExportedRanker, live_pointer, rankers_folder
from ranking.serving.app import create_app
from ranking.serving.loaded_rankers import MIN_RETRY_SECONDS, RankersBySurface
from ranking.serving.schemas import EventPayload, EventsRequest, RankRequestBody
from ranking.serving.settings import SETTINGS_VARIABLE, Settings
from ranking.serving.worker import Worker
from ranking.student.config import StudentTrainConfig
from tests.conftest import LAST
from tests.ranking.conftest import EVE
from tests.ranking.poster import times_counted
from tests.ranking.served import click_of, rank_body

SURFACES = ("feed", "reels", "messaging")


def ranker_folder(lake: str, surface: str, version: str) -> Path:
    return Path(str(rankers_folder(lake, surface))) / version


@pytest.fixture
def lake_of_three(settings: Settings) -> str:
    """A lake in which each surface has two versions of a ranker; `one` is promoted."""
    for surface in SURFACES:
        for version in ("one", "two"):
            folder = ranker_folder(settings.lake, surface, version)
            if surface != "feed":
                shutil.copytree(ranker_folder(settings.lake, "feed", version), folder)
            changes = {"surface": surface, "version": version}
            write_manifest(folder, read_manifest(folder).model_copy(update=changes))
        live_pointer(settings.lake, surface).promote("one")
    return settings.lake


def damage_ranker(lake: str, surface: str, how: str) -> None:
    """Damage the promoted ranker of a surface, or its pointer."""
    pointer = live_pointer(lake, surface)
    folder = pointer.live_folder
    assert isinstance(folder, Path)
    if how == "pointer":
        pointer.path.write_text("{")
    elif how == "manifest":
        (folder / MANIFEST).write_text("{")
    elif how == "bytes":
        (folder / TABLES_FILE).write_bytes((folder / TABLES_FILE).read_bytes()[:-1])
    elif how == "gone":
        shutil.rmtree(folder)
    else:  # a file with a matching hash that cannot be loaded
        manifest = read_manifest(folder)
        (folder / how).write_bytes(b"no program")
        write_manifest(folder, manifest)


DAMAGES = ["pointer", "manifest", "bytes", "gone", USER_ONNX, TABLES_FILE, TEST_VECTORS_FILE]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("surface", ["messaging", "feed"])
def test_the_service_starts_with_the_surfaces_that_can_be_loaded(
    settings: Settings, lake_of_three: str, monkeypatch: pytest.MonkeyPatch, how: str, surface: str
) -> None:
    damage_ranker(lake_of_three, surface, how)
    monkeypatch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
    with TestClient(create_app(), "http://localhost", raise_server_exceptions=False) as client:
        for name in SURFACES:
            answer = client.post("/rank", json=rank_body(surface=name))
            assert answer.status_code == (503 if name == surface else 200), answer.text
        state = client.get("/version").json()
        assert state["ranker_versions"] == {name: "one" for name in SURFACES if name != surface}
        assert list(state["ranker_errors"]) == [surface] and state["ranker_errors"][surface]
        assert client.get("/ready").status_code == 200


def test_the_status_shows_how_old_the_labels_of_a_ranker_are(
    settings: Settings, lake_of_three: str
) -> None:
    """Rankers without a record of their training are left out."""
    folder, until = ranker_folder(lake_of_three, "feed", "one"), int(time.time()) - 7200
    training = RankerTraining(
        config=StudentTrainConfig(),
        first_day=EVE,
        labels_until=until,
        newest_labels={"click": until - 3600, "conversion": 0},
    )
    write_manifest(folder, read_manifest(folder).model_copy(update={"training": training}))
    worker = Worker(settings)
    status = worker.status
    worker.close()
    assert status.labels_until == {"feed": until}
    assert list(status.label_age_seconds) == ["feed"]
    assert 7200 <= status.label_age_seconds["feed"] < 7300
    assert list(status.newest_label_age_seconds) == ["feed"]
    ages = status.newest_label_age_seconds["feed"]
    assert list(ages) == ["click"], "no conversion was learned"
    assert 10_800 <= ages["click"] < 10_900


@pytest.mark.parametrize("how", DAMAGES)
def test_a_refresh_loads_the_surfaces_that_can_be_loaded(
    settings: Settings, lake_of_three: str, how: str
) -> None:
    """Surfaces before and after the damaged one, which keeps its previous ranker."""
    worker = Worker(settings)
    for surface in SURFACES:
        live_pointer(lake_of_three, surface).promote("two")
    damage_ranker(lake_of_three, "reels", how)
    asyncio.run(worker.refresh())
    assert worker.rankers.versions == {"feed": "two", "reels": "one", "messaging": "two"}
    assert list(worker.rankers.errors) == ["reels"]
    live_pointer(lake_of_three, "reels").path.unlink(missing_ok=True)
    live_pointer(lake_of_three, "reels").promote("one")
    asyncio.run(worker.refresh())
    assert worker.rankers.versions["reels"] == "one" and not worker.rankers.errors
    worker.close()


def test_loading_a_damaged_version_is_retried_with_a_delay(
    settings: Settings, lake_of_three: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(settings)
    live_pointer(lake_of_three, "feed").promote("two")
    damage_ranker(lake_of_three, "feed", USER_ONNX)
    loads = record_loads(worker)
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            asyncio.run(worker.refresh())
    assert loads == ["two"] and len(caplog.records) == 1
    # Another surface and another version are loaded without delay.
    live_pointer(lake_of_three, "reels").promote("two")
    shutil.copytree(
        ranker_folder(lake_of_three, "feed", "one"), ranker_folder(lake_of_three, "feed", "3")
    )
    folder = ranker_folder(lake_of_three, "feed", "3")
    write_manifest(folder, read_manifest(folder).model_copy(update={"version": "3"}))
    live_pointer(lake_of_three, "feed").promote("3")
    asyncio.run(worker.refresh())
    assert sorted(loads) == ["3", "two", "two"] and not worker.rankers.errors
    worker.close()


def record_loads(worker: Worker) -> list[str]:
    """A list to which the versions that a worker loads are appended."""
    loads: list[str] = []
    load = worker.rankers._load_ranker

    def recording_load(folder: StoragePath) -> ExportedRanker:
        loads.append(folder.name)
        return load(folder)

    worker.rankers._load_ranker = recording_load
    return loads


def test_a_repaired_version_is_served_after_the_delay(
    settings: Settings, lake_of_three: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(seconds=0.0)
    frozen = SimpleNamespace(monotonic=lambda: clock.seconds)
    monkeypatch.setattr("ranking.serving.loaded_rankers.time", frozen)
    worker = Worker(settings)
    live_pointer(lake_of_three, "feed").promote("two")
    table = ranker_folder(lake_of_three, "feed", "two") / TABLES_FILE
    content = table.read_bytes()
    table.write_bytes(content[:-1])
    asyncio.run(worker.refresh())
    table.write_bytes(content)
    asyncio.run(worker.refresh())
    assert worker.rankers.versions["feed"] == "one"
    clock.seconds = MIN_RETRY_SECONDS
    asyncio.run(worker.refresh())
    assert worker.rankers.versions["feed"] == "two" and not worker.rankers.errors
    worker.close()


def test_rankers_are_refreshed_although_the_store_is_damaged(
    settings: Settings, lake_of_three: str
) -> None:
    worker = Worker(settings)
    (Path(settings.lake) / "feature_store" / str(LAST) / "data.mdb").write_bytes(b"no store")
    feature_store_pointer(settings.lake).promote(str(LAST))
    live_pointer(lake_of_three, "feed").promote("two")
    for _ in range(2):
        asyncio.run(worker.refresh())
    assert worker.rankers.versions["feed"] == "two" and worker.status.feature_store_error
    feature_store_pointer(settings.lake).promote(str(LAST - timedelta(days=1)))
    asyncio.run(worker.refresh())
    assert worker.status.feature_store_error is None
    worker.close()


def test_a_request_after_a_handover_reads_what_was_posted_while_rankers_were_loaded(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The post is acknowledged by the old store, after the log was applied to the newer one."""
    worker = Worker(settings)
    select_rankers, sync = worker.rankers.for_store, worker.feature_store.sync_with_wal
    counted: list[tuple[str, tuple[int, int]]] = []

    async def refresh() -> None:
        loop = asyncio.get_running_loop()

        def post_and_select(metadata: StoreMetadata) -> RankersBySurface:
            body = EventsRequest(events=[EventPayload.model_validate(click_of("late"))])
            post = asyncio.run_coroutine_threadsafe(worker.ingest_events(body), loop)
            assert post.result(timeout=30).accepted == 1
            return select_rankers(metadata)

        monkeypatch.setattr(worker.rankers, "for_store", post_and_select)
        await worker.refresh()

    def count_and_sync() -> None:
        store = worker.feature_store.store
        counted.append((store.folder.name, times_counted(store, "user-late")))
        sync()

    monkeypatch.setattr(worker.feature_store, "sync_with_wal", count_and_sync)
    feature_store_pointer(settings.lake).promote(str(LAST))
    asyncio.run(refresh())
    assert worker.status.feature_store_error is None
    worker.close()
    assert counted == [(str(LAST), (1, 1))]


def promote_changed_store(lake: str, built_with: DataSpec, **changes: object) -> None:
    """Promote the store of the last day, with other metadata."""
    store = open_store(Path(lake) / "feature_store" / str(LAST), built_with)
    with store.write_transaction() as txn:
        changed = store.metadata.model_copy(update=changes)
        txn.put("meta", METADATA_KEY, changed.model_dump_json().encode())
    store.close()
    feature_store_pointer(lake).promote(str(LAST))


def test_a_store_that_lacks_what_a_served_ranker_reads_is_not_served(
    settings: Settings, lake_of_three: str, lake_spec: DataSpec
) -> None:
    worker = Worker(settings)
    num_items = worker.rankers.for_surface("feed").manifest.num_items
    promote_changed_store(lake_of_three, lake_spec, num_items=num_items - 1)
    for _ in range(2):
        asyncio.run(worker.refresh())
        assert worker.feature_store.store.folder.name == str(EVE)
        assert f"{LAST} is not served: the ranker" in str(worker.status.feature_store_error)
    assert len(worker.rankers.versions) == 3 and not worker.rankers.errors
    assert worker.rank(RankRequestBody(**rank_body())).ranking
    promote_changed_store(lake_of_three, lake_spec, num_items=num_items)
    asyncio.run(worker.refresh())
    assert worker.feature_store.store.folder.name == str(LAST)
    assert worker.status.feature_store_error is None
    worker.close()


def test_a_store_and_rankers_that_fit_only_each_other_are_served_together(
    settings: Settings, lake_of_three: str, lake_spec: DataSpec
) -> None:
    assert lake_spec.similarity_attributes
    other = lake_spec.model_copy(update={"similarity_attributes": ()})
    for surface in SURFACES:
        folder = ranker_folder(lake_of_three, surface, "two")
        write_manifest(folder, read_manifest(folder).model_copy(update={"spec": other}))
    worker = Worker(settings)
    promote_changed_store(lake_of_three, lake_spec, spec=other)
    for surface in SURFACES:
        asyncio.run(worker.refresh())
        assert worker.feature_store.store.folder.name == str(EVE)
        assert set(worker.rankers.versions.values()) == {"one"}
        live_pointer(lake_of_three, surface).promote("two")
    asyncio.run(worker.refresh())
    assert worker.feature_store.store.folder.name == str(LAST)
    assert worker.rankers.versions == dict.fromkeys(SURFACES, "two") and not worker.rankers.errors
    worker.close()


@pytest.mark.parametrize("how", ["pointer", "manifest", "bytes", "gone"])
def test_a_damaged_ranker_does_not_prevent_the_next_feature_store(
    lake_of_three: str, lake: Lake, how: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    both = Lake(str(tmp_path / "both"), lake.spec)
    shutil.copytree(lake.root, both.root)
    shutil.copytree(Path(lake_of_three) / "rankers", Path(both.root) / "rankers")
    damage_ranker(both.root, "feed", how)
    end = lake.spec.day_end(LAST)
    assert materialize(both, end) == f"{LAST:%Y%m%d}-1"
    assert "ranker skipped: " in caplog.text
    for surface in SURFACES[1:]:
        damage_ranker(both.root, surface, how)
    with pytest.raises(UserError):
        materialize(both, end)
