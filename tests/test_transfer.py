"""Transfer ratios: what they are where one knows, and where there is none to tell."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.transfer.ratio import over, ratios
from ranking.calibration import sigmoid
from training.predictions import Predictions

N = 4000


def predictions(p: np.ndarray, labels: np.ndarray) -> Predictions:
    return Predictions(
        ("click",), np.arange(N).astype(str).astype(object), np.arange(N) // 8,
        np.ones(N, np.int64), p[:, None], labels[:, None], np.ones((N, 1), bool),
    )  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, Predictions]:
    """The truth as GEM, and students that know some of it."""
    rng = np.random.default_rng(0)
    truth = rng.normal(-1, 1.5, N)
    labels = (rng.uniform(size=N) < sigmoid(truth)).astype(np.float32)

    def knows(share: float) -> Predictions:
        return predictions(sigmoid(-1 + share * (truth + 1)), labels)

    return {
        "GEM": knows(1.0),
        "labels only": knows(0.3),
        "plain distillation": knows(0.45),
        "all": knows(0.8),
        "the same as GEM": knows(1.0),
    }


def test_who_says_what_gem_says_has_all_of_its_gain(models: dict[str, Predictions]) -> None:
    found = {name: [p] for name, p in models.items() if name != "GEM"}
    measured = ratios(found, models["GEM"], ["click"])
    whole = measured.of_teacher["the same as GEM"]
    assert whole and whole.value == whole.low == whole.high == 1.0
    best, plain = measured.of_teacher["all"], measured.of_teacher["plain distillation"]
    assert best and plain and 0 < plain.high < best.low < 1
    both = measured.to_plain["all"]
    assert both and both.low < both.value < both.high
    assert both.value == pytest.approx(best.value / plain.value)


def test_there_is_no_ratio_to_a_gain_that_may_be_none(models: dict[str, Predictions]) -> None:
    useless = replace(models["labels only"])
    found = {"labels only": [models["labels only"]], "plain distillation": [useless]}
    found["all"] = [models["all"]]
    measured = ratios(found, models["GEM"], ["click"])
    assert measured.to_plain["all"] is None and measured.of_teacher["all"] is not None


@settings(max_examples=30)
@given(st.floats(0.5, 2), st.integers(0, 99))
def test_a_multiple_is_told_without_doubt(factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    other = rng.normal(1, 0.1, 1001)
    found = over(factor * other, other)
    assert found and found.low == pytest.approx(factor) and found.high == pytest.approx(factor)
    assert over(other, rng.normal(0, 1, 1001)) is None
