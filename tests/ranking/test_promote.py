"""The gate lets a ranker answer only if it is better outside noise, and calibrated."""

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from etl.errors import UserError
from etl.spec import DataSpec
from etl.tables.lake import Lake
from gemline import main
from ranking.package import manifest
from ranking.package.versions import answering, current, newest, versions
from ranking.promote import GateConfig, Verdict, judge, judged, promote
from tests.conftest import LAST
from tests.world import link_tables
from training.predictions import Predictions
from training.split import Split

ROWS = 20_000
GATE = GateConfig()
LENIENT = GateConfig(tolerance=1e6)  # of a ranker that has learned nothing


def said(noise: float, shift: float = 0.0, seed: int = 0) -> Predictions:
    """Predictions of the same rows, off the true logits by noise and a shift."""
    fixed, own = np.random.default_rng(9), np.random.default_rng(seed)
    truth = fixed.normal(-2, 1.5, (ROWS, 2))
    labels = (fixed.uniform(size=truth.shape) < expit(truth)).astype(np.float32)
    off = truth + own.normal(0, 1, truth.shape) * noise + shift
    names = np.array([f"i{n}" for n in range(ROWS)], object)
    users = np.arange(ROWS) // 10
    known = np.ones(truth.shape, bool)
    return Predictions(("view", "click"), names, users, users * 0, expit(off), labels, known)


def verdict(ours: Predictions, theirs: Predictions | None) -> Verdict:
    return judge("v2", ours, theirs, GATE)


def test_the_first_passes_and_a_better_one_does() -> None:
    assert verdict(said(1.0), None).promoted
    assert verdict(said(0.1), said(0.6)).promoted


def test_one_that_is_not_calibrated_does_not_pass_without_another_to_compare() -> None:
    found = verdict(said(0.1, shift=0.3), None)
    assert not found.promoted
    assert {"view is off", "click is off"} <= set(found.reasons)


def test_what_is_the_same_or_worse_or_better_by_chance_does_not() -> None:
    same = verdict(said(0.5), said(0.5))
    assert not same.promoted and "nothing is better outside noise" in same.reasons
    assert not verdict(said(0.5, seed=1), said(0.5, seed=2)).promoted
    assert not verdict(said(0.6), said(0.1)).promoted


def test_better_for_one_objective_and_worse_for_another_does_not() -> None:
    good, bad = said(0.1), said(0.6)
    mixed = np.stack([good.probability[:, 0], bad.probability[:, 1]], 1)
    found = verdict(replace(good, probability=mixed), said(0.4))
    assert not found.promoted and "click is worse" in found.reasons


def test_a_better_one_that_is_not_calibrated_does_not() -> None:
    found = verdict(said(0.1, shift=0.3), said(0.9))
    assert not found.promoted
    assert {"view is off", "click is off"} <= set(found.reasons)


def test_an_objective_without_outcomes_says_nothing() -> None:
    ours = said(0.1)
    nothing = ours.labels * np.float32([1, 0])
    theirs = replace(said(0.6), labels=nothing)
    found = verdict(replace(ours, labels=nothing), theirs)
    assert not any("click" in reason for reason in found.reasons)


@pytest.fixture
def own(lake: Lake, folder: Path, tmp_path: Path) -> Lake:
    """A lake with the tables of the shared one, and a ranker that was trained."""
    link_tables(lake, tmp_path)
    shutil.copytree(folder, versions(str(tmp_path), "feed") / "one")
    newest(str(tmp_path), "feed").swap("one")
    return Lake(str(tmp_path), lake.spec)


SPLIT = Split(
    train_first=LAST - timedelta(days=3), train_last=LAST - timedelta(days=2), calibration=None,
    test_first=LAST - timedelta(days=1), test_last=LAST - timedelta(days=1), landed=LAST,
)  # fmt: skip


