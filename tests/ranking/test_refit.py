"""A refit continues the live ranker on labels that were predicted before they were learned."""

import shutil
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from deltalake import DeltaTable
from mlflow import MlflowClient

from benchmarks.studies.student_trials import link_lake_with_gem
from etl.cli.runner import format_data_until
from etl.errors import TemporaryError, UserError
from etl.spec.units import DAY, DaySplit
from etl.tables import atomic_io
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from etl.tables.pointer import PointerState
from etl.tables.uri import StoragePath
from gemline import main
from ranking.distillation.domain import domain_predictions_path, load_domain_predictions
from ranking.inputs.segments import NEW
from ranking.registry.export import TrainingSnapshot
from ranking.registry.manifest import (
    DAY_FILE,
    RankerTraining,
    offsets_of,
    read_manifest,
    write_manifest,
)
from ranking.registry.model_card import model_card
from ranking.registry.promotion import PromotionConfig, PromotionDecision, ranker_predictions
from ranking.registry.ranker import (
    ExportedRanker,
    latest_trained_pointer,
    live_pointer,
    live_version,
    load_ranker,
    load_ranker_before,
    version_to_evaluate,
)
from ranking.registry.records import (
    PromotionRecord,
    read_promotion_record,
    read_refit_record,
    write_promotion_record,
)
from ranking.registry.tracking import register_decision, register_ranker
from ranking.report.data import model_cards
from ranking.scoring.offsets import RankerCalibration
from ranking.scoring.segment_calibration import ALL_ROWS, SegmentCalibration
from ranking.student.config import (
    DistillationConfig,
    DomainTrainConfig,
    SharedModule,
    StudentTrainConfig,
)
from ranking.student.trained import new_student
from ranking.trainer.calibrate import predict_window, refresh_calibration, refresh_live_calibration
from ranking.trainer.continuation import continue_training, day_windows, load_training_state
from ranking.trainer.label_days import days_with_labels
from ranking.trainer.promote import (
    candidate_predictions,
    load_live_for_comparison,
    promote_if_better,
)
from ranking.trainer.refit import blocked_refit, refit_live_ranker
from ranking.trainer.student_trainer import StudentTrainer
from ranking.trainer.train import train_domain, train_on_surfaces, train_ranker
from tests.conftest import FIRST, LAST
from tests.ranking.conftest import SMALL, other_inputs
from tests.world import link_tables
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.teacher.embeddings import TeacherEmbeddings
from training.teacher.predictions import TeacherPredictions

SURFACE = "feed"
SECOND, THIRD = FIRST + timedelta(days=1), FIRST + timedelta(days=2)
SPLIT = DaySplit(
    train_first=FIRST,
    train_last=FIRST,
    calibration=SECOND,
    test_first=THIRD,
    test_last=THIRD,
    data_until=THIRD,
)
END = int(datetime.combine(LAST + timedelta(days=1), time(), UTC).timestamp())
NOON = END - 12 * 3600
CONFIG = StudentTrainConfig(
    model=SMALL, distillation=DistillationConfig(shared_modules=()), batch_rows=64
)
PASSING = PromotionConfig(segment_tolerance=1e9)  # segments are not judged


