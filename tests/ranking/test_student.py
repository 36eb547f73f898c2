"""The student: distillation losses, warm start from GEM, scores independent of the batch."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.studies.shuffled_teacher import shuffle_predictions, shuffle_tables
from etl.errors import UserError
from ranking.distillation.gradient_balance import GradientBalancer, HeadGradients
from ranking.distillation.losses import DistillationLoss, distillation_loss
from ranking.distillation.warm_start import copy_gem_modules
from ranking.inputs.arrays import declared_axes, from_named_arrays, named_arrays, pad_last
from ranking.registry.programs import INPUT_AXES, exportable_programs
from ranking.student.config import DistillationConfig, StudentTrainConfig
from ranking.student.model import UserState
from ranking.student.trained import TrainedStudent, new_student
from ranking.trainer.student_trainer import StudentTrainer
from tests.conftest import LAST
from tests.ranking.conftest import SMALL, untrained_student
from tests.ranking.teachers import OBJECTIVES, CertainTeacher, teacher_logits
from training.config import TrainConfig
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.distributed.sharding import local_shards
from training.model.config import SCALES, GemOptions
from training.teacher.embeddings import TeacherEmbeddings
from training.trainer.resume import new_manifest
from training.trainer.state import TrainState, build_train_state
from training.trainer.table_day import start_table_day


@pytest.fixture
def student(reader: ExampleReader) -> TrainedStudent:
    return untrained_student(reader, 0)


def gradients(
    student: TrainedStudent, batch: Batch, config: DistillationConfig
) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    loss = DistillationLoss.from_config(
        config, SMALL.hidden[1], torch.zeros(OBJECTIVES), CertainTeacher()
    )
    student.student.zero_grad()
    loss.backward(
        student.hidden(batch), student.student.head, batch, student.position_effects(batch)
    )
    return {n: p.grad.clone() for n, p in student.student.named_parameters() if p.grad is not None}


def test_the_served_head_learns_nothing_from_the_teacher(
    student: TrainedStudent, batch: Batch
) -> None:
    """ExFM, theorem 3.1: a bias of the teacher must not reach the served head."""
    labels_only = gradients(student, batch, DistillationConfig(kind="none"))
    auxiliary = gradients(student, batch, DistillationConfig(gradient_ratio=2.0))
    plain = gradients(student, batch, DistillationConfig(kind="plain"))
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(auxiliary[name], labels_only[name])
        assert (plain[name] - labels_only[name]).abs().max() > 1e-3
    layer = "candidate_layer.weight"
    assert (auxiliary[layer] - labels_only[layer]).abs().max() > 0


def test_with_gradient_ratio_zero_the_teacher_changes_nothing(
    student: TrainedStudent, batch: Batch
) -> None:
    labels_only = gradients(student, batch, DistillationConfig(kind="none"))
    auxiliary = gradients(student, batch, DistillationConfig(gradient_ratio=0.0))
    for name, gradient in labels_only.items():
        torch.testing.assert_close(auxiliary[name], gradient)


def test_batches_without_a_teacher_do_not_change_the_scale_of_its_gradient(
    student: TrainedStudent, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = CertainTeacher()
    loss = DistillationLoss.from_config(
        DistillationConfig(), SMALL.hidden[1], torch.zeros(OBJECTIVES), teacher
    )

    def learn() -> float:
        hidden, effects = student.hidden(batch), student.position_effects(batch)
        loss.backward(hidden, student.student.head, batch, effects)
        return float(loss.gradient_balancer.scales)

    before = learn()
    known = teacher_logits(torch.zeros(len(batch), OBJECTIVES))
    nothing = replace(known, mask=torch.zeros_like(known.mask))
    monkeypatch.setattr(teacher, "lookup", lambda _: nothing)
    assert before > 0 and [learn() for _ in range(3)] == [before] * 3


def head_gradients(num_heads: int, scale: float = 1.0) -> HeadGradients:
    """Random gradients of some heads; those of the objectives differ by powers of ten."""
    objectives = torch.arange(OBJECTIVES).repeat(num_heads)
    outputs = torch.randn(8, len(objectives)) * scale * 10.0**objectives
    return HeadGradients(outputs, torch.randn(len(objectives), 4), objectives)


def gradient_norm(gradients: HeadGradients, *objectives: int) -> float:
    """The norm of the gradient on the hidden layer of the loss of some objectives."""
    return float(gradients.on_hidden(torch.eye(OBJECTIVES)[list(objectives)].sum(0)).norm())


@given(st.floats(0.1, 10), st.floats(1e-4, 1e4), st.integers(1, 2), st.integers(0, 9))
def test_the_ratio_of_gradients_is_the_configured_one(
    ratio: float, teacher_scale: float, num_heads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    labels, teacher = head_gradients(1), head_gradients(num_heads, teacher_scale)
    added = GradientBalancer(ratio, OBJECTIVES, by_objective=False)(labels, teacher)
    label_norm = gradient_norm(labels, *range(OBJECTIVES))
    assert float(added.norm()) / label_norm == pytest.approx(ratio, rel=1e-3)


@given(st.floats(0.1, 10), st.floats(1e-4, 1e4), st.integers(1, 2), st.integers(0, 9))
def test_the_ratio_of_gradients_holds_for_each_objective(
    ratio: float, teacher_scale: float, num_heads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    labels, teacher = head_gradients(1), head_gradients(num_heads, teacher_scale)
    balancer = GradientBalancer(ratio, OBJECTIVES, by_objective=True)
    added = balancer(labels, teacher)
    torch.testing.assert_close(added, teacher.on_hidden(balancer.scales))
    for objective in range(OBJECTIVES):
        added_norm = gradient_norm(teacher, objective) * float(balancer.scales[objective])
        assert added_norm / gradient_norm(labels, objective) == pytest.approx(ratio, rel=1e-3)


def test_an_objective_without_labels_in_a_batch_keeps_the_scale_of_its_gradient() -> None:
    torch.manual_seed(0)
    balancer = GradientBalancer(1.0, OBJECTIVES, by_objective=True)
    labels, teacher = head_gradients(1), head_gradients(2)
    balancer(labels, teacher)
    before = balancer.scales[0].clone()
    has_labels = labels.objectives > 0
    balancer(replace(labels, outputs=labels.outputs * has_labels), teacher)
    assert balancer.scales[0] == pytest.approx(float(before))


def read_request(request_id: str, reader: ExampleReader) -> Batch:
    """A batch of one request."""
    window = LabelWindow(0, reader.lake.spec.day_end(LAST))
    batches: Iterator[Batch] = reader.batches([LAST], window, 1, Shuffle(None))
    return next(batch for batch in batches if set(batch.request_ids) == {request_id})


def test_a_request_is_scored_the_same_alone_and_in_a_batch(
    student: TrainedStudent, reader: ExampleReader, batch: Batch
) -> None:
    with torch.no_grad():
        together = dict(zip(batch.impression_ids, student.logits(batch), strict=True))
        for index in (0, 3, len(batch.request_ids) - 1):
            alone = read_request(batch.request_ids[index], reader)
            for name, logits in zip(alone.impression_ids, student.logits(alone), strict=True):
                torch.testing.assert_close(logits, together[name], rtol=1e-4, atol=1e-5)


def test_without_history_scores_are_finite(student: TrainedStudent, batch: Batch) -> None:
    history = batch.history
    tensors = {name: x[:0] for name, x in vars(history).items() if isinstance(x, torch.Tensor)}
    empty = replace(
        history,
        **(tensors | {"offsets": torch.zeros_like(history.offsets)}),
        attributes={name: x[:0] for name, x in history.attributes.items()},
        item_categorical={name: x[:0] for name, x in history.item_categorical.items()},
        item_vectors={name: x[:0] for name, x in history.item_vectors.items()},
    )
    with torch.no_grad():
        assert student.logits(replace(batch, history=empty)).isfinite().all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 4))
def test_padding_keeps_the_last_elements_of_each_group_in_order(
    sizes: list[int], max_length: int
) -> None:
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    index = pad_last(offsets, max_length)
    values = np.arange(offsets[-1])
    padded = index(values, -1)
    for group, row in enumerate(padded):
        mask = index.mask[group]
        expected = values[offsets[group] : offsets[group + 1]][-max_length:]
        assert list(row[mask]) == list(expected)
        assert (row[~mask] == -1).all()


def test_program_inputs_are_named_and_ordered_by_their_fields() -> None:
    named = {name: torch.tensor(i) for i, name in enumerate(declared_axes(UserState))}
    assert list(named)[-1] == "teacher_history_mask"
    state: UserState = from_named_arrays(UserState, named)
    assert state.teacher_history and state.teacher_history.mask is named["teacher_history_mask"]
    assert list(named_arrays(state).items()) == list(named.items())
    without = state._replace(teacher_history=None)
    assert from_named_arrays(UserState, named_arrays(without)).teacher_history is None


def test_inputs_have_the_declared_axes_and_names_of_their_own(
    reader: ExampleReader, batch: Batch
) -> None:
    config = SMALL.model_copy(update={"teacher_history_length": 4})
    student = new_student(reader, config, len(reader.items), TeacherEmbeddings.empty())
    student.student.eval()
    sizes: dict[str, int] = {}
    for program in exportable_programs(student, student.input_builder(batch)):
        assert program.inputs and not set(program.inputs) & set(program.outputs)
        for name, tensor in program.inputs.items():
            axes = INPUT_AXES[name]
            assert len(axes) == tensor.ndim, name
            for axis, size in zip(axes, tensor.shape, strict=True):
                assert sizes.setdefault(axis, size) == size, (name, axis)


@settings(max_examples=20)
@given(st.floats(0.02, 0.98), st.floats(0.02, 0.98))
def test_the_distillation_loss_is_least_at_the_teachers_logit(p: float, other: float) -> None:
    logit, other_logit = torch.logit(torch.tensor([[p]])), torch.logit(torch.tensor([[other]]))
    mask = torch.ones(1, 1, dtype=torch.bool)
    least = distillation_loss(logit, logit, mask)
    assert least <= distillation_loss(other_logit, logit, mask) + 1e-6
    assert distillation_loss(logit, logit, ~mask) == 0


def test_the_teachers_heads_are_not_served(student: TrainedStudent) -> None:
    linear = [n for n, m in student.student.named_modules() if isinstance(m, nn.Linear)]
    assert [name for name in linear if "head" in name] == ["head", "value_head.linear"]


@pytest.fixture(scope="module")
def small_gem_config() -> Iterator[TrainConfig]:
    """The configuration of a GEM of the student's sizes."""
    sizes = {"embedding_dim": 4, "event_width": 8}
    tiny = SCALES["tiny"].model_copy(update=sizes)
    with pytest.MonkeyPatch.context() as patch, process_group():
        patch.setitem(SCALES, "tiny", tiny)
        yield TrainConfig(scale="tiny", item_table_rows=512, model=GemOptions(user_hash_buckets=50))


