"""Every second of a run is counted once, and only training steps count as effective."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.trainer.throughput import Timeline

ACTIVITIES = st.lists(
    st.tuples(st.sampled_from(["reading", "checkpoint", "step"]), st.integers(1, 50))
)


@given(ACTIVITIES)
def test_every_second_is_counted_once(activities: list[tuple[str, int]]) -> None:
    now = 1000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        timeline = Timeline(start=990.0)
        timeline.record("imports")
        for name, seconds in activities:
            now += seconds
            if name == "step":
                timeline.record_step()
            else:
                timeline.record(name)
    steps = [seconds for name, seconds in activities if name == "step"]
    assert sum(timeline.seconds.values()) == pytest.approx(now - 990.0)
    assert timeline.effective_time_ratio == pytest.approx(sum(steps[1:]) / (now - 990.0))
    for name in ("reading", "checkpoint"):
        assert timeline.seconds[name] == sum(s for n, s in activities if n == name)


def test_a_run_without_steps_has_no_effective_time() -> None:
    assert Timeline().effective_time_ratio == 0
