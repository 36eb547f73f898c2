"""Training GEM as a whole: exact resume after a kill, several processes, teacher outputs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
import torch.distributed as dist

from etl.errors import UserError
from etl.tables import arrow, model_schemas, schemas
from etl.tables.lake import Lake, arrow_schema
from features.schema import ITEM_TABLE, USER_TABLE
from gemline import main
from tests.conftest import FIRST, GEM_FLAGS, LAST
from training.config import TrainConfig
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.model.embeddings import table_sizes
from training.teacher.predictions import TeacherPredictions
from training.trainer import checkpoint, trainer
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.resume import DayBatches, starting_point
from training.trainer.step import LossCheck
from training.trainer.trainer import load_train_state

SECOND, THIRD = date(2026, 1, 2), date(2026, 1, 3)


def day_flags(lake: Lake, spec: Path, days: str) -> list[str]:
    return ["--spec", str(spec), "--lake", lake.root, "--days", days]


def train(lake: Lake, spec: Path, days: str, *options: str) -> None:
    assert main(["train", "gem", *day_flags(lake, spec, days), *GEM_FLAGS, *options]) == 0


def stored_outputs(lake: Lake, day: date) -> dict[str, list[float]]:
    """Logits of each impression of a day."""
    rows = arrow.snapshot(lake, model_schemas.teacher_predictions(lake.spec)).read(day=day)
    names = [f"logit_{objective}" for objective in lake.spec.objectives]
    return {r["impression_id"]: [r[name] for name in names] for r in rows.to_pylist()}


def teacher_outputs(lake: Lake, spec: Path, day: date) -> dict[str, list[float]]:
    """Score a day, and return the stored rows."""
    assert main(["teacher-predictions", *day_flags(lake, spec, f"{day}")]) == 0
    return stored_outputs(lake, day)


def remove_later_gems(lake: Lake, day: date) -> Path:
    """Remove the GEMs of days after `day`; returns the folder of all GEMs."""
    models = Path(lake.root, "models", "gem")
    for folder in models.iterdir():
        if folder.name > str(day):
            shutil.rmtree(folder)
    return models


def test_a_killed_training_resumes_to_identical_predictions(
    own: Lake, gem_lake: Lake, spec_path: Path
) -> None:
    days = f"{FIRST}:{SECOND}"
    command = [sys.executable, "-m", "gemline", "train", "gem", *day_flags(own, spec_path, days)]
    child = subprocess.Popen(
        [*command, *GEM_FLAGS], start_new_session=True, stderr=subprocess.DEVNULL
    )
    models = Path(own.root, "models")
    partial = models / "gem" / f"{FIRST}.partial" / "gem.json"
    deadline = time.monotonic() + 300
    while not partial.is_file() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert partial.is_file() and not (models / "gem" / str(SECOND)).exists()

    train(own, spec_path, days)
    assert not partial.exists()
    assert teacher_outputs(own, spec_path, THIRD) == stored_outputs(gem_lake, THIRD)


def test_training_two_days_at_once_equals_training_them_one_by_one(
    own: Lake, gem_lake: Lake, spec_path: Path
) -> None:
    train(own, spec_path, str(FIRST))
    train(own, spec_path, str(SECOND))
    assert teacher_outputs(own, spec_path, THIRD) == stored_outputs(gem_lake, THIRD)


def test_only_rows_of_users_who_stayed_away_are_reset(own: Lake, spec_path: Path) -> None:
    """With a time-to-live of one day, rows seen on the first day alone are reset after it."""

    def user_rows(day: date) -> tuple[torch.Tensor, torch.Tensor]:
        """The last access and the embedding of each row of the table of users."""
        state, _ = load_train_state(own, day)
        checkpoint.load_checkpoint(checkpoint.checkpoint_path(own.root, day), state)
        last_days = state.last_access.last_days
        with torch.no_grad():
            rows = state.tables({name: torch.arange(len(d)) for name, d in last_days.items()})
        return last_days[USER_TABLE], rows[USER_TABLE]

    compute = ["--compute.precision", "bf16", "--compute.activation-checkpointing", "blocks"]
    users = ["--model.user-hash-buckets", "4096", "--embedding-ttl-days", "1"]
    train(own, spec_path, f"{FIRST}:2026-01-03", *users, *compute)
    with process_group():
        states = [user_rows(FIRST + timedelta(days=n)) for n in range(3)]
    active = [days == FIRST.toordinal() + n for n, (days, _) in enumerate(states)]
    last_access, embeddings = states[-1]
    away = active[0] & ~active[1] & ~active[2]
    assert away.any() and not embeddings[away].any() and not last_access[away].any()
    returned = active[1] | active[2]
    assert embeddings[returned].any(1).all()


def test_a_model_without_history_resumes_and_scores(own: Lake, spec_path: Path) -> None:
    for day in (FIRST, SECOND):
        train(own, spec_path, str(day), "--max-length", "0", "--batch-rows", "512")
    assert len(teacher_outputs(own, spec_path, THIRD)) > 0


@pytest.mark.proof
def test_one_process_loads_what_two_processes_trained(own: Lake, spec_path: Path) -> None:
    train(own, spec_path, str(FIRST), "--processes", "2")
    assert len(teacher_outputs(own, spec_path, SECOND)) > 0


def test_no_process_waits_in_a_collective_for_trees(
    own: Lake, spec_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process group has closed, and only the first process fits them."""
    fitted = []

    def fit(_lake: Lake, day: date, _config: TrainConfig) -> None:
        assert not dist.is_initialized()
        fitted.append(day)

    monkeypatch.setattr("training.teacher.ensemble.train_days", lambda *_, **__: [])
    monkeypatch.setattr(checkpoint, "has_checkpoint", lambda _, day: day in (FIRST, SECOND))
    monkeypatch.setattr("training.teacher.ensemble.train_trees", fit)
    flags = ["--spec", str(spec_path), "--lake", own.root, "--days", f"{FIRST}:{SECOND}"]
    assert main(["train", "gem", *flags, "--teacher.blend", "lightgbm"]) == 0
    assert fitted == [FIRST, SECOND]


