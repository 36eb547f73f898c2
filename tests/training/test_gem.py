"""Training as a whole: exact resume after a kill, several processes, knowledge, students."""

import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from etl.errors import UserError
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from gemline import main
from tests.conftest import FIRST, LAST

SECOND = date(2026, 1, 2)
SIZES = ["--scale", "tiny", "--batch-rows", "64", "--checkpoint-every", "5", "--max-length", "32"]


def words(lake: Lake, spec: Path, days: str) -> list[str]:
    return ["--spec", str(spec), "--lake", lake.root, "--days", days]


def train(lake: Lake, spec: Path, days: str, *more: str) -> None:
    assert main(["train", "gem", *words(lake, spec, days), *SIZES, *more]) == 0


@pytest.fixture(scope="module")
def own(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A copy of the tables to train beside."""
    root = tmp_path_factory.mktemp("trained") / "lake"
    shutil.copytree(lake.root, root)
    return Lake(str(root), lake.spec)


def knowledge_of(lake: Lake, spec: Path, day: str) -> dict[str, list[float]]:
    assert main(["knowledge", *words(lake, spec, day)]) == 0
    rows = arrow.snapshot(lake, contracts.knowledge(lake.spec)).read()
    rows = rows.filter(pc.equal(rows["day"], date.fromisoformat(day)))
    return {r["impression_id"]: [r["logit_click"], *r["embedding"]] for r in rows.to_pylist()}


def test_a_killed_training_goes_on_to_the_same_numbers(own: Lake, spec_path: Path) -> None:
    days = f"{FIRST}:{SECOND}"
    train(own, spec_path, days)
    whole = knowledge_of(own, spec_path, "2026-01-03")
    models = Path(own.root, "models")
    shutil.rmtree(models)

    command = [
        sys.executable,
        "-m",
        "gemline",
        "train",
        "gem",
        *words(own, spec_path, days),
        *SIZES,
    ]
    child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    partial = models / "gem" / f"{FIRST}.partial" / "gem.json"
    deadline = time.monotonic() + 120
    while not partial.is_file() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert partial.is_file() and not (models / "gem" / str(SECOND)).exists()

    train(own, spec_path, days)
    assert not partial.exists()
    assert knowledge_of(own, spec_path, "2026-01-03") == whole


def test_two_days_at_once_are_two_days_one_by_one(own: Lake, spec_path: Path) -> None:
    train(own, spec_path, f"{FIRST}:{SECOND}")
    whole = knowledge_of(own, spec_path, "2026-01-03")
    shutil.rmtree(Path(own.root, "models"))
    train(own, spec_path, str(FIRST))
    train(own, spec_path, str(SECOND))
    assert knowledge_of(own, spec_path, "2026-01-03") == whole


def test_a_model_without_history_goes_on_and_scores(own: Lake, spec_path: Path) -> None:
    shutil.rmtree(Path(own.root, "models"), ignore_errors=True)
    train(own, spec_path, str(FIRST), "--max-length", "0")
    train(own, spec_path, str(SECOND), "--max-length", "0")
    assert len(knowledge_of(own, spec_path, "2026-01-03")) > 0
    shutil.rmtree(Path(own.root, "models"))


def test_two_processes_train_and_their_model_is_read_by_one(own: Lake, spec_path: Path) -> None:
    train(own, spec_path, str(FIRST), "--processes", "2")
    assert len(knowledge_of(own, spec_path, str(SECOND))) > 0
    shutil.rmtree(Path(own.root, "models"))


def test_other_sizes_do_not_continue(own: Lake, spec_path: Path, capsys) -> None:
    train(own, spec_path, str(FIRST))
    bigger = ["train", "gem", *words(own, spec_path, str(SECOND)), "--scale", "small"]
    assert main(bigger) == 2
    assert "was trained with scale tiny; max_length 32" in capsys.readouterr().err


def test_the_teacher_of_a_day_has_not_seen_it(own: Lake, spec_path: Path) -> None:
    from ranking.student.teacher import Teacher

    train(own, spec_path, f"{FIRST}:{SECOND}")
    main(["knowledge", *words(own, spec_path, f"{FIRST}:2026-01-03")])
    contract = contracts.knowledge(own.spec)
    rows = arrow.snapshot(own, contract).read()
    assert set(rows["day"].to_pylist()) == {SECOND, date(2026, 1, 3)}
    assert all(r["fm_trained_until"] < r["day"] for r in rows.to_pylist())
    teacher = Teacher(own, [SECOND])
    logits, there = teacher.look_up(
        np.array([*rows["impression_id"].to_pylist()[:3], "none"], object)
    )
    assert not there[-1] and logits[-1].eq(0).all()

    planted = rows.set_column(
        rows.column_names.index("fm_trained_until"), "fm_trained_until", rows["day"]
    )
    where = f"day >= '{FIRST}' AND day <= '{LAST}'"
    arrow.replace(own, contract, planted, where, {})
    with pytest.raises(UserError, match="had been trained on their day"):
        Teacher(own, [SECOND])
    arrow.replace(own, contract, rows, where, {})


def test_what_was_learned_can_be_read_again_after_the_tables_moved_on(
    own: Lake, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = Lake(str(tmp_path / "lake"), own.spec)
    shutil.copytree(own.root, moved.root)
    for contract in (contracts.history(own.spec), contracts.examples(own.spec)):
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
    own: Lake, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = Lake(str(tmp_path / "lake"), own.spec)
    shutil.copytree(own.root, moved.root)
    contract = contracts.history(own.spec)
    arrow.replace(moved, contract, arrow.snapshot(moved, contract).read(), f"day >= '{FIRST}'", {})
    moved.open("history").vacuum(0, dry_run=False, enforce_retention_duration=False)
    asked = ["train", "rebuild", "--spec", str(spec_path), "--lake", moved.root]
    assert main([*asked, "--day", str(SECOND)]) == 2
    assert "of table history has been vacuumed" in capsys.readouterr().err


def test_a_rewritten_history_is_refused(own: Lake, lake: Lake) -> None:
    from training.data.parts import Shuffle
    from training.data.reader import Reader
    from training.data.ripened import Ripened

    contract = contracts.history(own.spec)
    rows = arrow.snapshot(own, contract).read()
    later = rows.set_column(
        rows.column_names.index("first_ts"), "first_ts", pc.add(rows["first_ts"], 7200)
    )
    root = Path(own.root).with_name("rewritten")
    shutil.copytree(own.root, root)
    broken = Lake(str(root), own.spec)
    arrow.replace(broken, contract, later, f"day >= '{FIRST}'", {})
    reader = Reader.newest(broken, "behaviour", 32)
    with pytest.raises(UserError, match="histories were rewritten"):
        list(reader.batches([LAST], Ripened(0, own.spec.day_end(LAST)), 100, Shuffle(None)))
