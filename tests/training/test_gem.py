"""Training as a whole: exact resume after a kill, several processes, knowledge, students."""

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

from etl.errors import UserError
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from features.inputs import ITEM, USER
from gemline import main
from tests.conftest import FIRST, GEM_FLAGS, LAST
from training.config import TrainConfig
from training.data.batch import Batch
from training.day import Day
from training.gem import load_trained
from training.loop import checkpoint
from training.loop.writer import Writer
from training.model.lookup import table_rows
from training.parallel.processes import process_group

SECOND, THIRD = date(2026, 1, 2), date(2026, 1, 3)


def words(lake: Lake, spec: Path, days: str) -> list[str]:
    return ["--spec", str(spec), "--lake", lake.root, "--days", days]


def train(lake: Lake, spec: Path, days: str, *more: str) -> None:
    assert main(["train", "gem", *words(lake, spec, days), *GEM_FLAGS, *more]) == 0


def known(lake: Lake, day: date) -> dict[str, list[float]]:
    """What the stored GEM says of each impression of a day."""
    rows = arrow.snapshot(lake, contracts.knowledge(lake.spec)).read(day=day)
    return {r["impression_id"]: [r["logit_click"], *r["embedding"]] for r in rows.to_pylist()}


def knowledge_of(lake: Lake, spec: Path, day: date) -> dict[str, list[float]]:
    assert main(["knowledge", *words(lake, spec, f"{day}")]) == 0
    return known(lake, day)


def without_later_gems(lake: Lake, day: date) -> Path:
    """Remove the GEMs of days after `day`; returns the folder of all GEMs."""
    models = Path(lake.root, "models", "gem")
    for folder in models.iterdir():
        if folder.name > str(day):
            shutil.rmtree(folder)
    return models


def test_a_killed_training_goes_on_to_the_same_numbers(
    own: Lake, gem_lake: Lake, spec_path: Path
) -> None:
    days = f"{FIRST}:{SECOND}"
    command = [sys.executable, "-m", "gemline", "train", "gem", *words(own, spec_path, days)]
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
    assert knowledge_of(own, spec_path, THIRD) == known(gem_lake, THIRD)


def test_two_days_at_once_are_two_days_one_by_one(
    own: Lake, gem_lake: Lake, spec_path: Path
) -> None:
    train(own, spec_path, str(FIRST))
    train(own, spec_path, str(SECOND))
    assert knowledge_of(own, spec_path, THIRD) == known(gem_lake, THIRD)


def test_a_day_forgets_who_did_not_come_since_and_no_one_else(own: Lake, spec_path: Path) -> None:
    """With a day to come back: who came on the first day alone is as new after the third."""

    def told(day: date) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        trained, _ = load_trained(own, day)
        checkpoint.load(checkpoint.folder(own.root, day), trained)
        with torch.no_grad():
            rows = trained.tables({n: torch.arange(len(d)) for n, d in trained.asked.days.items()})
        return trained.asked.days, rows[USER]

    compute = ["--compute.precision", "bf16", "--compute.recompute", "blocks"]
    train(own, spec_path, f"{FIRST}:2026-01-03", "--forget-after-days", "1", *compute)
    with process_group():
        (asked, _), (later, _), (last, vectors) = (
            told(FIRST + timedelta(days=n)) for n in range(3)
        )
    came = [days[USER] == FIRST.toordinal() + n for n, days in enumerate((asked, later, last))]
    lost = came[0] & ~came[1] & ~came[2]
    assert lost.any() and not vectors[lost].any() and not last[USER][lost].any()
    stayed = (came[1] | came[2]).nonzero().flatten()
    assert vectors[stayed].any(1).all()


def test_a_model_without_history_goes_on_and_scores(own: Lake, spec_path: Path) -> None:
    for day in (FIRST, SECOND):
        train(own, spec_path, str(day), "--max-length", "0", "--batch-rows", "512")
    assert len(knowledge_of(own, spec_path, THIRD)) > 0


