"""Pointers into histories: they cut at their time, and refuse a history that was rewritten."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from features.history.codec import UserEvents
from features.ragged import count_visible
from training.data.histories import UserHistories

SECONDS = st.lists(st.integers(0, 50), min_size=1, max_size=12).map(sorted)


def history_of_one_user(
    visible: list[int], codes: tuple[int, ...] = (), types: list[int] | None = None
) -> UserHistories:
    """The histories of a single user with events that were visible at these seconds."""
    num_events = len(visible)
    zeros = np.zeros(num_events, np.int8)
    events = UserEvents(
        np.array([0, num_events]), np.array(visible), None, np.arange(num_events, dtype=np.int32),
        zeros, np.array(types or zeros, np.int8), zeros,
    )  # fmt: skip
    return UserHistories(pa.array(["u"]), events, np.zeros(1, np.int64), codes)


def cut(stored: UserHistories, as_of: int, length: int, most: int = 100) -> list[int]:
    cut = stored.slices(np.array([0]), np.array([as_of]), np.array([length]), most)
    assert cut.offsets.tolist() == [0, len(cut.events)]
    assert np.array_equal(stored.events.visible_ts[cut.events["item"]], cut.events["visible_ts"])
    visible_ts: list[int] = cut.events["visible_ts"].tolist()
    return visible_ts


@given(SECONDS, st.integers(0, 51), st.integers(1, 5))
def test_a_pointer_reads_the_latest_visible_events(
    visible: list[int], as_of: int, most: int
) -> None:
    length = int(count_visible(np.array(visible), np.array([as_of]))[0])
    known = [second for second in visible if second < as_of]
    assert cut(history_of_one_user(visible), as_of, length, most) == known[-most:]


@given(SECONDS, st.integers(0, 51), st.data())
def test_an_inserted_event_is_refused(visible: list[int], as_of: int, data: st.DataObject) -> None:
    """A late event inserted at its event time, or a pointer that includes future events."""
    length = int(count_visible(np.array(visible), np.array([as_of]))[0])
    if length:
        planted = sorted([*visible, data.draw(st.integers(0, as_of - 1))])
        with pytest.raises(UserError, match="histories were rewritten"):
            cut(history_of_one_user(planted), as_of, length)
    if length < len(visible):
        with pytest.raises(UserError, match="histories were rewritten"):
            cut(history_of_one_user(visible), as_of, length + 1)


@given(SECONDS, st.integers(0, 51), st.integers(1, 5), st.data())
def test_a_history_of_some_types_is_cut_at_the_same_time(
    visible: list[int], as_of: int, most: int, data: st.DataObject
) -> None:
    types = data.draw(st.lists(st.integers(1, 3), min_size=len(visible), max_size=len(visible)))
    length = int(count_visible(np.array(visible), np.array([as_of]))[0])
    known = [
        second
        for second, kind in zip(visible, types, strict=True)
        if second < as_of and kind in (1, 3)
    ]
    assert cut(history_of_one_user(visible, (1, 3), types), as_of, length, most) == known[-most:]
