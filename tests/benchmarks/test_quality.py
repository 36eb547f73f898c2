"""`gemline bench quality`: pooled days, a teacher without look-ahead, and figures without data."""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import BenchmarkResult
from benchmarks.public import movielens
from benchmarks.public.sequence_data import read_log
from benchmarks.studies import quality
from benchmarks.studies.kuairand_quality import (
    mean_in_logit,
    teacher_members,
    teacher_predictions,
)
from benchmarks.studies.prequential import PrequentialTrials, pooled
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from training.baseline import BaselineConfig
from training.config import TrainConfig
from training.evaluation.predictions import Predictions

SECOND, THIRD = FIRST + timedelta(days=1), FIRST + timedelta(days=2)


def day_predictions(day: date, seed: int, noise: float) -> Predictions:
    """Predictions of two objectives on a day; the labels depend on the day alone."""
    rng, blur = np.random.default_rng(day.toordinal()), np.random.default_rng(seed)
    signal = rng.normal(size=(300, 2))
    labels = (signal + rng.normal(size=(300, 2)) > 0).astype(np.float32)
    logits = signal + noise * blur.normal(size=(300, 2))
    return Predictions(
        ("click", "like"), np.char.add(f"{day}-", np.arange(300).astype(str)).astype(object),
        rng.integers(0, 30, 300), np.ones(300, np.int64), 1 / (1 + np.exp(-logits)), labels,
        np.ones((300, 2), bool),
    )  # fmt: skip


DAYS = [date(2026, 1, 1) + timedelta(days=n) for n in range(4)]


def test_the_teacher_of_a_day_does_not_read_its_labels_or_later_ones() -> None:
    gem = [{day: day_predictions(day, seed, 0.5) for day in DAYS} for seed in (1, 2)]
    trees = {day: day_predictions(day, 3, 0.5) for day in DAYS}
    before = teacher_predictions(gem, trees)
    changed = {
        day: replace(p, labels=1 - p.labels) if day >= DAYS[2] else p for day, p in gem[0].items()
    }
    after = teacher_predictions([changed, gem[1]], trees)
    for day in DAYS[:3]:
        np.testing.assert_array_equal(before[day].probabilities, after[day].probabilities)
    assert (before[DAYS[3]].probabilities != after[DAYS[3]].probabilities).any()
    alone = teacher_predictions(gem)
    np.testing.assert_allclose(before[DAYS[0]].probabilities, alone[DAYS[0]].probabilities)


def test_each_seed_is_in_as_many_teachers() -> None:
    seeds: Sequence[dict[date, Predictions]] = [{} for _ in range(5)]
    used = [id(member) for members in teacher_members(seeds) for member in members]
    assert sorted(used) == sorted(3 * [id(seed) for seed in seeds])
    assert [len(members) for members in teacher_members(seeds[:2])] == [2, 2]


def test_trials_predict_each_day_before_they_learn_it(lake: Lake, tmp_path: Path) -> None:
    """Models of all earlier days, run once; pooling keeps the days from the first test day on."""
    trials = PrequentialTrials(lake, FIRST, SECOND, LAST, tmp_path)
    config = TrainConfig(scale="tiny", width_multiplier=0.5, max_length=4, batch_rows=256)
    by_day = trials.gem(config)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = trials.gem(config)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert list(by_day) == [SECOND, THIRD, LAST]
    for day, predictions in by_day.items():
        np.testing.assert_array_equal(predictions.probabilities, again[day].probabilities)
    together = pooled(by_day, THIRD)
    assert len(together.surface) == len(by_day[THIRD].surface) + len(by_day[LAST].surface)
    few_trees = BaselineConfig(num_boost_round=3, validation_fraction=0)
    trees = trials.lightgbm(dict.fromkeys(lake.spec.objectives, few_trees))
    for day, predictions in trees.items():
        assert (predictions.impression_ids == by_day[day].impression_ids).all()
        assert (predictions.labels == by_day[day].labels).all()
    (tmp_path / "other.measured").write_text('"2026-01-01 of another study"')
    reader = PrequentialTrials(lake, FIRST, SECOND, LAST, tmp_path)
    reader.gem(config)
    assert reader.trained_at and "2026-01-01 of another study" not in reader.trained_at


@pytest.mark.parametrize("first_training", ["daily", "joint"])
def test_a_distilled_gem_learns_what_a_teacher_predicted_of_earlier_days(
    lake: Lake, tmp_path: Path, first_training: Literal["daily", "joint"]
) -> None:
    """Not of the days that it predicts: the first model has no predictions to learn from."""
    trials = PrequentialTrials(lake, FIRST, SECOND, THIRD, tmp_path)
    config = TrainConfig(
        scale="tiny", width_multiplier=0.5, max_length=4, batch_rows=256,
        first_training=first_training, distillation_weight=2.0,
    )  # fmt: skip
    alone = trials.gem(config.model_copy(update={"distillation_weight": 0.0}))
    distilled = trials.gem(config, alone)
    np.testing.assert_array_equal(distilled[SECOND].probabilities, alone[SECOND].probabilities)
    assert (distilled[THIRD].probabilities != alone[THIRD].probabilities).any()
    of_earlier_days = trials.gem(config, {SECOND: alone[SECOND]})
    np.testing.assert_array_equal(
        of_earlier_days[THIRD].probabilities, distilled[THIRD].probabilities
    )


