"""A pointer means one folder at any time, and can go back."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import TemporaryError, UserError
from etl.tables.place import here, place
from etl.tables.pointer import Pointed, Pointer, clean


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=9))
def test_going_back_undoes_the_newest_swaps(tmp_path_factory, names: list[str]) -> None:
    pointer = Pointer(tmp_path_factory.mktemp("p"), remembered=3)
    for name in names:
        pointer.swap(name)
    assert pointer.target == pointer.folder / names[-1]
    others = list(dict.fromkeys(name for name in reversed(names) if name != names[-1]))
    for name in others[:3]:
        assert pointer.rollback() == name
    with pytest.raises(UserError, match="none before"):
        pointer.rollback()


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
        pointer.rollback()


def test_what_was_rolled_back_is_barred_until_it_is_lifted(tmp_path: Path) -> None:
    pointer = Pointer(tmp_path)
    for name in ("v1", "v2"):
        pointer.swap(name)
    assert pointer.rollback() == "v1"
    with pytest.raises(UserError, match="v2 was rolled back and is barred"):
        pointer.swap("v2")
    pointer.swap("v3")
    with pytest.raises(UserError, match="v2 was rolled back"):
        pointer.swap("v2")
    with pytest.raises(UserError, match=r"v1 is not barred; barred in .*: v2"):
        pointer.lift("v1")
    pointer.lift("v2")
    pointer.swap("v2")
    assert pointer.read() == Pointed(now="v2", before=("v1", "v3"))


def test_a_pointer_that_another_run_changed_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointer = Pointer(tmp_path)
    pointer.swap("v1")
    parsed = Pointer._parsed

    def slowly(self: Pointer, text: str | None) -> Pointed | None:
        monkeypatch.undo()
        Pointer(tmp_path).swap("v2")  # by another run, after this one has read it
        return parsed(self, text)

    monkeypatch.setattr(Pointer, "_parsed", slowly)
    with pytest.raises(TemporaryError, match="was changed by another run"):
        pointer.swap("v3")
    assert pointer.read() == Pointed(now="v2", before=("v1",))


def test_buckets_of_one_name_in_two_stores_have_copies_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = set()
    for endpoint in ("http://127.0.0.1:9000", "http://127.0.0.1:9001"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        copies.add(here(place("s3://ads/lake", "rankers", "feed", "v1")))
    assert len(copies) == 2