def test_all_objectives_of_the_loss_train_together(own: Lake, spec_path: Path) -> None:
    """ESMM, values, next actions, weights and negative sampling; batches are reproducible."""
    options = [
        *("--model.esmm-parents", "{conversion: click}", "--model.value-loss-weight", "0.1"),
        *("--model.sequence.next-action-weight", "0.1", "--objective-weights", "{click: 2}"),
        *("--negative-sampling-rate", "{click: 0.5, long_view: 0.5}"),
    ]
    train(own, spec_path, f"{FIRST}:{SECOND}", *options)
    day = ["--spec", str(spec_path), "--lake", own.root, "--day", str(SECOND)]
    assert main(["train", "verify-batches", *day]) == 0
    with process_group():
        state, reader = load_train_state(own, SECOND)
        all_manifest = state.manifest.model_copy(update={"training": TrainConfig()})
        everything = list(DayBatches(own, reader, SECOND, all_manifest).shard_batches(0))
        sampled = list(DayBatches(own, reader, SECOND, state.manifest).shard_batches(0))
        assert label_counts(everything, 1) == label_counts(sampled, 1)
        sampled_negatives, negatives = label_counts(sampled, 0), label_counts(everything, 0)
        shares = [x / y for x, y in zip(sampled_negatives, negatives, strict=True)]
        rates = {"click": 0.5, "conversion": 1.0, "long_view": 0.5}
        assert shares == pytest.approx([rates[o] for o in reader.features.objectives], abs=0.1)
        output = state.model(sampled[0])
        assert output.value_distribution is not None
        assert output.value_distribution.expected_value(output.logits).isfinite().all()
        p = torch.sigmoid(output.logits)
        column = reader.features.objectives.index
        assert (p[:, column("conversion")] <= p[:, column("click")]).all()