def test_the_mean_in_logit_is_between_both_models() -> None:
    gem, trees = ({DAYS[0]: day_predictions(DAYS[0], seed, 0.5)} for seed in (1, 2))
    of_gem, of_trees = gem[DAYS[0]].probabilities, trees[DAYS[0]].probabilities
    mean = mean_in_logit(gem, trees)[DAYS[0]].probabilities
    assert (mean > np.minimum(of_gem, of_trees)).all() and (
        mean < np.maximum(of_gem, of_trees)
    ).all()
    odds = [p / (1 - p) for p in (mean, of_gem, of_trees)]
    np.testing.assert_allclose(odds[0] ** 2, odds[1] * odds[2], rtol=1e-6)


def write_wheel(path: Path, ratings: int = 400) -> None:
    """A wheel with MovieLens files of 20 users and 30 items, and a module that is not unpacked."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(1, 21, ratings), rng.integers(1, 31, ratings)
    rows = zip(user, item, rng.integers(1, 6, ratings), rng.permutation(10**5)[:ratings],
               strict=True)  # fmt: skip
    files = {
        "ml-100k.inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
        + [f"{u}\t{i}\t{r}\t{8 * 10**8 + t}" for u, i, r, t in rows],
        "ml-100k.item": ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:x"]
        + [f'{i}\tSay "It\t19{i + 50}\tDrama War' for i in range(1, 31)],
        "ml-100k.user": ["user_id:token\tage:token\tgender:token\toccupation:x\tzip_code:x"]
        + [f"{u}\t{20 + u}\tM\tartist\t940{u:02}" for u in range(1, 21)],
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("recbole/__init__.py", "raise SystemExit")
        for name, lines in files.items():
            archive.writestr(f"{movielens.FOLDER}/{name}", "\n".join(lines) + "\n")


@pytest.fixture
def ratings(tmp_path: Path) -> movielens.Ratings:
    write_wheel(tmp_path / "some.whl")
    movielens.unpack(tmp_path / "some.whl", tmp_path / "files")
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == sorted(movielens.FILES)
    return movielens.Ratings.read(tmp_path / "files")


def test_sequence_files_hold_each_rating_once_and_test_the_latest(
    ratings: movielens.Ratings, tmp_path: Path
) -> None:
    movielens.write_sequence_files(ratings, tmp_path / "sequence")
    log = read_log(tmp_path / "sequence")
    assert len(log) == len(ratings.ratings)
    assert sorted(log.time) == sorted(ratings.seconds)
    for split in (0, 1):
        assert log.time[log.split == split].max() < log.time[log.split == split + 1].min()
    assert set(log.item_attributes) == {"year", "genres"}
    assert set(np.diff(log.item_attributes["genres"].offsets)) == {2}


def test_tabular_files_hold_each_rating_once_and_test_the_latest_of_each_user(
    ratings: movielens.Ratings, tmp_path: Path
) -> None:
    folder = tmp_path / "tabular"
    movielens.write_tabular_files(ratings, folder)
    names = ("train", "valid", "test")
    lines = [(folder / f"{name}.csv").read_text().splitlines() for name in names]
    assert {len(line.split(",")) for part in lines for line in part} == {11}
    assert sum(len(part) - 1 for part in lines) == len(ratings.ratings)
    users = [{line.split(",")[0] for line in part[1:]} for part in lines]
    assert users[2] <= users[0]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_positions_within_a_group_keep_the_order(group: list[int]) -> None:
    position = movielens.position_within(np.array(group))
    for value in set(group):
        own = position[np.array(group) == value]
        np.testing.assert_allclose(own, np.arange(len(own)) / len(own))


def figures_of(args: quality.QualityArgs, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    quality.bench_quality(args.model_copy(update={"as_json": True}))
    figures: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return figures


GOALS: dict[quality.Part, set[str]] = {
    "kuairand": set(quality.KUAIRAND_GOALS),
    "movielens": set(quality.MOVIELENS_GOALS),
    "sim": {*quality.HISTORY_GOALS, *quality.ABLATION_GOALS},
}


@pytest.mark.parametrize("only", [*GOALS, None])
def test_figures_that_cannot_be_had_are_null_with_the_reason(
    only: quality.Part | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without KuaiRand, MovieLens and committed results; a part has no figures of another."""
    monkeypatch.setattr(quality, "RESULTS", tmp_path)
    args = quality.QualityArgs(
        only=only, measure=True, work=tmp_path, kuairand=tmp_path / "k", movielens=tmp_path / "m"
    )
    figures = figures_of(args, capsys)
    expected = GOALS[only] if only else set().union(*GOALS.values())
    assert figures == dict.fromkeys(expected) | {
        f"{key}_reason": figures[f"{key}_reason"] for key in expected
    }
    reasons = {"kuairand": "absent", "movielens": "ml-100k.inter", "sim": "not committed"}
    for part in [only] if only else GOALS:
        assert all(reasons[part] in str(figures[f"{key}_reason"]) for key in GOALS[part])


def test_committed_figures_have_their_date_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure that the committed study lacks is null, and the study's others are printed, too."""
    monkeypatch.setattr(quality, "RESULTS", tmp_path)
    table = BenchmarkResult("KuaiRand", ("model",))
    table.figures |= {"kuairand_click_gain": 0.25, "kuairand_click_gain_low": 0.125}
    table.save_study(tmp_path / "kuairand.json", "gemline bench something")
    figures = figures_of(quality.QualityArgs(only="kuairand"), capsys)
    assert figures["kuairand_click_gain"] == 0.25 and figures["kuairand_click_gain_low"] == 0.125
    assert "gemline bench something" in str(figures["kuairand_click_gain_measured"])
    assert figures["kuairand_like_gain"] is None and figures["kuairand_like_gain_reason"]
