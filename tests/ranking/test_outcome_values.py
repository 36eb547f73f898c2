"""Values of outcomes: what the head learns, its calibration, and how rankers serve it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.units import DAY
from ranking.registry.export import export_ranker
from ranking.registry.ranker import load_ranker
from ranking.scoring.offset_updates import refresh_value_offsets
from ranking.scoring.offsets import (
    INTERCEPT,
    CalibrationOffsets,
    RankerCalibration,
    SegmentOffsets,
)
from ranking.scoring.outcome_values import OutcomeValues, concat_outcomes
from ranking.scoring.predictions import predict_by_segment
from ranking.student.config import StudentTrainConfig
from ranking.student.model import Student
from ranking.student.trained import TrainedStudent
from ranking.student.value import ValueHead
from ranking.trainer.student_trainer import StudentTrainer
from tests.ranking.conftest import FITTED, SMALL, batch_of, untrained_student
from training.data.batch import Batch
from training.data.reader import ExampleReader

HIDDEN = 4


@pytest.fixture(scope="module")
def batch(reader: ExampleReader) -> Batch:
    return batch_of(reader, 400)


def with_values(batch: Batch, hidden: torch.Tensor, seed: int) -> Batch:
    """A batch whose conversions have log-normal values that depend on the hidden layer."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(hidden), generator=generator)
    values = (7 + 0.8 * hidden[:, 0] + 0.5 * noise).exp()
    occurs = torch.rand(len(hidden), generator=generator) < 0.5
    labels, outcome_values = batch.labels.clone(), torch.zeros_like(batch.labels)
    labels[:, -1] = occurs.float()
    outcome_values[:, -1] = values * occurs
    mask = torch.ones_like(batch.label_mask)
    return replace(batch, labels=labels, label_mask=mask, outcome_values=outcome_values)


def trained_head(batch: Batch, column: int) -> ValueHead:
    torch.manual_seed(0)
    head = ValueHead(HIDDEN, [column])
    optimizer = torch.optim.AdamW(head.parameters(), 0.02)
    for step in range(300):
        hidden = torch.randn(len(batch), HIDDEN)
        optimizer.zero_grad()
        head.loss(hidden, with_values(batch, hidden, step)).backward()
        optimizer.step()
    return head.eval()


def test_the_head_learns_expected_values_in_any_currency(batch: Batch) -> None:
    column = batch.labels.shape[1] - 1
    head, hidden = trained_head(batch, column), torch.randn(500, HIDDEN)
    expected = 7 + 0.8 * hidden[:, 0] + 0.5**2 / 2
    torch.testing.assert_close(head(hidden)[:, 0], expected, rtol=0, atol=0.15)
    assert ValueHead(HIDDEN, [column])(hidden).isnan().all()  # no value was learned


def test_values_of_labels_that_are_not_final_are_not_read(batch: Batch) -> None:
    column = batch.labels.shape[1] - 1
    hidden = torch.randn(len(batch), HIDDEN)
    valued = with_values(batch, hidden, 0)
    mask = torch.rand(valued.label_mask.shape) < 0.5
    partly = replace(valued, label_mask=mask)
    changed = replace(partly, outcome_values=torch.where(mask, valued.outcome_values, 1e6))
    heads = [ValueHead(HIDDEN, [column]) for _ in range(2)]
    losses = [h.loss(hidden, b) for h, b in zip(heads, (partly, changed), strict=True)]
    assert torch.equal(*losses)
    assert torch.equal(heads[0].log_values.mean, heads[1].log_values.mean)
    assert not torch.equal(heads[0].loss(hidden, valued), losses[0])


def test_probabilities_do_not_depend_on_the_value_head(reader: ExampleReader, batch: Batch) -> None:
    """Neither initial weights of other layers nor their gradients change by it."""
    features = reader.features
    students = []
    for value_objectives in (features.value_objectives, ()):
        torch.manual_seed(0)
        changed = replace(features, value_objectives=value_objectives)
        students.append(Student(changed, SMALL).state_dict())
    assert all(torch.equal(students[0][name], weight) for name, weight in students[1].items())
    assert set(students[0]) - set(students[1])

    hidden = torch.randn(len(batch), HIDDEN, requires_grad=True)
    head = ValueHead(HIDDEN, [batch.labels.shape[1] - 1])
    head.loss(hidden, with_values(batch, hidden.detach(), 0)).backward()
    assert hidden.grad is None and head.linear.weight.grad is not None


def drawn_outcomes(rng: np.random.Generator, rows: int, spread: float) -> OutcomeValues:
    """Outcomes of eight categories, predicted alike; those of category k are worth exp(k / 8)."""
    category = rng.integers(0, 8, rows)
    noise = rng.lognormal(-(spread**2) / 2, spread, rows)
    return OutcomeValues(
        np.full(rows, 20.0), 20 * np.exp(category / 8) * noise, {"category": category}
    )


