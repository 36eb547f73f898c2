"""A pointer means one folder at any time, and can go back."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.tables.pointer import Pointer, clean


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1))
def test_going_back_undoes_the_newest_swaps(tmp_path_factory, names: list[str]) -> None:
    pointer = Pointer(tmp_path_factory.mktemp("p"), remembered=3)
    for name in names:
        pointer.swap(name)
    assert pointer.target == pointer.folder / names[-1]
    others = list(dict.fromkeys(name for name in reversed(names) if name != names[-1]))
    for name in others[:3]:
        assert pointer.back() == name
    with pytest.raises(UserError, match="none before"):
        pointer.back()


def test_only_what_was_never_or_long_ago_meant_is_removed(tmp_path: Path) -> None:
    pointer, newest = Pointer(tmp_path, remembered=1), Pointer(tmp_path, "newest")
    for name in "abcde":
        (tmp_path / name).mkdir()
    for name in "abc":
        pointer.swap(name)
    newest.swap("d")
    clean(tmp_path, pointer, newest)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["b", "c", "d"]


def test_a_pointer_to_nothing_and_a_damaged_one_are_told_apart(tmp_path: Path) -> None:
    pointer = Pointer(tmp_path)
    assert pointer.target is None
    pointer.path.write_text('{"now": 3}')
    with pytest.raises(UserError, match="damaged"):
        pointer.read()


@pytest.mark.parametrize("name", ["../reels/v1", "/etc", "..", ".hidden", "a/b", ""])
def test_a_pointer_leads_to_no_other_folder(tmp_path: Path, name: str) -> None:
    pointer = Pointer(tmp_path)
    pointer.path.write_text(json.dumps({"now": name}))
    with pytest.raises(UserError, match="damaged"):
        _ = pointer.target
    pointer.path.write_text(json.dumps({"now": "v1", "before": [name]}))
    with pytest.raises(UserError, match="damaged"):
        pointer.back()