def label_counts(batches: list[Batch], value: int) -> list[int]:
    """Labels of a value that are trained on, by objective."""
    counts = [(batch.label_mask & (batch.labels == value)).sum(0) for batch in batches]
    return [int(count) for count in torch.stack(counts).sum(0)]


def test_a_new_day_changes_no_rows_that_it_does_not_access(own: Lake, spec_path: Path) -> None:
    def table_rows(day: date) -> dict[str, torch.Tensor]:
        state, _ = load_train_state(own, day)
        config = state.manifest.training
        sizes = table_sizes(
            state.model.core.features, config.item_table_rows, config.gem_config.user_hash_buckets
        )
        with torch.no_grad():
            rows = state.tables({name: torch.arange(size) for name, size in sizes.items()})
        return dict(rows)

    train(own, spec_path, f"{FIRST}:{SECOND}", "--model.user-hash-buckets", "4096")
    with process_group():
        before, after = table_rows(FIRST), table_rows(SECOND)
        state, reader = load_train_state(own, SECOND)
        accessed: dict[str, set[int]] = {name: {0} for name in before}
        for batch in DayBatches(own, reader, SECOND, state.manifest).shard_batches(0):
            items = torch.cat((batch.item_index, batch.history.item_index))
            accessed[ITEM_TABLE] |= set(state.model.item_rows(items).tolist())
            accessed[USER_TABLE] |= set((batch.user_hash % state.model.user_rows).tolist())
            categorical = [
                *batch.row_categorical.items(),
                *batch.user_categorical.items(),
                *batch.history.item_categorical.items(),
            ]
            for name, ids in categorical:
                accessed[name] |= set(ids.tolist())
    for name, vectors in before.items():
        changed = set((vectors != after[name]).any(1).nonzero().flatten().tolist())
        assert changed <= accessed[name], name
        assert changed or name not in {ITEM_TABLE, USER_TABLE}, name


def keep_a_gem_with_nan(lake: Lake) -> Path:
    """Keep only the GEM of the first day, with weights that are not numbers."""
    models = remove_later_gems(lake, FIRST)
    path = models / str(FIRST)
    with process_group():
        state, _ = load_train_state(lake, FIRST)
        checkpoint.load_checkpoint(path, state)
        with torch.no_grad():
            state.model.core.surface.weight[:] = torch.nan
        checkpointer = AsyncCheckpointer()
        checkpointer.save(path, state)
        checkpointer.wait()
    return models


