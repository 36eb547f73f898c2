"""A ranker is promoted only if it is calibrated, and better than the live one outside noise."""

import re
import shutil
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from etl.errors import TemporaryError, UserError
from etl.spec import DataSpec
from etl.spec.units import DaySplit
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from etl.tables.lease import INHERITED_LEASES_ENV, hold_leases
from gemline import main
from ranking.registry import manifest
from ranking.registry.promotion import (
    PromotionConfig,
    PromotionDecision,
    compare_rankers,
    ranker_predictions,
)
from ranking.registry.ranker import (
    ExportedRanker,
    latest_trained_pointer,
    live_pointer,
    live_version,
    load_ranker,
    rankers_folder,
)
from ranking.registry.records import read_promotion_record
from ranking.scoring.scorer import input_builder
from ranking.student.config import StudentTrainConfig
from ranking.trainer.promote import load_live_for_comparison, promote_if_better
from tests.conftest import LAST
from tests.ranking.conftest import SMALL, other_inputs
from tests.world import link_tables
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.evaluation.metrics import ne_by_objective
from training.evaluation.predictions import Predictions

ROWS = 20_000
CONFIG = PromotionConfig()
LENIENT = PromotionConfig(tolerance=1e6)  # for an untrained ranker


def predictions(noise: float, shift: float = 0.0, seed: int = 0) -> Predictions:
    """Predictions for the same examples: the true logits with noise and a shift."""
    shared_rng, noise_rng = np.random.default_rng(9), np.random.default_rng(seed)
    true_logits = shared_rng.normal(-2, 1.5, (ROWS, 2))
    shape = true_logits.shape
    labels = (shared_rng.uniform(size=shape) < expit(true_logits)).astype(np.float32)
    logits = true_logits + noise_rng.normal(0, 1, shape) * noise + shift
    impression_ids = np.array([f"i{n}" for n in range(ROWS)], object)
    users = np.arange(ROWS) // 10
    return Predictions(
        ("view", "click"),
        impression_ids,
        users,
        users * 0,
        expit(logits),
        labels,
        np.ones(shape, bool),
    )


def decide(candidate: Predictions, live: Predictions | None) -> PromotionDecision:
    return compare_rankers("v2", candidate, live, CONFIG)


def test_a_first_and_a_better_ranker_are_promoted() -> None:
    first = decide(predictions(1.0), None)
    assert first.promoted
    ne = {name: f"{value:.4f}" for name, value in ne_by_objective(predictions(1.0)).items()}
    found = [re.fullmatch(r"(\w+): NE (\S+) \[(\S+), (\S+)\]", each) for each in first.reasons]
    assert {match[1]: match[2] for match in found if match} == ne
    assert all(match[3] < match[2] < match[4] for match in found if match)
    assert decide(predictions(0.1), predictions(0.6)).promoted


def test_a_ranker_that_is_not_calibrated_is_not_promoted_even_without_a_live_one() -> None:
    decision = decide(predictions(0.1, shift=0.3), None)
    assert not decision.promoted
    assert {"view is not calibrated", "click is not calibrated"} <= set(decision.reasons)


def test_an_equal_or_worse_ranker_and_one_better_by_chance_are_not_promoted() -> None:
    equal = decide(predictions(0.5), predictions(0.5))
    assert not equal.promoted and "nothing is better outside noise" in equal.reasons
    assert not decide(predictions(0.5, seed=1), predictions(0.5, seed=2)).promoted
    assert not decide(predictions(0.6), predictions(0.1)).promoted


def test_a_ranker_better_for_one_objective_and_worse_for_another_is_not_promoted() -> None:
    good, bad = predictions(0.1), predictions(0.6)
    mixed = np.stack([good.probabilities[:, 0], bad.probabilities[:, 1]], 1)
    decision = decide(replace(good, probabilities=mixed), predictions(0.4))
    assert not decision.promoted and "click is worse" in decision.reasons


def test_a_better_ranker_that_is_not_calibrated_is_not_promoted() -> None:
    decision = decide(predictions(0.1, shift=0.3), predictions(0.9))
    assert not decision.promoted
    assert {"view is not calibrated", "click is not calibrated"} <= set(decision.reasons)


