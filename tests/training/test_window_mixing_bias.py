"""Window mixing is not biased: the served head predicts outcomes of the longest window."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from benchmarks.system.warm_start import changed_spec
from ranking.distillation.losses import DistillationLoss
from ranking.student.config import DistillationConfig
from training.data.batch import Batch
from training.data.label_window import LabelWindow
from training.data.labels import Labels, labels_of

DAY = 86400
ROWS, INPUTS, HIDDEN = 10_000, 2, 4
MEAN_DELAY = DAY  # of conversions, exponentially distributed
NOISE = 0.1  # relative; three standard deviations of the mean of a third of the rows


def with_windows(spec: dict[str, Any]) -> None:
    spec["objectives"] = {"conversion": spec["objectives"]["conversion"]}
    spec["objectives"]["conversion"]["extra_windows"] = ["1h", "1d"]
    spec["auxiliary_objectives"] = {}


SPEC = changed_spec(with_windows)
SECONDS = {name: seconds for name, (_, seconds) in SPEC.objective_labels.items()}


@dataclass(frozen=True)
class LabelBatch:
    """The part of a batch that the loss on labels reads."""

    labels: Tensor
    label_mask: Tensor
    extra_labels: Tensor
    extra_mask: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def delayed_conversions(seed: int) -> tuple[Tensor, Labels, float]:
    """Inputs of impressions, their mixed labels, and the true rate of the longest window."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
    probability = 1 / (1 + np.exp(1.5 - inputs @ np.array([1.0, -0.5])))
    delay = rng.exponential(MEAN_DELAY, ROWS)
    delay[rng.random(ROWS) >= probability] = np.inf
    columns: dict[str, Any] = {"surface": np.ones(ROWS, np.int64), "value_conversion": delay * 0}
    for name, seconds in SECONDS.items():
        columns[f"label_{name}"] = (delay <= seconds).astype(np.int64)
        columns[f"label_mature_ts_{name}"] = np.full(ROWS, seconds * 10**6)
    window = LabelWindow(0, 9 * DAY, mixes_windows=True)
    labels = labels_of(SPEC, pa.table(columns), rng.random(ROWS), window, "2026-01-01")
    in_time = 1 - np.exp(-SECONDS["conversion"] / MEAN_DELAY)
    return torch.from_numpy(inputs), labels, float(probability.mean() * in_time)


def in_one_head(labels: Labels) -> Labels:
    """Labels of all windows as if they were those of the longest (naive mixing)."""
    shorter = labels.extra_mask.any(1, keepdims=True)
    values = (labels.extra_labels * labels.extra_mask).sum(1, keepdims=True)
    return Labels(
        np.where(shorter, values, labels.values).astype(np.float32),
        labels.mask | shorter,
        labels.outcome_values,
        labels.extra_labels,
        labels.extra_mask & False,
    )


def served_mean(inputs: Tensor, labels: Labels, steps: int = 60) -> float:
    """The mean prediction of the served head of a small model that has learned the labels."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh()), nn.Linear(HIDDEN, 1)
    config, objectives = DistillationConfig(kind="none"), SPEC.extra_window_objectives
    loss = DistillationLoss.from_config(config, HIDDEN, torch.zeros(1), None, objectives)
    batch = LabelBatch(
        torch.as_tensor(labels.values, dtype=torch.float32),
        torch.from_numpy(labels.mask),
        torch.as_tensor(labels.extra_labels, dtype=torch.float32),
        torch.from_numpy(labels.extra_mask),
    )
    modules = (body, head, *loss.heads.values())
    optimizer = torch.optim.Adam([p for m in modules for p in m.parameters()], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss.backward(body(inputs), head, cast(Batch, batch), torch.zeros(ROWS, 1))
        optimizer.step()
    return float(head(body(inputs)).sigmoid().mean())


def test_the_served_head_predicts_the_rate_of_the_longest_window() -> None:
    """A single head for labels of all windows predicts the mean of their rates, which is lower."""
    inputs, labels, truth = delayed_conversions(seed=0)
    assert served_mean(inputs, labels) == pytest.approx(truth, rel=NOISE)
    in_time = [1 - np.exp(-seconds / MEAN_DELAY) for seconds in SECONDS.values()]
    share = np.mean(in_time) / (1 - np.exp(-SECONDS["conversion"] / MEAN_DELAY))
    assert share < 0.7
    naive = served_mean(inputs, in_one_head(labels))
    assert naive == pytest.approx(share * truth, rel=NOISE)
