"""No second of a run is lost or counted twice, and only steps on new rows are effective."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.loop import timeline as module
from training.loop.timeline import Timeline

SPANS = st.lists(st.tuples(st.sampled_from(["reading", "checkpoint", "step"]), st.integers(1, 50)))


@given(SPANS)
def test_all_seconds_are_there_once(spans: list[tuple[str, int]]) -> None:
    now = 1000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: now)
        line = Timeline(began=990.0)
        line.spent("imports")
        for name, seconds in spans:
            now += seconds
            line.stepped() if name == "step" else line.spent(name)
    steps = [seconds for name, seconds in spans if name == "step"]
    assert sum(line.seconds.values()) == pytest.approx(now - 990.0)
    assert line.effective == pytest.approx(sum(steps[1:]) / (now - 990.0))
    for name in ("reading", "checkpoint"):
        assert line.seconds[name] == sum(s for n, s in spans if n == name)


def test_a_run_without_a_step_was_not_effective() -> None:
    assert Timeline().effective == 0
