"""GEM that also learns from what earlier teachers predicted of its rows."""

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from etl.errors import UserError
from etl.tables import arrow, model_schemas
from etl.tables.lake import Lake
from tests.conftest import FIRST
from training.config import TrainConfig
from training.data.batch import Batch
from training.distributed.process_group import process_group
from training.model.gem import GemOutput
from training.teacher.predictions import TeacherPredictions
from training.trainer import checkpoint
from training.trainer.resume import TEACHER_TABLE, DayBatches, starting_point
from training.trainer.state import latest_reader
from training.trainer.step import Loss
from training.trainer.trainer import train_days

BEFORE, DAY = FIRST + timedelta(days=1), FIRST + timedelta(days=2)  # the first teacher knows none


def config_of(lake: Lake, **options: object) -> TrainConfig:
    """The configuration of the shared GEM, with some options."""
    manifest = checkpoint.read_manifest(checkpoint.checkpoint_path(lake.root, FIRST), None)
    assert manifest
    return TrainConfig.model_validate(manifest.training.model_dump() | options)


def batches_of_day(lake: Lake, config: TrainConfig) -> DayBatches:
    reader = latest_reader(lake, config)
    manifest, _ = starting_point(lake, reader, (DAY, DAY), config)
    return DayBatches(lake, reader, DAY, manifest)


def predicted_labels(batch: Batch, teacher: TeacherPredictions) -> torch.Tensor:
    """The labels (B, O) that a batch trains on and the teacher predicted."""
    return batch.label_mask & teacher.lookup(batch.impression_ids).mask


def forget_later_days(lake: Lake) -> None:
    for folder in Path(lake.root, "models", "gem").iterdir():
        if folder.name > str(BEFORE):
            shutil.rmtree(folder)


def output_of(logits: torch.Tensor) -> GemOutput:
    nothing = logits[:, :0]
    return GemOutput(logits, nothing, nothing, None, None)


def test_the_gradient_is_towards_the_label_and_the_stored_probability(
    own_gem_lake: Lake,
) -> None:
    """(sigma(z) - y) + w (sigma(z) - sigma(t)), for labels that the teacher predicted."""
    lake, weight = own_gem_lake, 0.7
    forget_later_days(lake)
    with process_group():
        config = config_of(lake, distillation_weight=weight)
        day = batches_of_day(lake, config)
        teacher = day.teacher()
        assert teacher and len(teacher.impression_ids)
        batch = next(day.shard_batches(0))
        unknown = np.array([*["not stored"] * 5, *batch.impression_ids[5:]], object)
        batch = replace(batch, impression_ids=unknown)
        batch = replace(batch, extra_mask=torch.zeros_like(batch.extra_mask))
        loss = replace(
            Loss.from_config(config, day.reader.features, teacher=teacher),
            auxiliary_weights=torch.zeros(0),
        )
    logits = torch.randn(batch.labels.shape, requires_grad=True)
    loss(output_of(logits), batch, 1.0).backward()
    stored = teacher.lookup(batch.impression_ids)
    p, t = torch.sigmoid(logits.detach()), torch.sigmoid(stored.logits)
    expected = batch.label_mask * (p - batch.labels)
    expected += weight * (batch.label_mask & stored.mask) * (p - t)
    torch.testing.assert_close(logits.grad, expected)
    assert predicted_labels(batch, teacher).any(1).sum() == len(batch) - 5


def test_training_reads_a_pinned_version_and_changes_by_its_logits(own_gem_lake: Lake) -> None:
    lake = own_gem_lake
    forget_later_days(lake)
    schema = model_schemas.teacher_predictions(lake.spec)
    trained = []
    config = config_of(lake, distillation_weight=0.5)
    for factor in (1.0, -1.0):
        scale_logits(lake, factor)
        with process_group():
            train_days(lake, (DAY, DAY), config)
        path = checkpoint.checkpoint_path(lake.root, DAY)
        manifest = checkpoint.read_manifest(path, None)
        assert manifest
        assert manifest.table_versions[TEACHER_TABLE] == lake.version(schema.name)
        (file,) = checkpoint.verified_state_dir(path, lake.spec.hash).glob("*.safetensors")
        trained.append(load_file(file)["dense.heads.out_bias"])
        forget_later_days(lake)
    assert not torch.equal(*trained)


def scale_logits(lake: Lake, factor: float) -> None:
    """Multiply all stored logits."""
    schema = model_schemas.teacher_predictions(lake.spec)
    rows = arrow.snapshot(lake, schema).read()
    for name in lake.spec.objectives:
        index = rows.column_names.index(f"logit_{name}")
        values = rows[index].to_numpy() * np.float32(factor)
        field = rows.schema.field(index)
        rows = rows.set_column(index, field, pa.array(values, field.type, from_pandas=True))
    arrow.replace_rows(lake, schema, rows, "true", {})


def test_predictions_of_a_teacher_that_learned_the_day_are_refused(own_gem_lake: Lake) -> None:
    lake = own_gem_lake
    forget_later_days(lake)
    schema = model_schemas.teacher_predictions(lake.spec)
    rows = arrow.snapshot(lake, schema).read()
    index = rows.column_names.index("fm_trained_until")
    leaking = rows.set_column(index, rows.schema.field(index), rows["day"])
    arrow.replace_rows(lake, schema, leaking, "true", {})
    config = config_of(lake, distillation_weight=0.5)
    with process_group(), pytest.raises(UserError, match="whose GEM was trained on their day"):
        train_days(lake, (DAY, DAY), config)


def test_without_predictions_gem_learns_from_labels_alone(
    lake: Lake, own_gem_lake: Lake, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a lake without the table, and with a warning of a day that no teacher predicted."""
    config = config_of(own_gem_lake, distillation_weight=0.5)
    with process_group():
        reader = latest_reader(lake, config)
        manifest, _ = starting_point(lake, reader, (FIRST, FIRST), config)
        assert DayBatches(lake, reader, FIRST, manifest).teacher() is None
        forget_later_days(own_gem_lake)
        where = f"day <= '{DAY}'"
        schema = model_schemas.teacher_predictions(own_gem_lake.spec)
        rows = arrow.snapshot(own_gem_lake, schema).read()
        arrow.replace_rows(own_gem_lake, schema, rows.slice(0, 0), where, {})
        teacher = batches_of_day(own_gem_lake, config).teacher()
    assert isinstance(teacher, TeacherPredictions) and not len(teacher.impression_ids)
    assert "no teacher has predicted its rows" in caplog.text