OFFSETS = CalibrationOffsets(surface="feed", labels_until=0)
CATEGORIES = {"category": np.arange(8)}


def test_values_are_calibrated_within_segments() -> None:
    outcomes = drawn_outcomes(np.random.default_rng(0), 20_000, 0.7)
    offsets = refresh_value_offsets(OFFSETS, {"conversion": outcomes}, DAY)
    factors = offsets.value_factors(CATEGORIES, ["click", "conversion"])
    assert (factors[:, 0] == 1).all()
    np.testing.assert_allclose(factors[:, 1], np.exp(np.arange(8) / 8), rtol=0.05)
    found = offsets.value_factors(outcomes.segments, ["conversion"])[:, 0] * outcomes.predicted
    assert found.sum() == pytest.approx(outcomes.actual.sum(), rel=0.02)


def test_values_of_few_outcomes_stay_close_to_what_was_known() -> None:
    rng = np.random.default_rng(1)
    known = refresh_value_offsets(OFFSETS, {"conversion": drawn_outcomes(rng, 5000, 0.7)}, DAY)
    before = known.value_factors(CATEGORIES, ["conversion"])[:, 0]
    errors = []
    for seed in range(20):
        few = drawn_outcomes(np.random.default_rng(seed), 5, 0.7)
        learned = refresh_value_offsets(known, {"conversion": few}, DAY // 24)
        errors.append(learned.value_factors(CATEGORIES, ["conversion"])[:, 0] / before - 1)
    assert np.abs(errors).max() < 0.1
    nothing = OutcomeValues(np.zeros(0), np.zeros(0), {"category": np.zeros(0, np.int64)})
    same = refresh_value_offsets(known, {"conversion": nothing}, 0)
    found = same.value_factors(CATEGORIES, ["conversion"])[:, 0]
    np.testing.assert_allclose(found, before, rtol=0.02)


@pytest.mark.parametrize("spread", [0.7, 1.2])
def test_single_outcomes_an_hour_do_not_bias_the_factors(spread: float) -> None:
    """Dispersions that are estimated from few outcomes do: factors of 0.8 and 0.5."""
    rng, offsets, factors = np.random.default_rng(0), OFFSETS, []
    for hour in range(400):
        actual = 20 * rng.lognormal(-(spread**2) / 2, spread, 1)
        outcomes = OutcomeValues(np.full(1, 20.0), actual, {})
        offsets = refresh_value_offsets(offsets, {"conversion": outcomes}, 3600)
        if hour >= 100:
            factors.append(offsets.value_factors({}, ["conversion"])[0])
    assert np.mean(factors) == pytest.approx(1, abs=0.12)


def test_factors_recover_from_a_day_whose_log_has_no_values() -> None:
    rng, none = np.random.default_rng(0), np.zeros(500)
    without = OutcomeValues(np.full(500, 20.0), none, {"category": none.astype(np.int64)})
    offsets = refresh_value_offsets(OFFSETS, {"conversion": without}, DAY)
    assert offsets.value_factors(CATEGORIES, ["conversion"]).min() > 0
    for _ in range(10):
        outcomes = drawn_outcomes(rng, 500, 0.7)
        offsets = refresh_value_offsets(offsets, {"conversion": outcomes}, DAY)
    found = offsets.value_factors(CATEGORIES, ["conversion"])[:, 0]
    assert np.abs(found / np.exp(np.arange(8) / 8) - 1).mean() < 0.15


@given(st.floats(0.01, 100), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_calibrated_values_are_the_same_in_any_currency(scale: float, rows: int) -> None:
    outcomes = drawn_outcomes(np.random.default_rng(rows), rows, 0.7)
    other = OutcomeValues(outcomes.predicted * scale, outcomes.actual * scale, outcomes.segments)
    found, expected = (
        refresh_value_offsets(OFFSETS, {"conversion": o}, DAY).value_factors(
            CATEGORIES, ["conversion"]
        )
        for o in (outcomes, other)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_outcomes_of_several_parts_are_put_together() -> None:
    one, two = (drawn_outcomes(np.random.default_rng(n), n, 0.5) for n in (1, 3))
    found = concat_outcomes([{"conversion": one}, {}, {"conversion": two, "click": one}])
    assert {name: len(values.actual) for name, values in found.items()} == {
        "conversion": 4,
        "click": 1,
    }
    assert found["conversion"].segments["category"].tolist() == [
        *one.segments["category"],
        *two.segments["category"],
    ]


def test_a_ranker_serves_the_calibrated_values_of_its_student(
    reader: ExampleReader, batch: Batch, tmp_path: Path
) -> None:
    student = untrained_student(reader, 0)
    head = student.student.value_head
    assert head is not None
    torch.nn.init.normal_(head.linear.weight)
    head.log_values.count += 1
    objectives = list(reader.features.objectives)
    intercept = SegmentOffsets(values=(0,), offsets=(np.log(1.7),))
    offsets = OFFSETS.model_copy(update={"values": {"conversion": {INTERCEPT: intercept}}})
    calibration = RankerCalibration(dict.fromkeys(objectives, FITTED), offsets)
    inputs = student.input_builder(batch)
    ranker = load_ranker(export_ranker(tmp_path / "v1", student, calibration, inputs))
    scores = ranker.score(ranker.user_state(inputs.requests), inputs.candidates)
    values = scores.outcome_values[inputs.candidate_index.mask]
    with torch.no_grad():
        expected = 1.7 * head(student.hidden(batch))[:, 0].exp()
    conversion = objectives.index("conversion")
    np.testing.assert_allclose(values[:, conversion], expected, rtol=1e-4)
    assert np.isnan(np.delete(values, conversion, axis=1)).all()
    assert values[:, conversion].std() > 0.1


def test_values_that_were_not_learned_are_unknown(
    folder: Path, student: TrainedStudent, batch: Batch
) -> None:
    """By a ranker without training, and by one that was exported before there were values."""
    ranker = load_ranker(folder)

    class WithoutValues:
        """A program of an earlier version."""

        inputs, outputs = ranker.rank_program.inputs, ("logits",)

        def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            """Run without values."""
            return {"logits": ranker.rank_program(arrays)["logits"]}

    inputs = student.input_builder(batch)
    for untrained in (ranker, replace(ranker, rank_program=WithoutValues())):
        scores = untrained.score(untrained.user_state(inputs.requests), inputs.candidates)
        assert np.isnan(scores.outcome_values).all() and np.isfinite(scores.probabilities).all()
    spec = student.input_builder.reader.lake.spec
    with torch.no_grad():
        predictions = predict_by_segment(student.score, [batch], spec, student.num_items)
    assert not len(predictions.outcomes["conversion"].actual)


def test_a_training_from_before_there_were_values_goes_on_with_a_new_head(
    reader: ExampleReader,
) -> None:
    config = StudentTrainConfig(model=SMALL)
    earlier, later = (StudentTrainer(untrained_student(reader, k), config, None) for k in (0, 1))
    state = {k: v for k, v in earlier.state_dict().items() if "value_head." not in k}
    later.load_state_dict(state)
    found = later.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    head = later.student.student.value_head
    assert head is not None and not head.linear.weight.any() and not head.log_values.count.any()
    with pytest.raises(UserError, match="does not fit"):
        later.load_state_dict({k: v for k, v in state.items() if "key_value" not in k})


def test_outcomes_are_those_that_occurred(reader: ExampleReader, batch: Batch) -> None:
    student = untrained_student(reader, 0)
    head, spec = student.student.value_head, student.input_builder.reader.lake.spec
    assert head is not None
    (column,) = head.objective_index
    with torch.no_grad():
        hidden = student.hidden(batch)
        valued = with_values(batch, hidden, 0)
        valued = replace(
            valued,
            labels=valued.labels.roll(column + 1, 1),
            outcome_values=valued.outcome_values.roll(column + 1, 1),
            label_mask=torch.rand(valued.labels.shape) < 0.5,
        )
        head.log_values.count.fill_(1)
        predictions = predict_by_segment(student.score, [valued], spec, student.num_items)
    occurs = (valued.label_mask & (valued.labels > 0))[:, column].numpy()
    assert occurs.sum() < (valued.labels[:, column] > 0).sum()
    assert predictions.outcomes.keys() == {"conversion"} and 0 < occurs.sum() < len(batch)
    found, expected = predictions.outcomes["conversion"], valued.outcome_values[:, column]
    np.testing.assert_array_equal(found.actual, expected.double()[occurs])
    predicted = head(hidden)[:, 0].detach().exp()[occurs]
    np.testing.assert_allclose(found.predicted, predicted, rtol=1e-6)
    for name, values in predictions.segments.items():
        np.testing.assert_array_equal(found.segments[name], values[occurs])


def test_a_target_return_needs_a_goal_with_a_value(spec_path: Path, tmp_path: Path) -> None:
    spec = yaml.safe_load(spec_path.read_text())
    spec["objectives"]["conversion"]["value"] = False
    del spec["roi"]
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    with pytest.raises(UserError, match=r"target_roas.*no goal has an objective with a value"):
        load_spec(path)