@pytest.fixture(scope="module")
def gem(reader: ExampleReader, small_gem_config: TrainConfig) -> TrainState:
    """A GEM of the student's sizes with random tables."""
    state = build_train_state(new_manifest(reader.lake, reader, (LAST, LAST), small_gem_config))
    start_table_day(state, reader.items, LAST)
    for weight in state.tables.state_dict().values():
        for _, rows in local_shards(weight):
            rows.normal_()
    return state


def item_rows(student: TrainedStudent) -> torch.Tensor:
    weight: torch.Tensor = student.tables.state_dict()["tables.item.weight"]
    return weight.clone()


def test_shared_modules_have_the_weights_of_gem(
    student: TrainedStudent, gem: TrainState, reader: ExampleReader
) -> None:
    copy_gem_modules(student, gem, DistillationConfig())
    items = torch.arange(len(reader.items))
    weight = next(w for key, w in gem.tables.state_dict().items() if ".item." in f".{key}")
    ((_, gem_rows),) = local_shards(weight)
    torch.testing.assert_close(item_rows(student), gem_rows[gem.model.item_rows(items)])
    for target, source in (
        (student.student.event_tokenizer, gem.model.core.history.event_tokenizer),
        (student.student.recency, gem.model.core.history.recency),
    ):
        for copied, original in zip(target.parameters(), source.parameters(), strict=True):
            torch.testing.assert_close(copied, original)