def test_a_loss_that_is_read_at_the_end_of_the_day_is_reported(
    own_gem_lake: Lake,
    spec_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU losses are not read after each step."""
    models = keep_a_gem_with_nan(own_gem_lake)
    monkeypatch.setattr(trainer, "LossCheck", lambda every: LossCheck(every=1_000_000))
    flags = [*day_flags(own_gem_lake, spec_path, str(SECOND)), *GEM_FLAGS]
    capsys.readouterr()
    assert main(["train", "gem", *flags, "--checkpoint-every", "1000000"]) == 2
    assert "is not finite" in capsys.readouterr().err
    assert (models / "non_finite_loss.json").is_file() and not (models / str(SECOND)).exists()


def test_a_loss_that_is_not_finite_is_reported_with_its_batch_and_tensors(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = keep_a_gem_with_nan(own_gem_lake)
    capsys.readouterr()
    command = ["train", "gem", *day_flags(own_gem_lake, spec_path, str(SECOND)), *GEM_FLAGS]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"batch 1 of {SECOND}" in error and "weight surface.weight" in error
    assert f"run again with --days from {SECOND} on, which continues the GEM until {FIRST}" in error
    report = json.loads((models / "non_finite_loss.json").read_text())
    assert report["trained_until"] == str(SECOND) and report["impressions"]
    assert not (models / str(SECOND)).exists() and (models / str(FIRST)).is_dir()
    with process_group():
        state, reader = load_train_state(own_gem_lake, FIRST)
        lower = state.manifest.training.model_copy(update={"dense_lr": 1e-6})
        path = starting_point(own_gem_lake, reader, (SECOND, LAST), lower)[1]
    assert path == models / str(FIRST)


def test_a_loss_that_is_not_finite_on_the_first_day_starts_over(
    own: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*day_flags(own, spec_path, f"{FIRST}:{SECOND}"), *GEM_FLAGS, "--dense-lr", "1e30"]
    assert main(["train", "gem", *flags]) == 2
    error = capsys.readouterr().err
    assert f"of {FIRST}; not finite" in error and "run again, which starts from the" in error


def test_a_day_does_not_continue_a_model_of_other_sizes(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remove_later_gems(own_gem_lake, FIRST)
    flags = day_flags(own_gem_lake, spec_path, str(SECOND))
    assert main(["train", "gem", *flags, "--scale", "small"]) == 2
    error = capsys.readouterr().err
    assert "was trained with scale tiny; max_length 32" in error
    assert "remove models/gem and models/compressor from the lake to start over" in error


def test_the_teacher_of_a_day_was_not_trained_on_it(own_gem_lake: Lake) -> None:
    schema = model_schemas.teacher_predictions(own_gem_lake.spec)
    rows = arrow.snapshot(own_gem_lake, schema).read()
    assert set(rows["day"].to_pylist()) == {SECOND, THIRD, LAST}
    assert all(r["fm_trained_until"] < r["day"] for r in rows.to_pylist())
    teacher = TeacherPredictions.of_gem(own_gem_lake, [SECOND])
    logits = teacher.lookup(np.array([*rows["impression_id"].to_pylist()[:3], "none"], object))
    assert not logits.mask[-1].any() and logits.logits[-1].eq(0).all()

    leaking = rows.set_column(
        rows.column_names.index("fm_trained_until"), "fm_trained_until", rows["day"]
    )
    where = f"day >= '{FIRST}' AND day <= '{LAST}'"
    arrow.replace_rows(own_gem_lake, schema, leaking, where, {})
    with pytest.raises(UserError, match="whose GEM was trained on their day"):
        TeacherPredictions.of_gem(own_gem_lake, [SECOND])


def test_batches_are_verified_after_the_tables_were_rewritten(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = own_gem_lake
    for schema in (schemas.history(lake.spec), schemas.examples(lake.spec)):
        empty = arrow_schema(schema).empty_table()
        arrow.replace_rows(lake, schema, empty, f"day >= '{FIRST}'", {})
    command = ["train", "verify-batches", "--spec", str(spec_path), "--lake", lake.root, "--day"]
    assert main([*command, str(SECOND)]) == 0
    assert int(capsys.readouterr().out.split()[0]) > 5
    file = Path(lake.root, "models", "gem", str(SECOND), "gem.json")
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    assert main([*command, str(SECOND)]) == 2
    error = capsys.readouterr().err
    assert "batch 1 of 2026-01-02 is not the one that was trained on" in error


def test_a_vacuumed_version_is_named(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, schema = own_gem_lake, schemas.history(own_gem_lake.spec)
    rows = arrow.snapshot(lake, schema).read()
    arrow.replace_rows(lake, schema, rows, f"day >= '{FIRST}'", {})
    lake.open("history").vacuum(0, dry_run=False, enforce_retention_duration=False)
    command = ["train", "verify-batches", "--spec", str(spec_path), "--lake", lake.root]
    assert main([*command, "--day", str(SECOND)]) == 2
    assert "of table history has been vacuumed" in capsys.readouterr().err


def test_a_rewritten_history_is_refused(own: Lake) -> None:
    schema = schemas.history(own.spec)
    rows = arrow.snapshot(own, schema).read()
    later = rows.set_column(
        rows.column_names.index("first_ts"), "first_ts", pc.add(rows["first_ts"], 7200)
    )
    arrow.replace_rows(own, schema, later, f"day >= '{FIRST}'", {})
    reader = ExampleReader.latest(own, "behaviour", 32)
    with pytest.raises(UserError, match="histories were rewritten"):
        list(reader.batches([LAST], LabelWindow(0, own.spec.day_end(LAST)), 100, Shuffle(None)))