def test_the_pointer_moves_only_for_what_passes(own: Lake, folder: Path) -> None:
    with pytest.raises(UserError, match="no ranker of reels is promoted"):
        promote(own, "reels", SPLIT, GATE)
    first = promote(own, "feed", SPLIT, GATE)
    assert first.promoted and first.reasons[0] == "the first of its surface"
    assert answering(own.root, "feed").name == "one"
    shutil.copytree(folder, versions(own.root, "feed") / "two")
    newest(own.root, "feed").swap("two")
    assert not promote(own, "feed", SPLIT, LENIENT).promoted
    assert answering(own.root, "feed").name == "one"
    current(own.root, "feed").swap("two")
    assert promote(own, "feed", SPLIT, LENIENT).reasons == ("it answers already",)


def test_what_was_rolled_back_is_not_promoted_again_until_it_is_lifted(
    own: Lake, folder: Path, spec_path: Path
) -> None:
    for name in ("two", "three"):
        shutil.copytree(folder, versions(own.root, "feed") / name)
    current(own.root, "feed").swap("two")
    current(own.root, "feed").swap("one")
    rollback = ["rank", "rollback", "--spec", str(spec_path), "--lake", own.root]
    rollback += ["--surface", "feed"]
    assert main(rollback) == 0
    assert answering(own.root, "feed").name == "two"
    shutil.rmtree(versions(own.root, "feed") / "two")  # so that nothing else holds `one` back
    for _ in range(2):
        found = promote(own, "feed", SPLIT, LENIENT)
        assert not found.promoted and found.reasons == ("it was rolled back and is barred",)
    assert main([*rollback, "--lift", "nothing"]) == 2
    assert main([*rollback, "--lift", "one"]) == 0
    assert promote(own, "feed", SPLIT, LENIENT).promoted
    assert answering(own.root, "feed").name == "one"


def test_a_damaged_ranker_that_answers_does_not_block_the_next(own: Lake, folder: Path) -> None:
    place = versions(own.root, "feed") / "old"
    shutil.copytree(folder, place)
    current(own.root, "feed").swap("old")
    for name in manifest.FILES:
        (place / name).write_bytes(b"")
    assert not promote(own, "feed", SPLIT, GATE).promoted  # it is not calibrated
    found = promote(own, "feed", SPLIT, LENIENT)
    assert found.promoted and "is not the file that was saved" in found.reasons[0]
    assert found.reasons[0].startswith("the one that answers cannot be judged")


def test_a_ranker_of_another_surface_is_not_promoted(own: Lake, folder: Path) -> None:
    shutil.copytree(folder, versions(own.root, "reels") / "one")
    newest(own.root, "reels").swap("one")
    with pytest.raises(UserError, match="is of surface feed, not of reels"):
        promote(own, "reels", SPLIT, LENIENT)


def test_one_of_another_spec_does_not_stand_in_the_way(own: Lake, folder: Path) -> None:
    place = versions(own.root, "feed") / "old"
    shutil.copytree(folder, place)
    told = manifest.read(place)
    manifest.write(place, told.model_copy(update={"spec": other_spec(own.spec)}))
    current(own.root, "feed").swap("old")
    refused = promote(own, "feed", SPLIT, GATE)
    assert not refused.promoted and "long_view is off" in refused.reasons
    found = promote(own, "feed", SPLIT, LENIENT)
    assert found.promoted and found.reasons[0] == "the first of its spec"


def other_spec(spec: DataSpec) -> DataSpec:
    return DataSpec.model_validate(spec.model_dump(mode="json") | {"lateness": "1h"})


def test_rankers_are_judged_as_they_would_have_answered(own: Lake, folder: Path) -> None:
    from ranking.package.ranker import load
    from ranking.score import assembly_of
    from training.data.parts import Shuffle

    ranker = load(folder)
    found = judged(ranker, own, SPLIT)
    assembly = assembly_of(ranker, own)
    ripened = SPLIT.testing(own.spec)
    batches = assembly.reader.batches([SPLIT.test_first], ripened, 64, Shuffle(None))
    for batch in batches:
        inputs = assembly(batch)
        state = ranker.state(inputs.requests)
        p = ranker.probabilities(state, inputs.candidates)[inputs.rows.there]
        place = {name: row for row, name in enumerate(found.impressions)}
        rows = [place[name] for name in batch.impressions]
        np.testing.assert_allclose(found.probability[rows], p, atol=1e-5)