def test_attributes_of_events_in_histories_stay_in_gem(
    student: TrainedStudent, reader: ExampleReader, batch: Batch, small_gem_config: TrainConfig
) -> None:
    """The student starts with GEM's other weights of events, and trains on such histories."""
    columns = {"attr_coupon": 4, "attr_quantity": 256}
    manifest = new_manifest(reader.lake, reader, (LAST, LAST), small_gem_config)
    features = replace(manifest.features, history_attributes=columns)
    state = build_train_state(manifest.model_copy(update={"features": features}))
    source = dict(state.model.core.history.event_tokenizer.named_parameters())
    assert sum(name.startswith("attributes.") for name in source) == len(columns)
    copy_gem_modules(student, state, DistillationConfig())
    copied = dict(student.student.event_tokenizer.named_parameters())
    assert not any(name.startswith("attributes.") for name in copied)
    for name, weight in copied.items():
        torch.testing.assert_close(weight, source[name])
    values = {name: torch.ones_like(batch.history.types) for name in columns}
    of_events = replace(batch, history=replace(batch.history, attributes=values))
    assert gradients(student, of_events, DistillationConfig())[
        "event_tokenizer.action.weight"
    ].any()


def test_a_training_on_labels_only_names_the_gem_whose_modules_it_started_with(
    student: TrainedStudent, gem: TrainState
) -> None:
    config = StudentTrainConfig(model=SMALL, distillation=DistillationConfig(kind="none"))
    trainer = StudentTrainer(student, config, None)
    assert trainer.snapshot(LAST, 0).record.shared_gem is None
    copy_gem_modules(student, gem, config.distillation)
    assert trainer.snapshot(LAST, 0).record.shared_gem == gem.manifest.fm_version