def test_two_processes_train_and_their_model_is_read_by_one(own: Lake, spec_path: Path) -> None:
    train(own, spec_path, str(FIRST), "--processes", "2")
    assert len(knowledge_of(own, spec_path, SECOND)) > 0


def test_all_that_can_be_learned_at_once_is_learned(own: Lake, spec_path: Path) -> None:
    """Funnel, values, next actions, weights and fewer negatives; and the same batches again."""
    asked = [
        *("--model.after", "{conversion: click}", "--model.value", "0.1"),
        *("--model.sequence.next-action", "0.1", "--weights", "{click: 2}"),
        *("--negatives", "{click: 0.5, long_view: 0.5}"),
    ]
    train(own, spec_path, f"{FIRST}:{SECOND}", *asked)
    before = ["--spec", str(spec_path), "--lake", own.root, "--day", str(SECOND)]
    assert main(["train", "rebuild", *before]) == 0
    with process_group():
        trained, reader = load_trained(own, SECOND)
        everything, fewer = (
            list(Day(own, reader, SECOND, manifest).lane(0))
            for config in (TrainConfig(), trained.manifest.training)
            for manifest in [trained.manifest.model_copy(update={"training": config})]
        )

        def labels(batches: list[Batch], value: int) -> list[int]:
            return sum((b.known & (b.labels == value)).sum(0) for b in batches).tolist()

        assert labels(everything, 1) == labels(fewer, 1)
        share = [x / y for x, y in zip(labels(fewer, 0), labels(everything, 0), strict=True)]
        kept = {"click": 0.5, "conversion": 1.0, "long_view": 0.5}
        assert share == pytest.approx([kept[o] for o in reader.features.objectives], abs=0.1)
        output = trained.model(fewer[0])
        assert output.worth is not None and output.worth.expected(output.logits).isfinite().all()
        p = torch.sigmoid(output.logits)
        columns = reader.features.objectives.index
        assert (p[:, columns("conversion")] <= p[:, columns("click")]).all()


def test_a_new_day_leaves_the_rows_that_it_does_not_meet_as_they_were(
    gem_lake: Lake,
) -> None:
    def rows(day: date) -> dict[str, torch.Tensor]:
        trained, _ = load_trained(gem_lake, day)
        config = trained.manifest.training
        sizes = table_rows(trained.model.core.features, config.item_rows, config.sizes.user_rows)
        with torch.no_grad():
            return trained.tables({name: torch.arange(size) for name, size in sizes.items()})

    with process_group():
        before, after = rows(FIRST), rows(SECOND)
        trained, reader = load_trained(gem_lake, SECOND)
        met: dict[str, set[int]] = {name: {0} for name in before}
        for batch in Day(gem_lake, reader, SECOND, trained.manifest).lane(0):
            own_items = torch.cat((batch.item, batch.history.items))
            met[ITEM] |= set(trained.model.items(own_items).tolist())
            met[USER] |= set((batch.user % trained.model.users).tolist())
            ids = [*batch.row_ids.items(), *batch.user_ids.items(), *batch.history.item_ids.items()]
            for name, found in ids:
                met[name] |= set(found.tolist())
    for name, vectors in before.items():
        changed = set((vectors != after[name]).any(1).nonzero().flatten().tolist())
        assert changed <= met[name], name
        assert changed or name not in (ITEM, USER), name


