"""Values of outcomes: what the head learns, its calibration, and how rankers serve it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import load_spec
from ranking.registry.export import export_ranker
from ranking.registry.ranker import load_ranker
from ranking.scoring.offsets import RankerCalibration
from ranking.scoring.outcome_values import (
    PRIOR_OUTCOMES,
    OutcomeValues,
    concat_values,
    value_factor,
)
from ranking.student.model import Student
from ranking.student.trained import TrainedStudent, new_student
from ranking.student.value import ValueHead
from tests.ranking.conftest import FITTED, SMALL, batch_of
from training.data.batch import Batch
from training.data.reader import ExampleReader
from training.teacher.embeddings import TeacherEmbeddings

HIDDEN = 4
MONEY = st.floats(0.01, 1e4)
OUTCOMES = st.lists(st.tuples(MONEY, MONEY), min_size=1, max_size=30)


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


@given(OUTCOMES, MONEY, st.floats(0.2, 5))
def test_the_factor_makes_predicted_values_add_up(
    outcomes: list[tuple[float, float]], scale: float, previous: float
) -> None:
    """The factor before counts as PRIOR_OUTCOMES outcomes."""
    predicted, actual = np.array(outcomes).T
    values, n = OutcomeValues(predicted, actual), len(outcomes)
    ratio, factor = actual.sum() / predicted.sum(), value_factor(values, previous)
    expected = (n * ratio + PRIOR_OUTCOMES * previous) / (n + PRIOR_OUTCOMES)
    assert factor == pytest.approx(expected)
    in_cents = OutcomeValues(predicted * scale, actual * scale)
    assert value_factor(in_cents, previous) == pytest.approx(factor)


def test_outcomes_of_several_parts_are_put_together() -> None:
    one, two = (OutcomeValues(np.full(n, 1.0), np.full(n, 2.0)) for n in (1, 3))
    found = concat_values([{"conversion": one}, {}, {"conversion": two, "click": one}])
    assert {name: len(values.actual) for name, values in found.items()} == {
        "conversion": 4,
        "click": 1,
    }
    assert value_factor(OutcomeValues(np.zeros(0), np.zeros(0)), 1.3) == 1.3


def test_a_ranker_serves_the_calibrated_values_of_its_student(
    reader: ExampleReader, batch: Batch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    student = new_student(reader, SMALL, len(reader.items), TeacherEmbeddings.empty())
    head = student.student.value_head
    assert head is not None
    torch.nn.init.normal_(head.linear.weight)
    student.student.eval()
    objectives = list(reader.features.objectives)
    calibration = RankerCalibration(
        dict.fromkeys(objectives, FITTED), value_factors={"conversion": 1.7}
    )
    inputs = student.input_builder(batch)
    ranker = load_ranker(export_ranker(tmp_path / "v1", student, calibration, inputs))
    scores = ranker.score(ranker.user_state(inputs.requests), inputs.candidates)
    values = scores.outcome_values[inputs.candidate_index.mask]
    with torch.no_grad():
        expected = 1.7 * head(student.hidden(batch))[:, 0].exp()
    conversion = objectives.index("conversion")
    np.testing.assert_allclose(values[:, conversion], expected, rtol=1e-4)
    assert np.delete(values, conversion, axis=1).max() == 0 and values[:, conversion].std() > 0.1


def test_a_student_returns_the_values_of_outcomes_that_occurred(
    student: TrainedStudent, batch: Batch
) -> None:
    head = student.student.value_head
    assert head is not None
    (column,) = head.objective_index
    with torch.no_grad():
        hidden = student.hidden(batch)
        valued = with_values(batch, hidden, 0)
        valued = replace(valued, labels=valued.labels.roll(column + 1, 1))
        valued = replace(valued, outcome_values=valued.outcome_values.roll(column + 1, 1))
        _, values = student.logits_and_values(valued)
    occurs = valued.labels[:, column] > 0
    assert values.keys() == {"conversion"} and 0 < occurs.sum() < len(batch)
    found, expected = values["conversion"], valued.outcome_values[occurs, column]
    np.testing.assert_array_equal(found.actual, expected.double())
    np.testing.assert_allclose(found.predicted, head(hidden)[occurs, 0].exp().detach(), rtol=1e-6)


def test_a_target_return_needs_a_goal_with_a_value(spec_path: Path, tmp_path: Path) -> None:
    spec = yaml.safe_load(spec_path.read_text())
    spec["objectives"]["conversion"]["value"] = False
    del spec["roi"]
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    with pytest.raises(UserError, match=r"target_roas.*no goal has an objective with a value"):
        load_spec(path)
