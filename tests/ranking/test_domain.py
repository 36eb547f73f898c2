"""A ranker may start from its domain's model, or learn what the model predicted of its examples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from benchmarks.studies.student_trials import link_lake_with_gem
from benchmarks.studies.trials import symlinked_lake
from etl.errors import UserError
from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from ranking.distillation import domain as domains
from ranking.student.config import (
    DistillationConfig,
    DomainTrainConfig,
    StudentConfig,
    StudentTrainConfig,
)
from ranking.student.trained import TrainedStudent, new_student
from ranking.trainer.student_trainer import StudentTrainer
from ranking.trainer.train import (
    load_teacher_predictions,
    train_domain,
    train_on_surfaces,
    training_rows,
)
from tests.conftest import FIRST, LAST
from tests.ranking.conftest import SMALL
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.evaluation.predictions import Predictions
from training.teacher.embeddings import TeacherEmbeddings

DAY = LAST - timedelta(days=1)
SPLIT = DaySplit(
    train_first=FIRST,
    train_last=DAY,
    calibration=None,
    test_first=LAST,
    test_last=LAST,
    data_until=LAST,
)


@pytest.fixture
def table_lake(lake: Lake, tmp_path: Path) -> Lake:
    """The shared tables, without models."""
    return symlinked_lake(lake, tmp_path / "lake")


def surface_reader(lake: Lake, surface: str = "feed") -> ExampleReader:
    return ExampleReader.latest(lake, None, 40, (surface,))


def random_student(lake: Lake, seed: int, config: StudentConfig = SMALL) -> TrainedStudent:
    torch.manual_seed(seed)
    reader = surface_reader(lake)
    return new_student(reader, config, len(reader.items), TeacherEmbeddings.empty())


def weights_of(model: TrainedStudent) -> dict[str, torch.Tensor]:
    state = model.student.state_dict() | model.tables.state_dict()
    return {name: value.clone() for name, value in state.items()}


def test_weights_of_the_same_shape_are_copied_and_no_others(table_lake: Lake) -> None:
    domain = random_student(table_lake, 0, SMALL.model_copy(update={"hidden": (24, 12)}))
    domains.save_domain_model(surface_reader(table_lake), "everywhere", DAY, domain)
    ranker = random_student(table_lake, 1)
    before, domain_weights = weights_of(ranker), weights_of(domain)
    domains.load_domain_weights(ranker, domains.load_domain_model(surface_reader(table_lake), DAY))
    for name, weight in weights_of(ranker).items():
        is_same_shape = weight.shape == domain_weights[name].shape
        torch.testing.assert_close(weight, domain_weights[name] if is_same_shape else before[name])
    table, layer = "tables.item.weight", "candidate_layer.weight"
    assert torch.equal(weights_of(ranker)[table], domain_weights[table])
    assert before[layer].shape != domain_weights[layer].shape


def test_a_domain_model_that_was_trained_on_later_days_is_not_used(table_lake: Lake) -> None:
    domains.save_domain_model(
        surface_reader(table_lake), "everywhere", LAST, random_student(table_lake, 0)
    )
    config = StudentTrainConfig(
        model=SMALL,
        distillation=DistillationConfig(kind="none", shared_modules=(), warm_start_from="domain"),
    )
    with pytest.raises(UserError, match=rf"no model of domain everywhere was trained until {DAY}"):
        train_on_surfaces(table_lake, ("feed",), SPLIT, config)


def test_a_surface_without_a_domain_is_named(table_lake: Lake) -> None:
    spec = table_lake.spec.model_copy(update={"domains": {}})
    with pytest.raises(UserError, match="surface feed is in no domain: add it to one in `domains`"):
        domains.load_domain_model(surface_reader(Lake(table_lake.root, spec)), DAY)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"domains": {"everywhere": ("feed",)}}, "surfaces"),
        ({"similarity_attributes": ("category",)}, "similarity_attributes"),
    ],
)
def test_a_domain_model_that_reads_other_inputs_is_refused(
    table_lake: Lake, changes: dict[str, object], field: str
) -> None:
    domains.save_domain_model(
        surface_reader(table_lake), "everywhere", DAY, random_student(table_lake, 0)
    )
    other = Lake(table_lake.root, table_lake.spec.model_copy(update=changes))
    with pytest.raises(UserError, match=f"was trained with {field} .*, now it is"):
        domains.load_domain_model(surface_reader(other), DAY)


def test_a_domain_model_that_learned_embeddings_of_another_compressor_is_refused(
    table_lake: Lake,
) -> None:
    """Of a model that was saved before its compressor was recorded, it is not known."""
    reader = surface_reader(table_lake)

    def student_with(compressor: str | None) -> TrainedStudent:
        return new_student(reader, SMALL, 10, TeacherEmbeddings.empty(compressor))

    for compressor in ("one", None):
        domains.save_domain_model(reader, "everywhere", DAY, student_with(compressor))
        model = domains.load_domain_model(reader, DAY)
        assert model.compressor_version == compressor
        domains.load_domain_weights(student_with("one"), model)
    domains.save_domain_model(reader, "everywhere", DAY, student_with("one"))
    with pytest.raises(UserError, match="embeddings of compressor one, now they are of two: run"):
        domains.load_domain_weights(student_with("two"), domains.load_domain_model(reader, DAY))


def test_a_damaged_domain_model_is_refused(table_lake: Lake) -> None:
    path = domains.save_domain_model(
        surface_reader(table_lake), "everywhere", DAY, random_student(table_lake, 0)
    )
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="is damaged: run `gemline rank train-domain` again"):
        domains.load_domain_model(surface_reader(table_lake), DAY)


def test_a_domain_model_with_another_embedding_width_is_refused(table_lake: Lake) -> None:
    domains.save_domain_model(
        surface_reader(table_lake), "everywhere", DAY, random_student(table_lake, 0)
    )
    wide = random_student(table_lake, 1, SMALL.model_copy(update={"embedding_dim": 8}))
    with pytest.raises(UserError, match="has another shape in the domain's model: train both"):
        domains.load_domain_weights(
            wide, domains.load_domain_model(surface_reader(table_lake), DAY)
        )


@pytest.mark.parametrize(
    "distillation",
    [
        {"warm_start_from": "domain", "freeze_shared": True},
        {"warm_start_from": "domain", "shared_modules": ["tables"]},
    ],
)
def test_options_of_shared_gem_modules_do_not_apply_to_a_domain(
    distillation: dict[str, object],
) -> None:
    with pytest.raises(ValidationError, match="apply to modules of GEM"):
        DistillationConfig.model_validate(distillation)
    with pytest.raises(ValidationError, match="can neither start nor learn from itself"):
        DomainTrainConfig.model_validate({"distillation": {"warm_start_from": "domain"}})
    with pytest.raises(ValidationError, match="can neither start nor learn from itself"):
        DomainTrainConfig.model_validate({"distillation": {"teacher": "domain"}})


def test_a_domain_learns_from_all_its_surfaces_and_rankers_start_from_it(table_lake: Lake) -> None:
    config = DomainTrainConfig(
        model=SMALL, batch_rows=512, weight_decay=0, distillation=DistillationConfig(kind="none")
    )
    train_domain(table_lake, "everywhere", SPLIT, config.model_copy(update={"epochs": 0}))
    untrained = domains.load_domain_model(surface_reader(table_lake, "messaging"), DAY).weights
    train_domain(table_lake, "everywhere", SPLIT, config)
    learned = domains.load_domain_model(surface_reader(table_lake, "messaging"), DAY).weights
    key = "student.surface_embedding.weight"
    is_changed = (learned[key] != untrained[key]).any(1)
    assert is_changed.tolist() == [False, True, True, True]  # unknown, feed, reels, messaging

    from_domain = DistillationConfig(kind="none", warm_start_from="domain")
    not_trained = StudentTrainConfig(model=SMALL, epochs=0, distillation=from_domain)
    ranker = train_on_surfaces(table_lake, ("messaging",), SPLIT, not_trained).averaged
    for name, weight in weights_of(ranker).items():
        prefix = "tables" if name.startswith("tables.") else "student"
        torch.testing.assert_close(weight, learned[f"{prefix}.{name}"])


def test_a_ranker_that_starts_from_a_domain_names_its_gems(table_lake: Lake) -> None:
    reader = surface_reader(table_lake)
    domain = new_student(reader, SMALL, reader.items.num_seen_by(DAY), TeacherEmbeddings.empty())
    domain.teacher_versions = frozenset({"gem-1", "gem-2"})
    config = StudentTrainConfig(model=SMALL, epochs=0).labels_only()
    trained = StudentTrainer(domain, config, teacher=None).averaged  # what train_domain saves
    domains.save_domain_model(reader, "everywhere", DAY, trained)
    distillation = DistillationConfig(kind="none", warm_start_from="domain")
    config = config.model_copy(update={"distillation": distillation})
    record = train_on_surfaces(table_lake, ("feed",), SPLIT, config).snapshot(FIRST, 0).record
    assert record.teacher_versions == ("gem-1", "gem-2")


class FlippedLabels(StudentTrainer):
    """A trainer that reads one batch of a pass with all its labels flipped."""

    flipped: int | None = None

    def _epoch(self, days: Sequence[date], window: LabelWindow, number: int) -> Iterator[Batch]:
        for position, batch in enumerate(super()._epoch(days, window, number)):
            labels = 1 - batch.labels if position == self.flipped else batch.labels
            yield replace(batch, labels=labels)


def trained_prequentially(lake: Lake, flipped: int | None) -> tuple[TrainedStudent, Predictions]:
    config = StudentTrainConfig(model=SMALL, batch_rows=64).labels_only()
    trainer = FlippedLabels(random_student(lake, 0), config, teacher=None)
    trainer.flipped = flipped
    torch.manual_seed(0)
    predictions = trainer.train_prequentially(*training_rows(trainer.student, SPLIT))
    return trainer.averaged, predictions


def test_a_domain_model_predicts_each_example_before_it_learns_it(table_lake: Lake) -> None:
    """The labels of a batch change predictions of later batches only."""
    _, predictions = trained_prequentially(table_lake, None)
    _, others = trained_prequentially(table_lake, 3)
    changed = (predictions.probabilities != others.probabilities).any(1)
    after = int(changed.argmax())
    assert 3 * 64 < after <= 3 * 64 + 2 * 64 and changed[after:].mean() > 0.9


def test_scores_of_a_domain_do_not_depend_on_the_weights_of_gem(
    gem_lake: Lake, tmp_path: Path
) -> None:
    """GEM has learned the labels of the training days; only its earlier predictions are read."""
    config = DomainTrainConfig(
        model=SMALL, batch_rows=64, distillation=DistillationConfig(kind="auxiliary")
    )
    with_gem = link_lake_with_gem(gem_lake, tmp_path / "with GEM")
    without = link_lake_with_gem(gem_lake, tmp_path / "without")
    Path(without.root, "models", "gem").unlink()
    scores = []
    for lake in (with_gem, without):
        train_domain(lake, "everywhere", SPLIT, config)
        path = domains.domain_predictions_path(lake, "everywhere", DAY)
        scores.append(Predictions.read(path, SPLIT).probabilities)
    np.testing.assert_array_equal(scores[0], scores[1])


@pytest.mark.parametrize("options", [{"shared_modules": ["events"]}, {"freeze_shared": True}])
def test_a_domain_model_that_would_share_modules_of_gem_is_refused(
    options: dict[str, object],
) -> None:
    assert DomainTrainConfig().distillation.shared_modules == ()
    named = DomainTrainConfig.model_validate({"distillation": {"kind": "plain"}})
    assert named.distillation.shared_modules == ()
    with pytest.raises(ValidationError, match="starts with no modules of GEM, which have learned"):
        DomainTrainConfig.model_validate({"distillation": options})


def test_predicting_before_learning_changes_no_weight(table_lake: Lake) -> None:
    model, _ = trained_prequentially(table_lake, None)
    config = StudentTrainConfig(model=SMALL, batch_rows=64).labels_only()
    trainer = StudentTrainer(random_student(table_lake, 0), config, teacher=None)
    torch.manual_seed(0)
    trainer.train(*training_rows(trainer.student, SPLIT))
    for name, weight in weights_of(trainer.averaged).items():
        assert torch.equal(weight, weights_of(model)[name]), name


def test_a_ranker_learns_what_its_domain_predicted(table_lake: Lake) -> None:
    labels = DomainTrainConfig(
        model=SMALL, batch_rows=512, distillation=DistillationConfig(kind="none")
    )
    taught = StudentTrainConfig(
        model=SMALL, distillation=DistillationConfig(teacher="domain", shared_modules=())
    )
    with pytest.raises(UserError, match=rf"no model of domain everywhere was trained until {DAY}"):
        load_teacher_predictions(table_lake, ("feed",), SPLIT, taught)
    train_domain(table_lake, "everywhere", SPLIT, labels)
    teacher = load_teacher_predictions(table_lake, ("feed",), SPLIT, taught)
    assert teacher is not None and teacher.versions == [f"everywhere-{DAY:%Y%m%d}"]
    student = random_student(table_lake, 0)
    days, window = training_rows(student, SPLIT)
    for batch in student.input_builder.reader.batches(days, window, 512, Shuffle(None)):
        assert teacher.lookup(batch.impression_ids).mask.all()
    earlier = SPLIT.model_copy(update={"train_first": FIRST + timedelta(days=1)})
    with pytest.raises(UserError, match="predictions of another split of days"):
        load_teacher_predictions(table_lake, ("feed",), earlier, taught)
    objectives = {"click": table_lake.spec.objectives["click"]}
    spec = table_lake.spec.model_copy(update={"objectives": objectives})
    with pytest.raises(UserError, match="now objectives are click: run `gemline rank train-domain"):
        load_teacher_predictions(Lake(table_lake.root, spec), ("feed",), SPLIT, taught)
