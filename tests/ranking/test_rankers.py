"""A surface whose ranker cannot be served leaves the others as they are."""

import asyncio
import logging
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from etl.errors import UserError
from etl.tables.lake import Lake
from ranking.online.renew import renew
from ranking.package.manifest import MANIFEST, TABLES, USER, VECTORS, read, write
from ranking.package.versions import current, versions
from ranking.serve.app import create
from ranking.serve.settings import NAME, Settings
from ranking.serve.worker import Worker
from tests.conftest import LAST
from tests.ranking.served import asking

SURFACES = ("feed", "reels", "messaging")
DAMAGED = ("messaging", "feed", "reels")


@pytest.fixture
def lake_of_three(settings: Settings) -> str:
    """A lake in which each surface has two versions of a ranker, of which `one` is promoted."""
    for surface in SURFACES:
        for version in ("one", "two"):
            folder = versions(settings.lake, surface) / version
            if surface != "feed":
                shutil.copytree(versions(settings.lake, "feed") / version, folder)
            told = {"surface": surface, "version": version}
            write(folder, read(folder).model_copy(update=told))
        current(settings.lake, surface).swap("one")
    return settings.lake


def broken(lake: str, surface: str, how: str) -> None:
    """Damage the promoted ranker of a surface, or its pointer."""
    pointer = current(lake, surface)
    folder = pointer.target
    if how == "pointer":
        pointer.path.write_text("{")
    elif how == "manifest":
        (folder / MANIFEST).write_text("{")
    elif how == "bytes":
        (folder / TABLES).write_bytes((folder / TABLES).read_bytes()[:-1])
    elif how == "gone":
        shutil.rmtree(folder)
    else:  # what was made and hashed so, and cannot be loaded
        manifest = read(folder)
        (folder / how).write_bytes(b"no program")
        write(folder, manifest)


HOWS = ["pointer", "manifest", "bytes", "gone", USER, TABLES, VECTORS]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("surface", DAMAGED[:2])
def test_the_service_starts_with_the_surfaces_that_are_whole(
    settings: Settings, lake_of_three: str, monkeypatch: pytest.MonkeyPatch, how: str, surface: str
) -> None:
    broken(lake_of_three, surface, how)
    monkeypatch.setenv(NAME, settings.model_dump_json())
    with TestClient(create(), "http://localhost", raise_server_exceptions=False) as client:
        for name in SURFACES:
            answer = client.post("/rank", json=asking(surface=name))
            assert answer.status_code == (503 if name == surface else 200), answer.text
        state = client.get("/version").json()
        assert state["rankers"] == {name: "one" for name in SURFACES if name != surface}
        assert list(state["ranker_faults"]) == [surface] and state["ranker_faults"][surface]
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("how", HOWS)
def test_a_renewal_takes_up_the_surfaces_that_are_whole(
    settings: Settings, lake_of_three: str, how: str
) -> None:
    """Those before the damaged one and those behind it; the damaged one goes on with the old."""
    worker = Worker(settings)
    for surface in SURFACES:
        current(lake_of_three, surface).swap("two")
    broken(lake_of_three, "reels", how)
    asyncio.run(worker.renew())
    assert worker.rankers.versions == {"feed": "two", "reels": "one", "messaging": "two"}
    assert list(worker.rankers.faults) == ["reels"]
    current(lake_of_three, "reels").path.unlink(missing_ok=True)
    current(lake_of_three, "reels").swap("one")
    asyncio.run(worker.renew())
    assert worker.rankers.versions["reels"] == "one" and not worker.rankers.faults
    worker.close()


def test_a_bad_version_is_not_loaded_again_at_once(
    settings: Settings, lake_of_three: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(settings)
    current(lake_of_three, "feed").swap("two")
    broken(lake_of_three, "feed", USER)
    loads = counted_loads(worker)
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            asyncio.run(worker.renew())
    assert loads == ["two"] and len(caplog.records) == 1
    current(lake_of_three, "reels").swap("two")  # another surface, and a repaired version, at once
    shutil.copytree(versions(lake_of_three, "feed") / "one", versions(lake_of_three, "feed") / "3")
    folder = versions(lake_of_three, "feed") / "3"
    write(folder, read(folder).model_copy(update={"version": "3"}))
    current(lake_of_three, "feed").swap("3")
    asyncio.run(worker.renew())
    assert sorted(loads) == ["3", "two", "two"] and not worker.rankers.faults
    worker.close()


def counted_loads(worker: Worker) -> list[str]:
    """The versions that a worker loads from now on."""
    loads: list[str] = []
    load = worker.rankers._load

    def counted(folder: Path) -> object:
        loads.append(folder.name)
        return load(folder)

    worker.rankers._load = counted
    return loads


def test_a_repaired_version_is_served_after_its_time(
    settings: Settings, lake_of_three: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranking.serve.rankers.FIRST_RETRY_SECONDS", 0.2)
    worker = Worker(settings)
    current(lake_of_three, "feed").swap("two")
    table = versions(lake_of_three, "feed") / "two" / TABLES
    whole = table.read_bytes()
    table.write_bytes(whole[:-1])
    asyncio.run(worker.renew())
    table.write_bytes(whole)
    asyncio.run(worker.renew())
    assert worker.rankers.versions["feed"] == "one"
    asyncio.run(asyncio.sleep(0.25))
    asyncio.run(worker.renew())
    assert worker.rankers.versions["feed"] == "two" and not worker.rankers.faults
    worker.close()


def test_a_damaged_store_leaves_rankers_to_renew(settings: Settings, lake_of_three: str) -> None:
    from ranking.online.live import stores

    worker = Worker(settings)
    (Path(settings.lake) / "online" / str(LAST) / "data.mdb").write_bytes(b"no store")
    stores(settings.lake).swap(str(LAST))
    current(lake_of_three, "feed").swap("two")
    for _ in range(2):
        asyncio.run(worker.renew())
    assert worker.rankers.versions["feed"] == "two" and worker.state.features_fault
    stores(settings.lake).swap(str(LAST - timedelta(days=1)))
    asyncio.run(worker.renew())
    assert worker.state.features_fault is None
    worker.close()


@pytest.mark.parametrize("how", ["pointer", "manifest", "bytes", "gone"])
def test_a_damaged_ranker_does_not_stop_the_next_store(
    settings: Settings, lake_of_three: str, lake: Lake, how: str, caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    both = Lake(str(tmp_path / "both"), lake.spec)
    shutil.copytree(lake.root, both.root)
    shutil.copytree(Path(lake_of_three) / "rankers", Path(both.root) / "rankers")
    broken(both.root, "feed", how)
    assert renew(both, LAST) == f"{LAST:%Y%m%d}-1"
    assert "left out: " in caplog.text
    for surface in SURFACES[1:]:
        broken(both.root, surface, how)
    with pytest.raises(UserError):
        renew(both, LAST)
