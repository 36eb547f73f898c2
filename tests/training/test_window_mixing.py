"""Window mixing: each impression teaches one window of each objective, once it has closed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.system.warm_start import changed_spec
from etl.errors import UserError
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from ranking.distillation.losses import DistillationLoss, WindowHeads
from ranking.student.config import DistillationConfig, StudentTrainConfig
from ranking.student.trained import new_student
from ranking.trainer.student_trainer import StudentTrainer, require_extra_windows
from tests.conftest import FIRST, LAST
from tests.ranking.conftest import SMALL
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.labels import Labels, labels_of
from training.data.partition import window_draws
from training.data.reader import ExampleReader
from training.teacher.embeddings import TeacherEmbeddings

HOUR, DAY = 3600, 86400


def with_windows(spec: dict[str, Any]) -> None:
    spec["objectives"]["conversion"]["extra_windows"] = ["1h", "1d"]
    spec["objectives"]["click"]["extra_windows"] = ["5m"]
    spec["auxiliary_objectives"] = {}


SPEC = changed_spec(with_windows)
WINDOWS = {
    "click": ["click", "click_5m"],
    "conversion": ["conversion", "conversion_1h", "conversion_1d"],
    "long_view": ["long_view"],
}
SECONDS = {name: seconds for name, (_, seconds) in SPEC.objective_labels.items()}
PASSES = [LabelWindow(n * DAY, (n + 1) * DAY, mixes_windows=True) for n in range(8)]


Array = np.ndarray[Any, Any]


def random_rows(seed: int, rows: int = 80) -> tuple[pa.Table, Array, Array]:
    """Impressions with labels of all windows, their draws of a window, and their times."""
    rng = np.random.default_rng(seed)
    shown = rng.integers(0, 4 * DAY, rows)
    columns: dict[str, Any] = {"surface": rng.integers(1, 4, rows)}
    for name, seconds in SECONDS.items():
        columns[f"label_mature_ts_{name}"] = (shown + seconds) * 10**6
        columns[f"label_{name}"] = rng.integers(0, 2, rows)
    columns["value_conversion"] = rng.random(rows)
    return pa.table(columns), rng.random(rows), shown


def used(table: pa.Table, draws: Array, window: LabelWindow) -> Labels:
    return labels_of(SPEC, table, draws, window, "2026-01-01:2026-01-06")


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_each_row_learns_one_window_of_each_objective_once(seed: int) -> None:
    table, draws, shown = random_rows(seed)
    passes = [used(table, draws, window) for window in PASSES]
    extra = list(SPEC.extra_window_labels)
    for number, row in enumerate(table.to_pylist()):
        for name, windows in WINDOWS.items():
            i = list(SPEC.objectives).index(name)
            assigned = windows[int(draws[number] * len(windows))]
            final = shown[number] + SECONDS[assigned]
            for window, labels in zip(PASSES, passes, strict=True):
                is_now = window.start <= final < window.end
                learned = {name: bool(labels.mask[number, i])} | {
                    label: bool(labels.extra_mask[number, extra.index(label)])
                    for label in windows[1:]
                }
                assert learned == {label: is_now and label == assigned for label in windows}
            values = passes[0].values[number, i], *passes[0].extra_labels[number]
            stored = (row[f"label_{name}"], *(row[f"label_{label}"] for label in extra))
            assert values == stored


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=30)
def test_unlearned_labels_have_taught_no_window_of_their_objective(seed: int, mix: bool) -> None:
    """Other objectives of the row may have been learned; all labels that fulfil this are there."""
    table, draws, shown = random_rows(seed)
    start, end = 3 * DAY, 5 * DAY
    trained = used(table, draws, LabelWindow(0, start, mixes_windows=mix))
    window = LabelWindow(start, end, only_unlearned=True, mixes_windows=mix)
    unlearned = used(table, draws, window).mask
    extra = list(SPEC.extra_window_labels)
    for i, name in enumerate(SPEC.objectives):
        has_taught = trained.mask[:, i].copy()
        for label in WINDOWS[name][1:] if mix else ():
            has_taught |= trained.extra_mask[:, extra.index(label)]
        final = shown + SECONDS[name]
        is_final = (final >= start) & (final < end)
        assert (unlearned[:, i] == (is_final & ~has_taught)).all(), name
    assert unlearned.any()


def test_an_evaluation_has_the_longest_window_of_every_row() -> None:
    table, draws, _ = random_rows(0)
    labels = used(table, draws, LabelWindow(0, 9 * DAY))
    assert labels.mask.all() and labels.extra_labels.shape == (len(table), 0)


def test_the_assignment_is_uniform_and_does_not_depend_on_the_request(lake: Lake) -> None:
    rows = snapshot(lake, schemas.examples(lake.spec)).read(
        ["user_id", "as_of_ts", "item_index", "request_id"]
    )
    draws = window_draws(rows)
    shares = np.histogram(draws, 3, (0, 1))[0] / len(draws)
    assert np.abs(shares - 1 / 3).max() < 4 * np.sqrt(2 / 9 / len(draws))
    order = np.argsort(rows["request_id"].to_numpy(zero_copy_only=False), kind="stable")
    correlation = np.corrcoef(draws[order][:-1], draws[order][1:])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(len(draws))
    assert len(np.unique(draws)) > 0.99 * len(draws)


def batch_with_windows(lake: Lake, masks: Sequence[bool]) -> Batch:
    """A batch whose extra labels are used or not."""
    reader = ExampleReader.latest(lake, None, SMALL.max_length, ("feed",))
    window = LabelWindow(0, lake.spec.day_end(LAST))
    batch = next(reader.batches([FIRST], window, 64, Shuffle(0)))
    shape = len(batch), len(masks)
    return replace(
        batch,
        extra_labels=torch.ones(shape),
        extra_mask=torch.tensor(masks).expand(shape),
    )


def test_windows_teach_the_layers_below_and_their_own_heads_alone(lake: Lake) -> None:
    """The served head has no gradient from rows that learn another window."""
    reader = ExampleReader.latest(lake, None, SMALL.max_length, ("feed",))
    student = new_student(reader, SMALL, len(reader.items), TeacherEmbeddings.empty())
    batch = batch_with_windows(lake, [True, False])
    batch = replace(batch, label_mask=torch.zeros_like(batch.label_mask))
    config = DistillationConfig(kind="none")
    loss = DistillationLoss.from_config(config, SMALL.hidden[1], torch.zeros(3), None, [1, 1])
    loss.backward(
        student.hidden(batch), student.student.head, batch, student.position_effects(batch)
    )
    heads = loss.window_heads
    assert isinstance(heads, WindowHeads)
    head_gradient, served = heads.linear.weight.grad, student.student.head.weight.grad
    assert head_gradient is not None and served is not None
    assert head_gradient[0].abs().max() > 0 and not head_gradient[1].any()
    assert not served.any()
    below = next(iter(student.tables.parameters())).grad
    assert below is not None and below.abs().sum() > 0


def test_a_label_of_any_window_counts_as_the_newest(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = [name == "conversion_1h" for name in SPEC.extra_window_labels]
    batch = batch_with_windows(lake, learned)
    batch = replace(batch, label_mask=torch.zeros_like(batch.label_mask))
    reader = ExampleReader.latest(lake, None, SMALL.max_length, ("feed",))
    student = new_student(reader, SMALL, len(reader.items), TeacherEmbeddings.empty())
    reader.lake = Lake(lake.root, SPEC)
    config = StudentTrainConfig(
        model=SMALL, distillation=DistillationConfig(kind="none"), mix_windows=True
    )
    trainer = StudentTrainer(student, config, None)
    monkeypatch.setattr(ExampleReader, "batches", lambda *_: iter([batch]))
    trainer.train([FIRST], LabelWindow(0, 1))
    newest = trainer.newest_labels.tolist()
    at = int(batch.as_of.max())
    assert newest == [at if name == "conversion" else 0 for name in SPEC.objectives]


def test_mixing_without_extra_windows_is_refused(lake: Lake) -> None:
    reader = ExampleReader.latest(lake, None, SMALL.max_length, ("feed",))
    student = new_student(reader, SMALL, len(reader.items), TeacherEmbeddings.empty())
    with pytest.raises(UserError, match="--mix-windows needs an objective with extra_windows"):
        StudentTrainer(student, StudentTrainConfig(model=SMALL, mix_windows=True), None)
    assert list(require_extra_windows(SPEC)) == [
        list(SPEC.objectives).index(SPEC.objective_labels[label][0])
        for label in SPEC.extra_window_labels
    ]
