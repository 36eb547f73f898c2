"""A pointer names one live version at any time, and a rollback returns to the previous one."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import TemporaryError, UserError
from etl.tables.pointer import PointerState, VersionPointer, remove_unreferenced_versions
from etl.tables.uri import local_cache_path, resolve_uri


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=9))
def test_rollbacks_undo_the_latest_promotions(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    pointer = VersionPointer(tmp_path_factory.mktemp("p"), max_previous=3)
    for name in names:
        pointer.promote(name)
    assert pointer.live_folder == pointer.folder / names[-1]
    previous = list(dict.fromkeys(name for name in reversed(names) if name != names[-1]))
    for name in previous[:3]:
        assert pointer.rollback() == name
    with pytest.raises(UserError, match="no previous version to roll back to"):
        pointer.rollback()


def test_only_versions_that_no_pointer_retains_are_removed(tmp_path: Path) -> None:
    pointer = VersionPointer(tmp_path, max_previous=1)
    candidate = VersionPointer(tmp_path, "candidate")
    for name in "abcde":
        (tmp_path / name).mkdir()
    for name in "abc":
        pointer.promote(name)
    candidate.promote("d")
    remove_unreferenced_versions(tmp_path, pointer, candidate)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["b", "c", "d"]


def test_a_blocked_version_is_kept_as_it_may_be_unblocked(tmp_path: Path) -> None:
    pointer = VersionPointer(tmp_path, max_previous=1)
    for name in "abcd":
        (tmp_path / name).mkdir()
    for name in "ab":
        pointer.promote(name)
    pointer.rollback()
    for name in "cd":
        pointer.promote(name)
    remove_unreferenced_versions(tmp_path, pointer)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["b", "c", "d"]


def test_a_missing_pointer_has_no_live_version_and_a_damaged_one_is_an_error(
    tmp_path: Path,
) -> None:
    pointer = VersionPointer(tmp_path)
    assert pointer.live_folder is None
    pointer.path.write_text('{"live": 3}')
    with pytest.raises(UserError, match="damaged"):
        pointer.read()


@pytest.mark.parametrize("name", ["../reels/v1", "/etc", "..", ".hidden", "a/b", ""])
def test_a_pointer_cannot_name_a_folder_elsewhere(tmp_path: Path, name: str) -> None:
    pointer = VersionPointer(tmp_path)
    pointer.path.write_text(json.dumps({"live": name}))
    with pytest.raises(UserError, match="damaged"):
        _ = pointer.live_folder
    pointer.path.write_text(json.dumps({"live": "v1", "previous": [name]}))
    with pytest.raises(UserError, match="damaged"):
        pointer.rollback()


def test_a_version_that_was_rolled_back_is_blocked_until_it_is_unblocked(tmp_path: Path) -> None:
    pointer = VersionPointer(tmp_path)
    for name in ("v1", "v2"):
        pointer.promote(name)
    assert pointer.rollback() == "v1"
    with pytest.raises(UserError, match="v2 was rolled back and is blocked; unblock it first"):
        pointer.promote("v2")
    pointer.promote("v3")
    with pytest.raises(UserError, match="v2 was rolled back"):
        pointer.promote("v2")
    with pytest.raises(UserError, match=r"v1 is not blocked; blocked in .*: v2"):
        pointer.unblock("v1")
    pointer.unblock("v2")
    pointer.promote("v2")
    assert pointer.read() == PointerState(live="v2", previous=("v1", "v3"))


def test_a_pointer_that_another_run_changed_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointer = VersionPointer(tmp_path)
    pointer.promote("v1")
    parse = VersionPointer._parse

    def parse_after_another_run(self: VersionPointer, text: str | None) -> PointerState | None:
        monkeypatch.undo()
        VersionPointer(tmp_path).promote("v2")  # after this run has read the file
        return parse(self, text)

    monkeypatch.setattr(VersionPointer, "_parse", parse_after_another_run)
    with pytest.raises(TemporaryError, match="was changed by another run"):
        pointer.promote("v3")
    assert pointer.read() == PointerState(live="v2", previous=("v1",))


def test_buckets_of_one_name_in_two_stores_are_cached_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = set()
    for endpoint in ("http://127.0.0.1:9000", "http://127.0.0.1:9001"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        copies.add(local_cache_path(resolve_uri("s3://ads/lake", "rankers", "feed", "v1")))
    assert len(copies) == 2