def test_training_stops_when_the_loss_is_not_finite(
    student: TrainedStudent, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variance of the first batch overflows, so that the second has NaN as its loss."""
    extreme = replace(batch, row_numeric=torch.full_like(batch.row_numeric, 1e25))
    monkeypatch.setattr(ExampleReader, "batches", lambda *_: iter([extreme, extreme]))
    config = StudentTrainConfig(model=SMALL, distillation=DistillationConfig(kind="none"))
    trainer = StudentTrainer(student, config, None)
    with pytest.raises(UserError, match=r"of feed is not finite.* candidate_standardizer.variance"):
        trainer.train([LAST], LabelWindow(0, 1))
    assert all(parameter.isfinite().all() for parameter in student.student.parameters())


def test_a_shuffled_table_has_the_same_rows_in_another_order(
    student: TrainedStudent, gem: TrainState
) -> None:
    """The control of the studies, benchmarks/studies/shuffled_teacher.py."""
    copy_gem_modules(student, gem, DistillationConfig())
    original = item_rows(student)
    shuffle_tables(student, seed=0)
    shuffled = item_rows(student)
    assert (shuffled != original).any(1).float().mean() > 0.5
    torch.testing.assert_close(shuffled.sort(0).values, original.sort(0).values)


def test_shuffled_predictions_are_those_of_the_same_version_for_other_impressions() -> None:
    teacher = CertainTeacher()
    teacher.impression_ids = np.arange(200).astype(str)
    teacher.version_index = np.arange(200) % 3
    teacher.logits = np.arange(200, dtype=np.float32)[:, None]
    shuffled = shuffle_predictions(teacher, seed=0)
    assert (shuffled.logits != teacher.logits).mean() > 0.9
    for version in range(3):
        rows = teacher.version_index == version
        assert set(shuffled.logits[rows, 0]) == set(teacher.logits[rows, 0])


def test_frozen_modules_get_no_gradient(
    student: TrainedStudent, gem: TrainState, batch: Batch
) -> None:
    copy_gem_modules(student, gem, DistillationConfig(freeze_shared=True))
    gradients(student, batch, DistillationConfig())
    assert all(p.grad is None for p in student.tables.parameters())
    assert all(p.grad is None for p in student.student.event_tokenizer.parameters())
    assert student.student.head.weight.grad is not None


def test_modules_of_another_size_are_refused_where_they_are_named(
    reader: ExampleReader, gem: TrainState
) -> None:
    wide = SMALL.model_copy(update={"embedding_dim": 8})
    other = new_student(reader, wide, len(reader.items), TeacherEmbeddings.empty())
    before = item_rows(other)
    copy_gem_modules(other, gem, DistillationConfig())
    assert torch.equal(item_rows(other), before)
    with pytest.raises(UserError, match="embedding_dim 8 cannot share modules of a GEM with 4"):
        copy_gem_modules(other, gem, DistillationConfig(shared_modules=("tables",)))


def test_modules_of_a_gem_without_biases_are_not_shared(
    student: TrainedStudent, reader: ExampleReader, small_gem_config: TrainConfig
) -> None:
    """By default the student starts without them; where they are named, that is refused."""
    options = GemOptions(linear_biases=False, user_hash_buckets=50)
    config = small_gem_config.model_copy(update={"model": options})
    gem = build_train_state(new_manifest(reader.lake, reader, (LAST, LAST), config))
    before = item_rows(student)
    copy_gem_modules(student, gem, DistillationConfig())
    assert torch.equal(item_rows(student), before) and student.shared_gem is None
    with pytest.raises(UserError, match="cannot share modules of a GEM without biases"):
        copy_gem_modules(student, gem, DistillationConfig(shared_modules=("events",)))
