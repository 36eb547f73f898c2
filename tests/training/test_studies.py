"""Laws of comparing models: intervals over users, trials that are run once, curves."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ablation import CHANGES
from benchmarks.agreement import agreement
from etl.tables.lake import Lake
from features.inputs import features_of
from gemline import main
from ranking.report import figures
from tests.conftest import FIRST, LAST
from tests.world import link_tables
from training.config import TrainConfig
from training.lawcurve import MODELS, SIZES, Law, ne
from training.loop.loss import Loss, thinning
from training.loop.paired import apart
from training.model.config import SCALES
from training.model.gem import Gem
from training.predictions import Predictions
from training.split import Split
from training.study import Study, kept
from training.trials import Trials

SPLIT = Split(
    train_first=FIRST, train_last=FIRST, calibration=None, test_first=LAST, test_last=LAST,
    landed=LAST,
)  # fmt: skip
TINY = TrainConfig(scale="tiny", size=0.5, max_length=8)


def said(seed: int, blur: float, users: int = 60, n: int = 3000) -> Predictions:
    """Labels of a coin that differs by user, and how well it is known."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, n)
    p = rng.uniform(0.1, 0.6, users)[user]
    labels = (rng.random(n) < p).astype(np.float32)
    told = (1 - blur) * p + blur * p.mean()
    return Predictions(
        ("click",), np.arange(n).astype(str).astype(object), user, np.ones(n, np.int64),
        told[:, None], labels[:, None], np.ones((n, 1), bool),
    )  # fmt: skip


def test_a_difference_is_that_of_the_scores_and_its_interval_holds_the_truth() -> None:
    better, worse = said(0, 0.0), said(0, 0.9)
    found = apart([better], [worse], "click")
    assert found.value == pytest.approx(ne(better, "click") - ne(worse, "click"))
    assert found.low < found.value < found.high < 0 and found.sure
    nothing = apart([better, worse], [worse, better], "click")
    assert nothing.value == pytest.approx(0, abs=1e-12) and not nothing.sure


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**16))
def test_more_of_the_same_users_is_no_more_evidence(seed: int) -> None:
    """Each row twice, of the same user: the interval stays; as of other users it would shrink."""
    ours, theirs = said(seed, 0.2), said(seed, 0.6)

    def twice(p: Predictions, shift: int) -> Predictions:
        def double(x: np.ndarray) -> np.ndarray:
            return np.concatenate((x, x))

        user = np.concatenate((p.user, p.user + shift))
        arrays = {n: double(getattr(p, n)) for n in ("impressions", "surface", "labels", "known")}
        return replace(p, user=user, probability=double(p.probability), **arrays)

    def width(shift: int) -> float:
        found = apart([twice(ours, shift)], [twice(theirs, shift)], "click")
        return found.high - found.low

    once = apart([ours], [theirs], "click")
    assert width(0) == pytest.approx(once.high - once.low, rel=1e-6)
    assert width(10_000) < 0.85 * width(0)


def test_a_law_is_found_again() -> None:
    flops = np.array([1e6, 3e6, 1e7, 3e7, 1e8])
    law = Law.of(list(flops), list(0.9 - 0.02 * np.log10(flops)))
    assert law.slope == pytest.approx(-0.02) and law.r_squared == pytest.approx(1)
    noisy = Law.of(list(flops), [0.8, 0.79, 0.81, 0.78, 0.8])
    assert noisy.half > abs(noisy.slope) / 3 and noisy.r_squared < 1


@pytest.fixture(scope="module")
def trials(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(lake, SPLIT, tmp_path_factory.mktemp("trials"))


def test_a_trial_is_run_once_and_leaves_the_lake_alone(trials: Trials) -> None:
    before = sorted(p.name for p in Path(trials.lake.root).iterdir())
    first = trials.gem(TINY)
    written = {p: p.stat().st_mtime_ns for p in trials.folder.iterdir()}
    again = trials.gem(TINY)
    assert {p: p.stat().st_mtime_ns for p in trials.folder.iterdir()} == written
    np.testing.assert_array_equal(first.predictions.probability, again.predictions.probability)
    other = trials.gem(TINY.model_copy(update={"size": 1.0}))
    assert other.flops > 1.5 * first.flops
    assert sorted(p.name for p in Path(trials.lake.root).iterdir()) == before


def test_models_of_each_surface_are_of_the_same_rows_as_one_of_all(trials: Trials) -> None:
    pooled, separate = trials.pooled(TINY), trials.separate(TINY)
    assert (pooled.impressions == separate.impressions).all()
    assert (pooled.labels == separate.labels).all() and (pooled.known == separate.known).all()
    assert (pooled.probability != separate.probability).any()


def test_the_law_curve_is_drawn(
    lake: Lake, spec_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.lawcurve.SIZES", (0.25, 0.5, 1.0))
    monkeypatch.setattr("training.lawcurve.MODELS", {"GEM": {}, "short": {"max_length": 4}})
    link_tables(lake, tmp_path)
    days = ["--train", f"{FIRST}:{FIRST}", "--test", f"{LAST}:{LAST}", "--landed", str(LAST)]
    where = ["--spec", str(spec_path), "--lake", str(tmp_path)]
    asked = [*days, *where, "--scale", "tiny", "--max-length", "8", "--objective", "click"]
    assert main(["train", "lawcurve", *asked]) == 0
    (study,) = kept(tmp_path / "studies")
    assert [row[0] for row in study.rows] == ["GEM", "short"]
    assert all(len(points) == 3 for points in study.curves.values())
    assert "<svg" in figures.study(study)
    assert main(["train", "lawcurve", *asked[:-1], "buy"]) == 2


def test_a_study_is_kept_as_it_was(tmp_path: Path) -> None:
    told = Study(
        title="t", command="c", columns=("a",), rows=(("b",),), intervals={"x": (1.0, 0.5, 2.0)}
    )
    told.keep(tmp_path / "one.json")
    assert kept(tmp_path) == [told]
    assert (
        "<svg" in figures.study(told)
        and figures.study(told.model_copy(update={"intervals": {}})) == ""
    )


def test_scales_that_order_changes_alike_agree() -> None:
    rng = np.random.default_rng(0)
    effect = np.concatenate(([0.0], rng.normal(0, 1, 8)))
    noise = rng.gamma(2, 1, (200, 1))
    same, turned = noise * (5 + effect), noise * (5 - effect)
    assert agreement(same, same + 1) == pytest.approx((1, 1, 1))
    assert agreement(same, turned)[0] == pytest.approx(-1)
    some = same + rng.normal(0, 6, same.shape)
    value, low, high = agreement(some, same)
    assert low <= value <= high and low < high


@pytest.mark.parametrize("name", [*CHANGES, *MODELS])
def test_every_change_of_a_study_makes_a_model(name: str, lake: Lake) -> None:
    changed = CHANGES.get(name) or MODELS.get(name, {})
    told = TrainConfig(scale="tiny").model_dump() | changed
    config = TrainConfig.model_validate(told)
    features = features_of(lake.spec)
    Gem(features, config.sizes)
    Loss.of(config, features.objectives)
    thinning(config, features.objectives)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_keep_heads_whole(scale: str, size: float) -> None:
    config = SCALES[scale].times(size)
    assert config.event_width % (2 * config.heads) == 0
    assert SCALES[scale].times(1.0) == SCALES[scale]