@pytest.fixture(scope="module")
def trained(gem_lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The shared tables, and a ranker that was trained on the first day and is live."""
    root = tmp_path_factory.mktemp("trained")
    lake = link_tables(gem_lake, root)
    (root / "evaluations").mkdir(exist_ok=True)
    (root / "mlflow.db").unlink(missing_ok=True)  # that of the shared tables
    folder = train_ranker(lake, SURFACE, SPLIT, CONFIG)
    live_pointer(lake.root, SURFACE).promote(folder.name)
    return lake


def copy_with_own_rankers(lake: Lake, root: Path) -> Lake:
    """Links to the tables and models of a lake, and a copy of its rankers."""
    root.mkdir()
    for path in Path(lake.root).iterdir():
        if path.name not in ("rankers", "mlflow.db"):
            (root / path.name).symlink_to(path.resolve())
    shutil.copytree(Path(lake.root, "rankers"), root / "rankers")
    return Lake(str(root), lake.spec)


@pytest.fixture
def own_lake(trained: Lake, tmp_path: Path) -> Lake:
    """The tables, and a copy of the live ranker that the test may change."""
    return copy_with_own_rankers(trained, tmp_path / "lake")


@dataclass(frozen=True)
class Refits:
    """A lake whose live ranker passed the gate (`gated`), then was refit on two days."""

    lake: Lake
    gated: StoragePath
    third: StoragePath
    last: StoragePath


@pytest.fixture(scope="module")
def refits(trained: Lake, tmp_path_factory: pytest.TempPathFactory) -> Refits:
    lake = copy_with_own_rankers(trained, tmp_path_factory.mktemp("refits") / "lake")
    gated = live_version(lake.root, SURFACE)
    third, last = (
        refit_live_ranker(lake, SURFACE, until) for until in (lake.spec.day_end(THIRD), END)
    )
    return Refits(lake, gated, third, last)


def test_a_training_continued_from_its_state_is_the_same_training(trained: Lake) -> None:
    distillation = DistillationConfig(shared_modules=(), use_adapter=False)
    config = CONFIG.model_copy(update={"distillation": distillation})
    reader = ExampleReader.latest(trained, "behaviour", SMALL.max_length, (SURFACE,))
    days, spec = [FIRST, SECOND, THIRD], trained.spec
    first = LabelWindow(0, spec.day_end(SECOND))
    second = LabelWindow(first.end, spec.day_end(THIRD))

    def new_trainer() -> StudentTrainer:
        torch.manual_seed(0)
        student = new_student(reader, SMALL, len(reader.items), TeacherEmbeddings.empty())
        return StudentTrainer(student, config, TeacherPredictions.of_gem(trained, days))

    def continued(trainer: StudentTrainer) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        trainer.train(days, second)
        return trainer.state_dict()

    trainer, restored = new_trainer(), new_trainer()
    trainer.train(days, first)
    restored.load_state_dict(trainer.state_dict())
    expected, found = continued(trainer), continued(restored)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


DOMAIN = "everywhere"


def of_domain(lake: Lake, root: Path) -> tuple[Lake, TrainingSnapshot]:
    """A lake with a model of a domain, and a ranker that learned its predictions."""
    lake = link_lake_with_gem(lake, root)
    labels = DomainTrainConfig(
        model=SMALL, batch_rows=512, distillation=DistillationConfig(kind="none")
    )
    train_domain(lake, DOMAIN, SPLIT, labels)
    distillation = DistillationConfig(teacher="domain", shared_modules=(), pretraining_epochs=0)
    config = CONFIG.model_copy(update={"distillation": distillation})
    trainer = train_on_surfaces(lake, (SURFACE,), SPLIT, config)
    return lake, trainer.snapshot(FIRST, lake.spec.day_end(FIRST))


def test_a_refit_learns_what_the_domains_model_predicted_and_nothing_of_gem(
    gem_lake: Lake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Later examples have no predictions; without the file, labels alone are learned."""
    lake, snapshot = of_domain(gem_lake, tmp_path / "lake")
    reader = ExampleReader.latest(lake, "behaviour", SMALL.max_length, (SURFACE,))
    predictions = load_domain_predictions(lake, SURFACE, SPLIT)
    refit = continue_training(reader, snapshot, [FIRST, SECOND], SECOND)
    teacher = refit.loss.teacher
    assert teacher is not None and teacher.versions == [f"{DOMAIN}-{FIRST:%Y%m%d}"]
    window = LabelWindow(0, lake.spec.day_end(SECOND))
    for day, is_known in ((FIRST, True), (SECOND, False)):
        ids = next(reader.batches([day], window, 512, Shuffle(None))).impression_ids
        found = teacher.lookup(ids)
        assert bool(found.mask.any()) == is_known
        assert torch.equal(found.logits, predictions.lookup(ids).logits)
    assert refit.teacher_versions == set(snapshot.record.teacher_versions)

    domain_predictions_path(lake, DOMAIN, FIRST).unlink()
    refit = continue_training(reader, snapshot, [FIRST, SECOND], SECOND)
    assert "predictions of the domain's model that the ranker of feed has learned" in caplog.text
    assert refit.loss.teacher is not None
    assert not refit.loss.teacher.lookup(ids).mask.any()
    heads = [p.clone() for p in refit.loss.teacher_heads.parameters()]
    refit.train([FIRST, SECOND], LabelWindow(lake.spec.day_end(FIRST), window.end))
    assert heads and all(map(torch.equal, heads, refit.loss.teacher_heads.parameters()))
    kept = refit.snapshot(FIRST, window.end)
    assert kept.record.teacher_versions == snapshot.record.teacher_versions
    assert kept.state.keys() >= {name for name in snapshot.state if name.startswith("adapter.")}


@pytest.mark.parametrize("shared_modules", [("tables", "events"), None])
def test_a_refit_does_not_train_frozen_modules(
    trained: Lake, shared_modules: tuple[SharedModule, ...] | None
) -> None:
    gated = live_version(trained.root, SURFACE)
    manifest = read_manifest(gated)
    training, state = manifest.training, load_training_state(gated)
    assert training
    distillation = DistillationConfig(shared_modules=shared_modules, freeze_shared=True)
    if shared_modules is None:  # all but `recency` were copied, and frozen from the start
        frozen = ("optimizer.tables.", "optimizer.student.event_tokenizer.")
        state = {name: tensor for name, tensor in state.items() if not name.startswith(frozen)}
    config = training.config.model_copy(update={"distillation": distillation})
    record = training.model_copy(update={"config": config, "shared_gem": "gem"})
    reader = ExampleReader.latest(trained, "behaviour", SMALL.max_length, (SURFACE,))
    trainer = continue_training(reader, TrainingSnapshot(record, state), [SECOND], SECOND)
    student = trainer.student
    assert student.shared_gem == "gem"
    card = model_card(manifest.model_copy(update={"training": record}))
    assert "that it started with: those of gem." in card
    assert not any(p.requires_grad for p in student.tables.parameters())
    assert not any(p.requires_grad for p in student.student.event_tokenizer.parameters())
    assert all(p.requires_grad for p in student.student.recency.parameters())


def test_two_refits_equal_one_of_all_their_days(refits: Refits, own_lake: Lake) -> None:
    at_once = refit_live_ranker(own_lake, SURFACE, END)
    one, two = load_training_state(refits.last), load_training_state(at_once)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    manifests = [read_manifest(folder) for folder in (refits.last, at_once)]
    assert manifests[0].calibration == manifests[1].calibration
    offsets = [offsets_of(refits.last, manifests[0]), offsets_of(at_once, manifests[1])]
    assert offsets[0] and offsets[1] and offsets[0].by_objective == offsets[1].by_objective


def test_a_refit_learns_every_final_label(refits: Refits) -> None:
    lake, gated, last = refits.lake, refits.gated, refits.last
    assert live_version(lake.root, SURFACE) == last != gated
    before, after = read_manifest(gated).training, read_manifest(last).training
    assert before and after
    spec = lake.spec
    assert after.labels_until == spec.day_end(LAST) and after.refit_of == gated.name
    for name, newest in after.newest_labels.items():
        assert spec.day_start(FIRST) <= before.newest_labels[name] < spec.day_end(FIRST)
        assert spec.day_start(LAST) <= newest < spec.day_end(LAST), name
    card = (local_path(last) / "model_card.md").read_text()
    assert f"Refit** of {gated.name}" in card and all(name in card for name in after.newest_labels)
    assert all(f"{name} {version}" in card for name, version in after.table_versions.items())
    assert set(before.teacher_versions) < set(after.teacher_versions) and after.table_versions
    record = read_refit_record(lake.root, SURFACE)
    assert record and record.version == last.name
    assert refit_live_ranker(lake, SURFACE, END) == last  # there is nothing left to learn


def test_a_surface_may_have_no_impressions_on_the_last_day(own_lake: Lake) -> None:
    """Its ads may be paused, or the day has just begun."""
    spec = own_lake.spec
    for name in ("examples", "impressions"):
        table = Path(own_lake.root, name)
        shared = table.resolve()
        table.unlink()
        shutil.copytree(shared, table)
        DeltaTable(table).delete(f"day = '{LAST}' AND surface = {spec.surface_codes[SURFACE]}")
    refit = read_manifest(refit_live_ranker(own_lake, SURFACE, END)).training
    assert refit and refit.labels_until == END
    assert spec.day_start(THIRD) <= max(refit.newest_labels.values()) < spec.day_end(THIRD)


def test_the_report_shows_the_card_of_the_live_ranker(refits: Refits) -> None:
    assert model_cards(refits.lake) == {
        SURFACE: (local_path(refits.last) / "model_card.md").read_text()
    }


def test_refits_are_registered_in_mlflow_with_their_lineage(refits: Refits) -> None:
    client = MlflowClient(f"sqlite:///{refits.lake.root}/mlflow.db")
    registered = {
        version.tags["version"]: version
        for version in client.search_model_versions("name = 'simulator-feed'")
    }
    assert set(registered) == {refits.third.name, refits.last.name}
    last = registered[refits.last.name]
    assert last.source == str(refits.last) and last.tags["refit_of"] == refits.gated.name
    assert last.description == (local_path(refits.last) / "model_card.md").read_text()


def test_mlflow_has_the_decision_of_the_gate_and_no_removed_version(own_lake: Lake) -> None:
    gated = live_version(own_lake.root, SURFACE)
    manifest = read_manifest(gated)
    for folder in (gated, gated.parent / "removed"):
        register_ranker(own_lake, folder, manifest)
    live_pointer(own_lake.root, SURFACE).path.unlink()
    decision = promote_if_better(own_lake, SURFACE, SPLIT, PromotionConfig())
    register_decision(own_lake, SURFACE)
    client = MlflowClient(f"sqlite:///{own_lake.root}/mlflow.db")
    (registered,) = client.search_model_versions("name = 'simulator-feed'")
    card = registered.description or ""
    assert registered.source == str(gated) and "not evaluated yet" not in card
    assert decision.promoted and all(text in card for text in decision.reasons)
    assert registered.tags["gate"] == "; ".join(("promoted", *decision.reasons))


def gate_rows(card: str) -> list[str]:
    """The rows of a model card's table of segments at the gate."""
    (_, section) = card.split("## Evaluation at the gate")
    lines = section.split("\n## ")[0].splitlines()
    return [line for line in lines if line.startswith("|")][2:]


def judged_segment(objective: str, segment: str, p_value: float) -> SegmentCalibration:
    return SegmentCalibration(
        objective=objective, segment=segment, value=1, rows=400, positives=100, predicted=131.0,
        p_value=p_value,
    )  # fmt: skip


JUDGED = (
    judged_segment("click", "surface", 0.5),
    judged_segment("long_view", "surface", 1e-9),
    judged_segment("click", ALL_ROWS, 0.02),
)


def assert_shows_judged_segments(card: str) -> None:
    """All rows come first, then the segments with the least probable errors."""
    rows = gate_rows(card)
    assert [row.split(" | ")[0] for row in rows] == ["| click", "| long_view", "| click"]
    assert all("| 100 | 1.31 |" in row for row in rows) and "all rows" in rows[0]


def test_mlflow_has_the_calibration_by_segment_that_the_gate_judged(own_lake: Lake) -> None:
    gated = live_version(own_lake.root, SURFACE).name
    record = PromotionRecord(version=gated, promoted=False, reasons=("worse",), segments=JUDGED)
    write_promotion_record(own_lake.root, SURFACE, record)
    register_decision(own_lake, SURFACE)
    client = MlflowClient(f"sqlite:///{own_lake.root}/mlflow.db")
    (registered,) = client.search_model_versions("name = 'simulator-feed'")
    assert_shows_judged_segments(registered.description or "")


def test_cards_of_refits_show_the_calibration_by_segment_at_the_gate(own_lake: Lake) -> None:
    """Also that of a later refit, when the gate has judged another version since."""
    root = own_lake.root
    gated = live_version(root, SURFACE).name
    judged = PromotionRecord(version=gated, promoted=True, reasons=("better",), segments=JUDGED)
    other = PromotionRecord(version="other", promoted=False, reasons=())
    for record, day in ((judged, THIRD), (other, LAST)):
        write_promotion_record(root, SURFACE, record)
        folder = refit_live_ranker(own_lake, SURFACE, own_lake.spec.day_end(day))
        assert_shows_judged_segments((local_path(folder) / "model_card.md").read_text())


def test_items_seen_since_the_training_leave_the_row_of_the_unknown_item(refits: Refits) -> None:
    gated, refit = load_ranker(refits.gated), load_ranker(refits.last)
    assert refit.manifest.num_items > gated.manifest.num_items == len(gated.tables["item"])
    new_rows = refit.tables["item"][gated.manifest.num_items :]
    differs = (new_rows != gated.tables["item"][0]).any(1)
    assert differs.any()  # rows of items that were shown


def test_offsets_are_refreshed_with_the_weights_before_the_labels_are_learned(
    refits: Refits,
) -> None:
    lake, spec = refits.lake, refits.lake.spec
    manifest = read_manifest(refits.third)
    training, before = manifest.training, offsets_of(refits.third, manifest)
    assert training and before and before.labels_until == spec.day_end(THIRD)
    reader = ExampleReader.latest(lake, "behaviour", SMALL.max_length, (SURFACE,))
    snapshot = TrainingSnapshot(training, load_training_state(refits.third))
    trainer = continue_training(reader, snapshot, [FIRST, SECOND, THIRD, LAST], LAST)
    window = LabelWindow(spec.day_start(LAST), spec.day_end(LAST), only_unlearned=True)
    held_out_predictions = predict_window(trainer.averaged, [FIRST, SECOND, THIRD, LAST], window)
    is_new = held_out_predictions.segments["new_item"] == NEW
    assert 0 < is_new.mean() < 0.5  # items of the last day are new to the weights before it
    calibration = RankerCalibration(manifest.calibration, before)
    expected = refresh_calibration(
        calibration, held_out_predictions, trainer.averaged, window
    ).offsets
    refit = read_manifest(refits.last)
    found = offsets_of(refits.last, refit)
    assert found and expected and found.by_objective == expected.by_objective
    assert found.by_objective != before.by_objective and refit.calibration == manifest.calibration
    assert refit.training and refit.training.evaluation
    assert refit.training.evaluation.labels_from == window.start
    judged = held_out_predictions.calibrated(calibration).segment_calibrations()
    assert refit.training.evaluation.segments == tuple(judged)


def test_a_refresh_between_refits_learns_each_label_once(own_lake: Lake) -> None:
    """A refit after it trains the ranker, but has no labels left for the offsets."""
    gated = live_version(own_lake.root, SURFACE)
    before = offsets_of(gated, read_manifest(gated))
    refreshed = refresh_live_calibration(own_lake, SURFACE, END)
    assert before and refreshed.by_objective != before.by_objective
    assert refreshed.labels_until == own_lake.spec.day_end(LAST)
    assert offsets_of(gated, read_manifest(gated)) == refreshed
    assert refresh_live_calibration(own_lake, SURFACE, END) == refreshed
    refit = read_manifest(refit_live_ranker(own_lake, SURFACE, END))
    after = offsets_of(live_version(own_lake.root, SURFACE), refit)
    assert after and after.by_objective == refreshed.by_objective
    assert refit.training and refit.training.evaluation is None


def test_offsets_that_learned_the_labels_of_test_days_are_not_evaluated_on_them(
    own_lake: Lake,
) -> None:
    gated = live_version(own_lake.root, SURFACE)
    before = offsets_of(gated, read_manifest(gated))
    refresh_live_calibration(own_lake, SURFACE, own_lake.spec.day_end(THIRD))
    refresh_live_calibration(own_lake, SURFACE, END)
    compared = load_live_for_comparison(own_lake, SURFACE, SPLIT)
    assert isinstance(compared, ExportedRanker) and compared.offsets == before
    after = own_lake.spec.day_end(LAST)
    assert load_ranker_before(gated, after).offsets == load_ranker(gated).offsets != before
    assert load_ranker_before(gated, own_lake.spec.day_start(SECOND)).offsets is None


def test_labels_from_which_offsets_were_fitted_do_not_count_twice(refits: Refits) -> None:
    """The calibration of the gated version was fitted on the second day, which its refit learns."""
    spec, gated = refits.lake.spec, read_manifest(refits.gated)
    offsets = offsets_of(refits.gated, gated)
    assert gated.training and offsets
    assert gated.training.labels_until == spec.day_end(FIRST)
    assert offsets.labels_until == spec.day_end(SECOND)
    third = read_manifest(refits.third).training
    assert third and third.evaluation
    assert third.evaluation.labels_from == spec.day_end(SECOND)


def test_windows_of_days_follow_each_other(trained: Lake) -> None:
    spec = trained.spec
    start = spec.day_start(SECOND) + 3600
    for until in (END, NOON):
        windows = day_windows(trained, start, until)
        assert [day for _, day in windows] == [SECOND, THIRD, LAST]
        bounds = [(window.start, window.end) for window, _ in windows]
        assert bounds[0][0] == start and bounds[-1][1] == until
        assert all(end == begin for (_, end), (begin, _) in pairwise(bounds))
    assert day_windows(trained, spec.day_end(LAST), END) == []


def evaluated(lake: Lake, day: date) -> str:
    start = lake.spec.day_start(day)
    return version_to_evaluate(lake.root, SURFACE, start, lake.spec).name


def test_a_day_is_evaluated_by_a_version_that_learned_nothing_of_it(
    refits: Refits, caplog: pytest.LogCaptureFixture
) -> None:
    lake, gated, third, last = (
        refits.lake,
        *(folder.name for folder in (refits.gated, refits.third, refits.last)),
    )
    days = (SECOND, THIRD, LAST, LAST + timedelta(days=1))
    assert [evaluated(lake, day) for day in days] == [gated, gated, third, last]
    compared = load_live_for_comparison(lake, SURFACE, SPLIT)
    assert isinstance(compared, ExportedRanker) and compared.manifest.version == gated
    warning = "has learned labels since"
    assert warning not in caplog.text
    assert evaluated(lake, FIRST) == last  # all have learned labels of the first day
    assert warning in caplog.text


def test_the_gate_does_not_judge_the_recipe_of_a_live_refit_again(refits: Refits) -> None:
    decision = promote_if_better(refits.lake, SURFACE, SPLIT, PromotionConfig())
    assert not decision.promoted and decision.reasons == ("it is live already",)
    assert live_version(refits.lake.root, SURFACE) == refits.last


def test_a_candidate_is_judged_with_the_labels_that_the_live_refit_has_learned(
    refits: Refits,
) -> None:
    """After them it predicts as its refit serves."""
    lake, until = refits.lake, refits.lake.spec.day_end(THIRD)
    split = SPLIT.model_copy(update={"test_first": LAST, "test_last": LAST, "data_until": LAST})
    gated, third = load_ranker(refits.gated), load_ranker(refits.third)
    judged = candidate_predictions(lake, refits.gated, gated, until, split).predictions
    served = ranker_predictions(third, lake, split).predictions
    np.testing.assert_allclose(judged.probabilities, served.probabilities, atol=1e-5)
    alone = candidate_predictions(lake, refits.gated, gated, None, split).predictions
    assert np.abs(alone.probabilities - served.probabilities).max() > 1e-3


def passes(version: str, *_: object) -> PromotionDecision:
    """The gate's comparison, won by the new ranker."""
    return PromotionDecision(version, True, ("click is better",))


def without_last_day(lake: Lake) -> Lake:
    """The lake, pinned at versions of its own tables from before the last day was written."""
    pins = {}
    for name in ("events", "examples", "impressions"):
        table = Path(lake.root, name)
        shared = table.resolve()
        table.unlink()
        shutil.copytree(shared, table)
        complete = DeltaTable(table).version()
        DeltaTable(table).delete(f"day = '{LAST}'")
        pins[name] = DeltaTable(table).version()
        DeltaTable(table).restore(complete)
    return Lake(lake.root, lake.spec, pins)


def test_a_new_ranker_of_pinned_tables_learns_the_later_labels_of_the_live_refit(
    refits: Refits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daily run judges on the tables of its day; refreshes of the next day have refit since."""
    pinned = without_last_day(copy_with_own_rankers(refits.lake, tmp_path / "lake"))
    candidate = train_ranker(pinned, SURFACE, SPLIT, CONFIG.model_copy(update={"seed": 1}))
    monkeypatch.setattr("ranking.trainer.promote.compare_rankers", passes)
    assert promote_if_better(pinned, SURFACE, SPLIT, PASSING).promoted
    refit = read_manifest(live_version(pinned.root, SURFACE)).training
    live = read_manifest(refits.last).training
    assert refit and live and refit.refit_of == candidate.name
    assert refit.labels_until == live.labels_until == END
    assert refit.newest_labels == live.newest_labels


def test_a_new_ranker_goes_live_with_the_labels_that_the_live_refit_has_learned(
    refits: Refits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No service reads the version that has not learned them: both are published at once."""
    lake = copy_with_own_rankers(refits.lake, tmp_path / "lake")
    candidate = train_ranker(lake, SURFACE, SPLIT, CONFIG.model_copy(update={"seed": 1}))
    published: list[str] = []

    def write_text(path: StoragePath, text: str) -> None:
        if path.name == "current.json":
            published.append(PointerState.model_validate_json(text).live)
        atomic_io_write_text(path, text)

    atomic_io_write_text = atomic_io.write_text
    monkeypatch.setattr("ranking.trainer.promote.compare_rankers", passes)
    monkeypatch.setattr("etl.tables.atomic_io.write_text", write_text)
    assert promote_if_better(lake, SURFACE, SPLIT, PASSING).promoted
    live = live_version(lake.root, SURFACE)
    training = read_manifest(live).training
    assert training and training.labels_until == END and training.refit_of == candidate.name
    assert "click is better" in training.gate and published == [live.name]
    assert live_pointer(lake.root, SURFACE).rollback() == candidate.name


def add_candidate(lake: Lake, folder: StoragePath) -> str:
    """Make a copy of a ranker the one that was trained last; returns its name."""
    shutil.copytree(local_path(folder), local_path(folder.parent / "next"))
    latest_trained_pointer(lake.root, SURFACE).promote("next")
    return "next"


def test_a_live_refit_of_other_inputs_is_replaced_by_a_ranker_that_can_be_refit(
    refits: Refits, tmp_path: Path
) -> None:
    lake = copy_with_own_rankers(refits.lake, tmp_path / "lake")
    folders = live_pointer(lake.root, SURFACE).folder
    candidate = add_candidate(lake, folders / refits.gated.name)
    for version in (refits.gated, refits.third, refits.last):
        before = read_manifest(folders / version.name)
        spec = before.spec.model_copy(update=other_inputs(before.spec)["position_bias"])
        write_manifest(local_path(folders / version.name), before.model_copy(update={"spec": spec}))
    with pytest.raises(UserError, match="was trained with other position_bias"):
        refit_live_ranker(lake, SURFACE, END)
    lenient = PASSING.model_copy(update={"tolerance": 1e6})
    assert promote_if_better(lake, SURFACE, SPLIT, lenient).promoted
    live = refit_live_ranker(lake, SURFACE, END)
    training = read_manifest(live).training
    assert training and training.refit_of == candidate and training.labels_until == END


@pytest.mark.parametrize("test_day", [THIRD, LAST])
def test_a_decision_does_not_depend_on_offsets_that_learned_later_labels(
    refits: Refits, tmp_path: Path, test_day: date
) -> None:
    """The new ranker was live, refreshed and rolled back; for the last day it is continued."""
    lake = copy_with_own_rankers(refits.lake, tmp_path / "lake")
    pointer = live_pointer(lake.root, SURFACE)
    assert pointer.rollback() == refits.third.name
    candidate = add_candidate(lake, pointer.folder / refits.gated.name)
    days = dict.fromkeys(("test_first", "test_last", "data_until"), test_day)
    split = SPLIT.model_copy(update=days)

    def judge() -> tuple[PromotionDecision, PromotionRecord | None]:
        decision = promote_if_better(lake, SURFACE, split, PromotionConfig())
        return decision, read_promotion_record(lake.root, SURFACE)

    before = judge()
    assert "nothing is better outside noise" in before[0].reasons  # it equals the live one
    pointer.promote(candidate)
    refresh_live_calibration(lake, SURFACE, END)
    pointer.rollback()
    pointer.unblock(candidate)
    assert judge() == before


def test_a_ranker_whose_calibration_has_learned_labels_of_the_test_days_is_not_promoted(
    own_lake: Lake,
) -> None:
    pointer = live_pointer(own_lake.root, SURFACE)
    pointer.path.unlink()
    split = SPLIT.model_copy(update={"calibration": None, "test_first": SECOND})
    decision = promote_if_better(own_lake, SURFACE, split, PromotionConfig())
    assert not decision.promoted and pointer.read() is None
    assert decision.reasons[0].startswith("its calibration has learned labels of the test days")
    assert promote_if_better(own_lake, SURFACE, SPLIT, PromotionConfig()).promoted


def test_a_refit_that_was_rolled_back_is_followed_by_none_until_it_is_unblocked(
    refits: Refits, tmp_path: Path, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The labels that it learned may be wrong, and later refits would learn them, too."""
    lake = copy_with_own_rankers(refits.lake, tmp_path / "lake")
    pointer = live_pointer(lake.root, SURFACE)
    assert pointer.rollback() == refits.third.name
    flags = ["--spec", str(spec_path), "--lake", lake.root, "--surface", SURFACE]
    for until in (NOON, END, END + DAY):
        refit = ["rank", "refit", *flags, "--data-until", format_data_until(until)]
        assert main(refit) == 0
        printed = capsys.readouterr().out
        assert f"not refit, because its refit {refits.last.name} was rolled back" in printed
    assert live_version(lake.root, SURFACE).name == refits.third.name
    assert main(["rank", "rollback", *flags, "--unblock", refits.last.name]) == 0
    assert main(["rank", "refit", *flags, "--data-until", str(LAST)]) == 0
    assert live_version(lake.root, SURFACE).name == refits.last.name


def test_a_blocked_refit_of_another_ranker_stops_no_refit(refits: Refits, tmp_path: Path) -> None:
    """A new ranker was promoted since, whose refit is not blocked."""
    lake = copy_with_own_rankers(refits.lake, tmp_path / "lake")
    pointer = live_pointer(lake.root, SURFACE)
    pointer.rollback()
    assert blocked_refit(lake.root, SURFACE) == refits.last.name
    shutil.copytree(local_path(refits.gated), local_path(pointer.folder / "promoted"))
    pointer.promote("promoted")
    assert blocked_refit(lake.root, SURFACE) is None


def test_the_refit_of_a_version_that_is_rolled_back_meanwhile_is_not_published(
    refits: Refits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = copy_with_own_rankers(refits.lake, tmp_path / "lake")

    def no_training(*_: object) -> None:
        return None

    def export_during_a_rollback(_: Lake, folder: StoragePath, *__: object) -> StoragePath:
        live_pointer(lake.root, SURFACE).rollback()
        refit = folder.parent / "refit"
        shutil.copytree(local_path(folder), local_path(refit))
        return refit

    monkeypatch.setattr("ranking.trainer.refit.continue_ranker", no_training)
    monkeypatch.setattr("ranking.trainer.refit.export_refit", export_during_a_rollback)
    with pytest.raises(TemporaryError, match="was changed by another command"):
        refit_live_ranker(lake, SURFACE, END + DAY)
    assert live_version(lake.root, SURFACE).name == refits.third.name


def test_a_ranker_that_cannot_be_continued_is_named(own_lake: Lake, folder: Path) -> None:
    spec = own_lake.spec.model_copy(update={"request_session_gap": 7})
    with pytest.raises(UserError, match="was trained with spec"):
        refit_live_ranker(Lake(own_lake.root, spec), SURFACE, END)
    for key, changes in other_inputs(own_lake.spec).items():
        other = Lake(own_lake.root, own_lake.spec.model_copy(update=changes))
        assert other.spec.hash == own_lake.spec.hash
        with pytest.raises(UserError, match=f"was trained with other {key}.* than the spec"):
            refit_live_ranker(other, SURFACE, END)
    pointer = live_pointer(own_lake.root, SURFACE)
    shutil.copytree(folder, local_path(pointer.folder / "stateless"))
    gated = pointer.live_folder
    assert gated
    pointer.promote("stateless")
    with pytest.raises(UserError, match="without the state of its training"):
        refit_live_ranker(own_lake, SURFACE, END)
    pointer.promote(gated.name)
    local_path(gated / "training.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="is not the file that was saved"):
        refit_live_ranker(own_lake, SURFACE, END)
    with pytest.raises(UserError, match="no ranker of reels is promoted"):
        refit_live_ranker(own_lake, "reels", END)


def test_days_without_examples_are_skipped_between_others_and_refused_at_the_end(
    own_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples of the last days may still be built; their labels are not skipped for good."""
    for learn in (refit_live_ranker, refresh_live_calibration):
        with pytest.raises(UserError, match="run `gemline features examples` for it"):
            learn(own_lake, SURFACE, END + 10 * DAY)

    def none_of_third(reader: ExampleReader, window: LabelWindow) -> list[date]:
        is_third = window.end == own_lake.spec.day_end(THIRD)
        return [] if is_third else days_with_labels(reader, window)

    monkeypatch.setattr("ranking.trainer.continuation.days_with_labels", none_of_third)
    refit = read_manifest(refit_live_ranker(own_lake, SURFACE, END)).training
    assert refit and refit.labels_until == END and refit.newest_labels["click"] < END


def judged_rows(training: RankerTraining) -> list[object]:
    """From when on labels were judged, and how many, by objective."""
    evaluation = training.evaluation
    assert evaluation and evaluation.segments
    rows = [
        (s.objective, s.rows, s.positives) for s in evaluation.segments if s.segment == ALL_ROWS
    ]
    return [evaluation.labels_from, *rows, *((v.objective, v.outcomes) for v in evaluation.values)]


def test_refits_within_a_day_learn_each_label_once_and_replace_each_other(refits: Refits) -> None:
    """One after midnight leaves a version of the end of the day, to which a rollback returns."""
    lake = copy_with_own_rankers(refits.lake, Path(refits.lake.root).parent / "within")
    pointer = live_pointer(lake.root, SURFACE)
    while pointer.rollback() != refits.gated.name:
        pass
    for version in (refits.third, refits.last):
        pointer.unblock(version.name)
    evening = refit_live_ranker(lake, SURFACE, lake.spec.day_start(THIRD) + 18 * 3600)
    noon = refit_live_ranker(lake, SURFACE, NOON)
    training = read_manifest(noon).training
    assert noon.name.startswith(f"{LAST:%Y%m%d}-1200-") and training
    assert training.labels_until == NOON and training.evaluation
    assert training.evaluation.labels_from == lake.spec.day_end(THIRD)
    assert all(newest < NOON for newest in training.newest_labels.values())
    assert DAY_FILE in read_manifest(noon).file_hashes
    last = read_manifest(refit_live_ranker(lake, SURFACE, END))
    assert DAY_FILE not in last.file_hashes
    assert not evening.is_dir() and not noon.is_dir()
    day_end = read_manifest(pointer.folder / pointer.rollback())
    at_once_last = read_manifest(refits.last).training
    for stepwise, folder in ((last, refits.last), (day_end, refits.third)):
        at_once = read_manifest(folder).training
        assert stepwise.training and at_once
        assert stepwise.training.labels_until == at_once.labels_until
        assert stepwise.training.newest_labels == at_once.newest_labels
    assert last.training and at_once_last
    assert judged_rows(last.training) == judged_rows(at_once_last)
    assert pointer.rollback() == refits.gated.name