def test_an_objective_without_positives_is_not_evaluated() -> None:
    candidate = predictions(0.1)
    labels = candidate.labels * np.array([1, 0], np.float32)
    live = replace(predictions(0.6), labels=labels)
    decision = decide(replace(candidate, labels=labels), live)
    assert not any("click" in reason for reason in decision.reasons)
    nobody = replace(candidate, labels=0 * labels)
    decision = decide(nobody, None)
    assert not decision.promoted and "no objective has 10 positives" in decision.reasons[0]


def ranker_folder(lake: str, name: str, surface: str = "feed") -> Path:
    return local_path(rankers_folder(lake, surface) / name)


def copy_ranker(folder: Path, lake: str, name: str, surface: str = "feed") -> Path:
    """Copy an exported ranker into a lake; returns its folder there."""
    target = ranker_folder(lake, name, surface)
    shutil.copytree(folder, target)
    return target


@pytest.fixture
def ranker_lake(lake: Lake, folder: Path, tmp_path: Path) -> Lake:
    """The shared tables, and a ranker that was trained."""
    link_tables(lake, tmp_path)
    copy_ranker(folder, str(tmp_path), "one")
    latest_trained_pointer(str(tmp_path), "feed").promote("one")
    return Lake(str(tmp_path), lake.spec)


SPLIT = DaySplit(
    train_first=LAST - timedelta(days=3),
    train_last=LAST - timedelta(days=2),
    calibration=None,
    test_first=LAST - timedelta(days=1),
    test_last=LAST - timedelta(days=1),
    data_until=LAST,
)


def test_only_a_promoted_ranker_goes_live(ranker_lake: Lake, folder: Path) -> None:
    with pytest.raises(UserError, match="no ranker of reels is promoted"):
        promote_if_better(ranker_lake, "reels", SPLIT, CONFIG)
    first = promote_if_better(ranker_lake, "feed", SPLIT, CONFIG)
    assert first.promoted and first.reasons[0] == "the first of its surface"
    assert live_version(ranker_lake.root, "feed").name == "one"
    copy_ranker(folder, ranker_lake.root, "two")
    latest_trained_pointer(ranker_lake.root, "feed").promote("two")
    assert not promote_if_better(ranker_lake, "feed", SPLIT, LENIENT).promoted
    assert live_version(ranker_lake.root, "feed").name == "one"
    live_pointer(ranker_lake.root, "feed").promote("two")
    assert promote_if_better(ranker_lake, "feed", SPLIT, LENIENT).reasons == ("it is live already",)


def learn_labels_until(folder: Path, lake: Lake, day: date) -> None:
    """Make a ranker one that has learned labels until the end of a day."""
    training = manifest.RankerTraining(
        config=StudentTrainConfig(model=SMALL),
        first_day=SPLIT.train_first,
        labels_until=lake.spec.day_end(day),
        newest_labels={},
    )
    changed = manifest.read_manifest(folder).model_copy(update={"training": training})
    manifest.write_manifest(folder, changed)


def test_a_ranker_that_has_learned_labels_of_the_test_days_is_not_promoted(
    ranker_lake: Lake,
) -> None:
    """Not even as the first of its surface: its errors on these days say nothing."""
    new = ranker_folder(ranker_lake.root, "one")
    learn_labels_until(new, ranker_lake, SPLIT.test_first)
    decision = promote_if_better(ranker_lake, "feed", SPLIT, LENIENT)
    assert not decision.promoted and live_pointer(ranker_lake.root, "feed").read() is None
    assert decision.reasons[0].startswith("it has learned labels of the test days")
    learn_labels_until(new, ranker_lake, SPLIT.train_last)
    assert promote_if_better(ranker_lake, "feed", SPLIT, LENIENT).promoted


