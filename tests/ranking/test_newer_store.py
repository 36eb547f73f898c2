"""A live feature store with later data is kept where the pipeline builds one of an earlier day."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from gemline import main
from ranking.feature_store.materialize import materialize
from ranking.feature_store.newer_store import newer_live_store
from ranking.feature_store.wal import feature_store_pointer
from ranking.registry.manifest import read_manifest, write_manifest
from ranking.registry.ranker import live_pointer, rankers_folder
from tests.conftest import LAST
from tests.world import copy_of

EVE = LAST - timedelta(days=1)


@pytest.fixture
def refreshed(lake: Lake, folder: Path, tmp_path: Path) -> Lake:
    """A lake with a promoted ranker and a feature store of its last day."""
    copied = copy_of(lake, tmp_path / "lake")
    shutil.copytree(folder, ranker_folder(copied))
    live_pointer(copied.root, "feed").promote("one")
    materialize(copied, lake.spec.day_end(LAST))
    return copied


def ranker_folder(lake: Lake) -> Path:
    return local_path(rankers_folder(lake.root, "feed") / "one")


def is_kept(lake: Lake) -> bool:
    return newer_live_store(lake, lake.spec.day_end(EVE)) is not None


def test_a_run_of_an_earlier_day_keeps_the_store_and_the_command_alone_replaces_it(
    refreshed: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pointer, newer = feature_store_pointer(refreshed.root), f"{LAST:%Y%m%d}-1"
    where = ["--spec", str(spec_path), "--lake", refreshed.root]
    build = ["rank", "materialize", *where, "--data-until"]
    assert main([*build, str(EVE), "--keep-newer"]) == 0
    state = pointer.read()
    assert state and state.retained == (newer,)
    assert f"{newer} is kept, because its data until" in capsys.readouterr().out
    assert main([*build, str(LAST), "--keep-newer"]) == 0  # not later: the day's own run
    assert main([*build, str(EVE)]) == 0
    state = pointer.read()
    assert state and state.retained == (f"{LAST:%Y%m%d}-2", f"{EVE:%Y%m%d}-1")


def test_a_newer_store_is_replaced_if_it_does_not_have_what_is_read_now(refreshed: Lake) -> None:
    assert is_kept(refreshed)
    spec, version = refreshed.spec, refreshed.version("events")
    fewer = spec.model_copy(update={"similarity_attributes": ()})
    assert not is_kept(Lake(refreshed.root, fewer))
    original = read_manifest(ranker_folder(refreshed))
    longer = original.model_copy(update={"max_length": original.max_length + 1})
    write_manifest(ranker_folder(refreshed), longer)
    assert not is_kept(refreshed)
    write_manifest(ranker_folder(refreshed), original)
    assert is_kept(refreshed)
    DeltaTable(refreshed.table_uri("events")).delete(f"day = '{LAST}'")
    assert not is_kept(refreshed)
    assert not is_kept(Lake(refreshed.root, spec, {"events": version}))  # pinned before that


def test_a_damaged_store_is_replaced(refreshed: Lake) -> None:
    live = feature_store_pointer(refreshed.root).live_folder
    assert isinstance(live, Path)
    (live / "data.mdb").write_bytes(b"no store")
    assert not is_kept(refreshed)
