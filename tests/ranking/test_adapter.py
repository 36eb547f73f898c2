"""The student adapter: corrections of a stale teacher by labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ranking.distillation.losses import DistillationLoss, TeacherAdapter
from ranking.student.config import DistillationConfig
from tests.ranking.conftest import SMALL, untrained_student
from tests.ranking.teachers import OBJECTIVES, CertainTeacher, teacher_logits
from training.data.batch import Batch
from training.data.reader import ExampleReader
from training.teacher.predictions import TeacherLogits


def test_the_adapter_learns_to_correct_the_teacher() -> None:
    torch.manual_seed(0)
    adapter = TeacherAdapter(1, 1)
    for _ in range(600):
        truth = torch.randn(256, 1) - 1
        labels = (torch.rand(256, 1) < torch.sigmoid(truth)).float()
        mask = torch.ones_like(labels)
        adapter.update(teacher_logits(2 * truth + 1), labels, mask, torch.zeros(1))
    truth = torch.linspace(-3, 1, 5)[:, None]
    assert (adapter(teacher_logits(2 * truth + 1)) - truth).abs().max() < 0.25


def adapter_of_calibrated_teacher(
    batch: Batch, rate: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """Intercept and slope, mean of the last steps, with a share of the negatives."""
    torch.manual_seed(0)
    teacher, rows = CertainTeacher(), 1024
    config, log_rate = DistillationConfig(kind="none"), torch.tensor([rate]).log()
    loss = DistillationLoss.from_config(config, 1, log_rate, teacher)
    assert loss.adapter
    head, hidden, effects = nn.Linear(1, 1), torch.zeros(rows, 1), torch.zeros(rows, 1)
    steps = []
    for _ in range(600):
        truth = torch.randn(rows, 1) - 2
        labels = (torch.rand(rows, 1) < torch.sigmoid(truth)).float()
        kept = (labels == 1) | (torch.rand(rows, 1) < rate)
        learned = teacher_logits(truth)
        monkeypatch.setattr(teacher, "lookup", lambda _, learned=learned: learned)
        sampled = replace(
            batch, item_index=torch.zeros(rows), labels=labels, label_mask=kept.float()
        )
        loss.backward(hidden.requires_grad_(), head, sampled, effects)
        steps.append((loss.adapter.intercept.item(), loss.adapter.slope.exp().item()))
    intercept, slope = np.mean(steps[300:], 0)
    return float(intercept), float(slope)


def test_sampled_negatives_do_not_change_what_the_adapter_learns(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a calibrated teacher nothing is to be corrected, whatever share of negatives is kept."""
    of_all_rows = adapter_of_calibrated_teacher(batch, 1.0, monkeypatch)
    of_sampled_rows = adapter_of_calibrated_teacher(batch, 0.1, monkeypatch)
    assert of_all_rows == pytest.approx((0, 1), abs=0.05)
    assert of_sampled_rows == pytest.approx((0, 1), abs=0.1)
    assert of_sampled_rows == pytest.approx(of_all_rows, abs=0.1)


def test_no_example_is_corrected_by_its_own_label(
    reader: ExampleReader, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corrected logits of a step do not depend on the labels of that step."""
    corrected: list[torch.Tensor] = []
    student, forward = untrained_student(reader, 0), TeacherAdapter.forward

    def record(adapter: TeacherAdapter, teacher: TeacherLogits) -> torch.Tensor:
        logits = forward(adapter, teacher)
        corrected.append(logits.detach().clone())
        return logits

    monkeypatch.setattr(TeacherAdapter, "forward", record)
    first_corrections, intercepts = [], []
    for labels in (batch.labels, 1 - batch.labels):
        torch.manual_seed(2)
        loss = DistillationLoss.from_config(
            DistillationConfig(use_adapter=True),
            SMALL.hidden[1],
            torch.zeros(OBJECTIVES),
            CertainTeacher(),
        )
        assert loss.adapter
        student.student.zero_grad()
        corrected.clear()
        flipped = replace(batch, labels=labels)
        effects = student.position_effects(batch)
        loss.backward(student.hidden(batch), student.student.head, flipped, effects)
        first_corrections.append(corrected[0])
        intercepts.append(loss.adapter.intercept.detach().clone())
    torch.testing.assert_close(first_corrections[0], first_corrections[1])
    assert (intercepts[0] - intercepts[1]).abs().max() > 0