@pytest.mark.parametrize(
    "step",
    [
        "ranking.trainer.promote.write_promotion_record",
        "etl.tables.pointer.VersionPointer.promote",
        "ranking.registry.publication.remove_unreferenced_versions",
    ],
)
def test_a_promotion_that_is_interrupted_has_its_record_or_did_not_happen(
    ranker_lake: Lake, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            promote_if_better(ranker_lake, "feed", SPLIT, CONFIG)
    if live_pointer(ranker_lake.root, "feed").read() is None:
        assert promote_if_better(ranker_lake, "feed", SPLIT, CONFIG).promoted
    record = read_promotion_record(ranker_lake.root, "feed")
    assert record and record.version == "one" and record.promoted
    assert record.reasons[0] == "the first of its surface"


def test_a_ranker_that_was_rolled_back_is_not_promoted_until_it_is_unblocked(
    ranker_lake: Lake, folder: Path, spec_path: Path
) -> None:
    for name in ("two", "three"):
        copy_ranker(folder, ranker_lake.root, name)
    live_pointer(ranker_lake.root, "feed").promote("two")
    live_pointer(ranker_lake.root, "feed").promote("one")
    rollback = ["rank", "rollback", "--spec", str(spec_path), "--lake", ranker_lake.root]
    rollback += ["--surface", "feed"]
    assert main(rollback) == 0
    assert live_version(ranker_lake.root, "feed").name == "two"
    shutil.rmtree(ranker_folder(ranker_lake.root, "two"))
    for _ in range(2):
        decision = promote_if_better(ranker_lake, "feed", SPLIT, LENIENT)
        assert not decision.promoted
        assert decision.reasons == ("it was rolled back and is blocked",)
    assert main([*rollback, "--unblock", "nothing"]) == 2
    assert main([*rollback, "--unblock", "one"]) == 0
    assert promote_if_better(ranker_lake, "feed", SPLIT, LENIENT).promoted
    assert live_version(ranker_lake.root, "feed").name == "one"


def test_a_rollback_during_a_promotion_waits_for_nothing_and_stays_in_force(
    ranker_lake: Lake, folder: Path, spec_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = ranker_lake.root
    for name in ("two", "three"):
        copy_ranker(folder, root, name)
        live_pointer(root, "feed").promote(name)
    rollback = ["rank", "rollback", "--spec", str(spec_path), "--lake", root, "--surface", "feed"]

    def roll_back_and_pass(version: str, *_: object) -> PromotionDecision:
        assert main(rollback) == 0
        return PromotionDecision(version, True, ())

    monkeypatch.setattr("ranking.trainer.promote.compare_rankers", roll_back_and_pass)
    with hold_leases(root, ["ranker-feed"], "gemline rank promote"), monkeypatch.context() as patch:
        patch.delenv(INHERITED_LEASES_ENV)  # the rollback is a command of its own
        with pytest.raises(TemporaryError, match="was changed by another command"):
            promote_if_better(ranker_lake, "feed", SPLIT, LENIENT)
    state = live_pointer(root, "feed").read()
    assert state and state.live == "two" and state.blocked == ("three",)
    assert ranker_folder(root, "one").is_dir()


def test_a_damaged_live_ranker_does_not_block_the_next(ranker_lake: Lake, folder: Path) -> None:
    old = copy_ranker(folder, ranker_lake.root, "old")
    live_pointer(ranker_lake.root, "feed").promote("old")
    for name in manifest.REQUIRED_FILES:
        (old / name).write_bytes(b"")
    assert not promote_if_better(
        ranker_lake, "feed", SPLIT, CONFIG
    ).promoted  # it is not calibrated
    decision = promote_if_better(ranker_lake, "feed", SPLIT, LENIENT)
    assert decision.promoted and "is not the file that was saved" in decision.reasons[0]
    assert decision.reasons[0].startswith("the live one cannot be evaluated")


def test_versions_that_learned_labels_of_the_test_days_do_not_let_a_calibrated_ranker_pass(
    ranker_lake: Lake, folder: Path
) -> None:
    """A ranker of the first days of the log has learned labels of none; refits of it have."""
    spec, surface = ranker_lake.spec, "feed"
    for name, learned in (("old", SPLIT.train_last), ("damaged", SPLIT.train_last), ("new", LAST)):
        copy = copy_ranker(folder, ranker_lake.root, name)
        learn_labels_until(copy, ranker_lake, learned)
        live_pointer(ranker_lake.root, surface).promote(name)
    (ranker_folder(ranker_lake.root, "damaged") / manifest.MANIFEST).write_text("{")
    compared = load_live_for_comparison(ranker_lake, surface, SPLIT)
    assert isinstance(compared, ExportedRanker)  # the old one
    live_pointer(ranker_lake.root, surface).forget_previous()
    decision = promote_if_better(ranker_lake, surface, SPLIT, LENIENT)
    assert not decision.promoted
    assert decision.reasons[0].startswith("all retained versions of the live one have learned")
    other = copy_ranker(folder, ranker_lake.root, "other")  # of the spec before
    changed = manifest.read_manifest(other).model_copy(update={"spec": other_spec(spec)})
    manifest.write_manifest(other, changed)
    for name in ("other", "new"):
        live_pointer(ranker_lake.root, surface).promote(name)
    assert promote_if_better(ranker_lake, surface, SPLIT, LENIENT) == decision


def test_versions_of_the_days_until_labels_are_final_are_kept(lake: Lake, tmp_path: Path) -> None:
    fields = lake.spec.model_dump(mode="json")
    fields["objectives"]["conversion"] |= {"window": "30d"}
    spec = DataSpec.model_validate(fields)
    pointer = live_pointer(str(tmp_path), "feed", spec)
    for day in range(60):
        pointer.promote(f"v{day:02}")
    state = pointer.read()
    assert state and state.live == "v59" and len(state.previous) >= spec.label_maturity_days + 7


def test_a_ranker_of_another_surface_is_not_promoted(ranker_lake: Lake, folder: Path) -> None:
    copy_ranker(folder, ranker_lake.root, "one", surface="reels")
    latest_trained_pointer(ranker_lake.root, "reels").promote("one")
    with pytest.raises(UserError, match="is of surface feed, not of reels"):
        promote_if_better(ranker_lake, "reels", SPLIT, LENIENT)


def test_a_live_ranker_of_another_spec_does_not_block_the_next(
    ranker_lake: Lake, folder: Path
) -> None:
    old = copy_ranker(folder, ranker_lake.root, "old")
    changed = manifest.read_manifest(old).model_copy(update={"spec": other_spec(ranker_lake.spec)})
    manifest.write_manifest(old, changed)
    live_pointer(ranker_lake.root, "feed").promote("old")
    refused = promote_if_better(ranker_lake, "feed", SPLIT, CONFIG)
    assert not refused.promoted and "long_view is not calibrated" in refused.reasons
    decision = promote_if_better(ranker_lake, "feed", SPLIT, LENIENT)
    assert decision.promoted and decision.reasons[0] == "the first of its spec"


@pytest.mark.parametrize("key", ["similarity_attributes", "sequences", "position_bias"])
def test_a_live_ranker_of_other_inputs_does_not_block_the_next(
    ranker_lake: Lake, folder: Path, key: str
) -> None:
    """It can be compared, but not be refit: one within noise of it has to replace it."""
    old = copy_ranker(folder, ranker_lake.root, "old")
    spec = ranker_lake.spec.model_copy(update=other_inputs(ranker_lake.spec)[key])
    assert spec.hash == ranker_lake.spec.hash
    changed = manifest.read_manifest(old).model_copy(update={"spec": spec})
    manifest.write_manifest(old, changed)
    live_pointer(ranker_lake.root, "feed").promote("old")
    refused = promote_if_better(ranker_lake, "feed", SPLIT, CONFIG)
    assert not refused.promoted and "long_view is not calibrated" in refused.reasons
    decision = promote_if_better(ranker_lake, "feed", SPLIT, LENIENT)
    assert decision.promoted and decision.reasons[0].startswith(f"the first with other {key}")


def test_a_ranker_of_other_inputs_than_the_spec_is_not_promoted(ranker_lake: Lake) -> None:
    """It could not be refit."""
    for key, changes in other_inputs(ranker_lake.spec).items():
        other = Lake(ranker_lake.root, ranker_lake.spec.model_copy(update=changes))
        decision = promote_if_better(other, "feed", SPLIT, LENIENT)
        assert not decision.promoted and live_pointer(other.root, "feed").read() is None
        assert decision.reasons[0].startswith(f"it was trained with other {key}")


def other_spec(spec: DataSpec) -> DataSpec:
    return DataSpec.model_validate(spec.model_dump(mode="json") | {"allowed_lateness": "1h"})


def test_rankers_are_evaluated_as_they_serve(ranker_lake: Lake, folder: Path) -> None:
    ranker = load_ranker(folder)
    evaluated = ranker_predictions(ranker, ranker_lake, SPLIT).predictions
    row_of = {name: row for row, name in enumerate(evaluated.impression_ids)}
    build_inputs = input_builder(ranker, ranker_lake)
    window = LabelWindow.for_test(SPLIT, ranker_lake.spec)
    for batch in build_inputs.reader.batches([SPLIT.test_first], window, 64, Shuffle(None)):
        inputs = build_inputs(batch)
        user_state = ranker.user_state(inputs.requests)
        p = ranker.score(user_state, inputs.candidates).probabilities[inputs.candidate_index.mask]
        rows = [row_of[name] for name in batch.impression_ids]
        np.testing.assert_allclose(evaluated.probabilities[rows], p, atol=1e-5)