def test_a_loss_that_is_no_number_names_its_batch_and_what_is_at_fault(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = without_later_gems(own_gem_lake, FIRST)
    path = models / str(FIRST)
    with process_group():
        trained, _ = load_trained(own_gem_lake, FIRST)
        checkpoint.load(path, trained)
        with torch.no_grad():
            trained.model.core.surface.weight[:] = torch.nan
        writer = Writer()
        writer.begin(path, trained)
        writer.finish()
    capsys.readouterr()
    command = ["train", "gem", *words(own_gem_lake, spec_path, str(SECOND)), *GEM_FLAGS]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"batch 1 of {SECOND}" in said and "weight surface.weight" in said
    told = json.loads((models / "non_finite_loss.json").read_text())
    assert told["trained_until"] == str(SECOND) and told["impressions"]
    assert not (models / str(SECOND)).exists() and path.is_dir()


def test_other_sizes_do_not_continue(own_gem_lake: Lake, spec_path: Path, capsys) -> None:
    without_later_gems(own_gem_lake, FIRST)
    bigger = ["train", "gem", *words(own_gem_lake, spec_path, str(SECOND)), "--scale", "small"]
    assert main(bigger) == 2
    assert "was trained with scale tiny; max_length 32" in capsys.readouterr().err


def test_the_teacher_of_a_day_has_not_seen_it(own_gem_lake: Lake) -> None:
    from ranking.student.teacher import Teacher

    contract = contracts.knowledge(own_gem_lake.spec)
    rows = arrow.snapshot(own_gem_lake, contract).read()
    assert set(rows["day"].to_pylist()) == {SECOND, THIRD, LAST}
    assert all(r["fm_trained_until"] < r["day"] for r in rows.to_pylist())
    teacher = Teacher(own_gem_lake, [SECOND])
    said = teacher.look_up(np.array([*rows["impression_id"].to_pylist()[:3], "none"], object))
    assert not said.there[-1].any() and said.logits[-1].eq(0).all()

    planted = rows.set_column(
        rows.column_names.index("fm_trained_until"), "fm_trained_until", rows["day"]
    )
    where = f"day >= '{FIRST}' AND day <= '{LAST}'"
    arrow.replace(own_gem_lake, contract, planted, where, {})
    with pytest.raises(UserError, match="had been trained on their day"):
        Teacher(own_gem_lake, [SECOND])


def test_what_was_learned_can_be_read_again_after_the_tables_moved_on(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = own_gem_lake
    for contract in (contracts.history(moved.spec), contracts.examples(moved.spec)):
        empty = arrow_schema(contract).empty_table()
        arrow.replace(moved, contract, empty, f"day >= '{FIRST}'", {})
    asked = ["train", "rebuild", "--spec", str(spec_path), "--lake", moved.root, "--day"]
    assert main([*asked, str(SECOND)]) == 0
    said = int(capsys.readouterr().out.split()[0])
    assert said > 5
    file = Path(moved.root, "models", "gem", str(SECOND), "gem.json")
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    assert main([*asked, str(SECOND)]) == 2
    assert "batch 1 of 2026-01-02 is not what was learned" in capsys.readouterr().err


def test_a_vacuumed_version_is_named(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = own_gem_lake
    contract = contracts.history(moved.spec)
    arrow.replace(moved, contract, arrow.snapshot(moved, contract).read(), f"day >= '{FIRST}'", {})
    moved.open("history").vacuum(0, dry_run=False, enforce_retention_duration=False)
    asked = ["train", "rebuild", "--spec", str(spec_path), "--lake", moved.root]
    assert main([*asked, "--day", str(SECOND)]) == 2
    assert "of table history has been vacuumed" in capsys.readouterr().err


def test_a_rewritten_history_is_refused(own: Lake) -> None:
    from training.data.parts import Shuffle
    from training.data.reader import Reader
    from training.data.ripened import Ripened

    contract = contracts.history(own.spec)
    rows = arrow.snapshot(own, contract).read()
    later = rows.set_column(
        rows.column_names.index("first_ts"), "first_ts", pc.add(rows["first_ts"], 7200)
    )
    arrow.replace(own, contract, later, f"day >= '{FIRST}'", {})
    reader = Reader.newest(own, "behaviour", 32)
    with pytest.raises(UserError, match="histories were rewritten"):
        list(reader.batches([LAST], Ripened(0, own.spec.day_end(LAST)), 100, Shuffle(None)))
