"""Transfer ratios on students whose share of GEM's gain is known, and the teacher's outputs."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.studies import student_trials
from benchmarks.studies.transfer_ratios import ratio_interval, transfer_ratios
from etl.tables import arrow, model_schemas
from etl.tables.lake import Lake
from ranking.report.data import true_probabilities
from ranking.scoring.calibration import sigmoid
from ranking.student.config import DomainTrainConfig
from tests.benchmarks.test_studies import SPLIT
from tests.conftest import FIRST, LAST
from tests.pipeline import rows
from training.evaluation.predictions import Predictions

N = 4000


def predictions(p: np.ndarray, labels: np.ndarray) -> Predictions:
    return Predictions(
        ("click",), np.arange(N).astype(str).astype(object), np.arange(N) // 8,
        np.ones(N, np.int64), p[:, None], labels[:, None], np.ones((N, 1), bool),
    )  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, Predictions]:
    """GEM predicts the true probabilities; students predict a part of their variation."""
    rng = np.random.default_rng(0)
    truth = rng.normal(-1, 1.5, N)
    labels = (rng.uniform(size=N) < sigmoid(truth)).astype(np.float32)

    def student(share: float) -> Predictions:
        return predictions(sigmoid(-1 + share * (truth + 1)), labels)

    return {
        "GEM": student(1.0),
        "labels only": student(0.3),
        "plain distillation": student(0.45),
        "all": student(0.8),
        "the same as GEM": student(1.0),
    }


def test_a_student_with_gems_predictions_has_all_of_its_gain(
    models: dict[str, Predictions],
) -> None:
    students = {name: [p] for name, p in models.items() if name != "GEM"}
    ratios = transfer_ratios(students, models["GEM"], ["click"])
    same = ratios.share_of_gem_gain["the same as GEM"]
    assert same and same.value == same.low == same.high == 1.0
    best, plain = (ratios.share_of_gem_gain[name] for name in ("all", "plain distillation"))
    assert best and plain and 0 < plain.high < best.low < 1
    to_plain = ratios.ratio_to_plain["all"]
    assert to_plain and to_plain.low < to_plain.value < to_plain.high
    assert to_plain.value == pytest.approx(best.value / plain.value)


def with_second(first: Predictions, second: Predictions) -> Predictions:
    """Predictions of two objectives, of the same labels."""
    both = np.hstack((first.probabilities, second.probabilities))
    labels = np.hstack((first.labels, first.labels))
    mask = np.hstack((first.label_mask, first.label_mask))
    return replace(
        first, objectives=("click", "buy"), probabilities=both, labels=labels, label_mask=mask
    )


def test_each_objective_has_a_share_of_its_own(models: dict[str, Predictions]) -> None:
    weak, plain, gem = (models[name] for name in ("labels only", "plain distillation", "GEM"))
    students = {
        "labels only": [with_second(weak, weak)],
        "plain distillation": [with_second(plain, plain)],
        "all": [with_second(gem, plain)],  # all of the gain for clicks alone
    }
    ratios = transfer_ratios(students, with_second(gem, gem), ["click", "buy"])
    kept = ratios.kept_by_objective("all")
    assert kept["click"] and kept["click"].low == kept["click"].high == 1.0
    of_plain = ratios.kept_by_objective("plain distillation")
    assert kept["buy"] == of_plain["buy"] and kept["buy"] and kept["buy"].high < 1
    gain, loss = (
        ratios.gain_over(*names)
        for names in (("all", "plain distillation"), ("plain distillation", "all"))
    )
    assert gain.low > 0 and (loss.value, loss.low, loss.high) == pytest.approx(
        (-gain.value, -gain.high, -gain.low)
    )


def test_the_interval_has_the_noise_of_seeds(models: dict[str, Predictions]) -> None:
    def width(seeds: list[Predictions]) -> float:
        students = {
            "labels only": [models["labels only"]],
            "plain distillation": [models["plain distillation"]],
            "all": seeds,
        }
        ratios = transfer_ratios(students, models["GEM"], ["click"])
        share = ratios.share_of_gem_gain["all"]
        assert share
        return share.high - share.low

    one, good = width([models["all"]]), models["the same as GEM"]
    assert width([models["all"]] * 3) == pytest.approx(one)
    assert width([models["all"], good, models["plain distillation"]]) > 2 * one


def test_a_ratio_to_a_gain_that_may_be_zero_is_none(models: dict[str, Predictions]) -> None:
    students = {
        "labels only": [models["labels only"]],
        "plain distillation": [replace(models["labels only"])],  # no gain
        "all": [models["all"]],
    }
    ratios = transfer_ratios(students, models["GEM"], ["click"])
    assert ratios.ratio_to_plain["all"] is None and ratios.share_of_gem_gain["all"] is not None


@settings(max_examples=30)
@given(st.floats(0.5, 2), st.integers(0, 99))
def test_the_interval_of_an_exact_multiple_has_no_width(factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gain = rng.normal(1, 0.1, 1001)
    ratio = ratio_interval(factor * gain, gain)
    assert ratio and ratio.low == pytest.approx(factor) and ratio.high == pytest.approx(factor)
    assert ratio_interval(gain, rng.normal(0, 1, 1001)) is None


def test_outputs_of_an_interrupted_teacher_are_completed(
    own_gem_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(student_trials, "write_teacher_outputs", lambda *call: written.append(call))
    days = FIRST + timedelta(days=1), LAST
    student_trials.complete_teacher_outputs(own_gem_lake, days)
    assert not written
    schema = model_schemas.user_teacher_embeddings(own_gem_lake.spec)
    none = arrow.snapshot(own_gem_lake, schema).read().slice(0, 0)
    arrow.replace_rows(own_gem_lake, schema, none, f"day = '{LAST}'", {})
    student_trials.complete_teacher_outputs(own_gem_lake, days)
    assert written == [(own_gem_lake, days)]


def test_students_of_a_domain_are_other_trials_if_its_model_is_trained_differently(
    own_gem_lake: Lake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: dict[str, Predictions],
) -> None:
    trained = []

    def predict(*arguments: object) -> Iterator[Predictions]:
        trained.append(arguments)
        return iter([models["all"]])

    monkeypatch.setattr(student_trials, "_surface_predictions", predict)
    monkeypatch.setattr(student_trials, "train_domain", lambda *_: None)
    trials = student_trials.TransferTrials(own_gem_lake, "", SPLIT, tmp_path)
    of_domain = student_trials.everything(1.0, teacher="domain")
    for epochs in (1, 1, 2):
        config = partial(DomainTrainConfig, epochs=epochs)
        monkeypatch.setattr(student_trials, "DomainTrainConfig", config)
        trials.student_predictions(of_domain, 0)
        trials.student_predictions(student_trials.LABELS_ONLY_CHANGE, 0)
    assert len(trained) == 3


def test_calibration_is_judged_by_outcomes_that_are_logged_in_time(
    lake: Lake, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True probabilities count outcomes that no label can know."""
    share = np.array([0.9, 0.7, 1.05])
    monkeypatch.setattr(student_trials, "share_of_logged_outcomes", lambda *_: share)
    ids = [row["impression_id"] for row in rows(lake, "impressions")]
    names = tuple(lake.spec.objectives)
    shape = len(ids), len(names)
    none = Predictions(
        names, np.array(ids, dtype=object), np.zeros(len(ids), np.int64),
        np.ones(len(ids), np.int64), np.zeros(shape), np.zeros(shape, np.float32),
        np.ones(shape, bool),
    )  # fmt: skip
    truth = true_probabilities(none, str(raw))
    assert truth is not None
    trials = student_trials.TransferTrials(lake, str(raw), SPLIT, tmp_path)
    labels_of_all = replace(truth, probabilities=truth.probabilities * share)
    assert trials.worst_calibration([labels_of_all]) == pytest.approx(0)
    assert trials.worst_calibration([truth]) == pytest.approx(np.abs(1 / share - 1).max())
