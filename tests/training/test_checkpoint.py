"""A checkpoint holds tensors only; a changed file is rejected with its name."""

import logging
import pickle
import re
from datetime import date, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.system.warm_start import manifest_of
from dags.pipeline import latest_mature_split
from etl.errors import UserError
from etl.signature import SIGNING_KEY_VARIABLE, TRUSTED_KEY_VARIABLE
from etl.spec import load_spec
from etl.tables import atomic_io
from etl.tables.lake import Lake
from gemline import main
from tests.conftest import FIRST, GEM_FLAGS, LAST, ROOT
from training.config import TrainConfig
from training.distributed.process_group import process_group
from training.trainer import checkpoint
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.checkpoint import DamagedCheckpointError
from training.trainer.resume import starting_point
from training.trainer.state import Manifest, latest_reader
from training.trainer.trainer import load_train_state
from training.trainer.upgrade import upgraded_manifest

SECOND, THIRD = date(2026, 1, 2), date(2026, 1, 3)


class Payload:
    """Code that runs when it is unpickled: it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.file,)


def state_of(lake: Lake, day: date) -> Path:
    """The folder of a checkpoint's tensors."""
    path = checkpoint.checkpoint_path(lake.root, day)
    manifest = checkpoint.read_manifest(path, lake.spec.hash)
    assert manifest and isinstance(path, Path)
    return path / manifest.state_dir


def load(lake: Lake, day: date) -> None:
    """Load a checkpoint to score with it, and to resume training from it."""
    with process_group():
        state, _ = load_train_state(lake, day)
        checkpoint.load_checkpoint(checkpoint.checkpoint_path(lake.root, day), state)


def test_nothing_in_a_checkpoint_is_unpickled(own_gem_lake: Lake, tmp_path: Path) -> None:
    """No file is opened before all are verified, if any file is added or replaced."""
    folder, executed = state_of(own_gem_lake, FIRST), tmp_path / "executed"
    payload = pickle.dumps(Payload(executed))
    assert [file.suffix for file in folder.iterdir()] == [".safetensors"]
    added = [folder / ".metadata", folder / "__0_0.distcp", folder / "more.safetensors"]
    for file in (*added, *folder.iterdir()):
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(payload)
        with pytest.raises(DamagedCheckpointError, match=f"{re.escape(file.name)} is not a file"):
            load(own_gem_lake, FIRST)
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
    assert not executed.exists()
    load(own_gem_lake, FIRST)


def test_no_code_of_the_project_unpickles_files() -> None:
    unpickling = [
        str(path.relative_to(ROOT))
        for folder in ("etl", "features", "training", "ranking", "dags")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bpickle\b(?!=False)|torch\.load\(|FileSystemReader", path.read_text())
    ]
    assert unpickling == []


@pytest.mark.parametrize("content", ["", "{", '{"spec": 3}'])
def test_a_damaged_manifest_makes_only_its_own_checkpoint_unreadable(
    own_gem_lake: Lake, spec_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """For example after a power loss: the day is trained again from the previous one."""
    lake = own_gem_lake
    file = checkpoint.checkpoint_path(lake.root, THIRD) / checkpoint.MANIFEST
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        readable = [
            manifest.trained_until
            for _, manifest in checkpoint.list_checkpoints(lake.root, lake.spec.hash)
        ]
    assert readable == [FIRST, SECOND] and str(file) in caplog.text
    with process_group(), pytest.raises(DamagedCheckpointError, match=f"{file} cannot be read"):
        load_train_state(lake, THIRD)
    if not content:
        where = ["--spec", str(spec_path), "--lake", lake.root, "--days", str(THIRD)]
        assert main(["train", "gem", *where, *GEM_FLAGS]) == 0
        load(lake, THIRD)


def test_a_truncated_file_is_named(own_gem_lake: Lake) -> None:
    (file,) = state_of(own_gem_lake, FIRST).iterdir()
    file.write_bytes(b"")
    with pytest.raises(
        DamagedCheckpointError, match=f"{file} is not a file that was saved: remove"
    ):
        load(own_gem_lake, FIRST)
    load(own_gem_lake, SECOND)
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{file} is not a file that was saved"):
        load(own_gem_lake, FIRST)


def test_checkpoints_are_signed_and_verified_where_keys_are_set(
    own_gem_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, path = own_gem_lake, checkpoint.checkpoint_path(own_gem_lake.root, FIRST)
    key = Ed25519PrivateKey.generate()
    with process_group():
        state, _ = load_train_state(lake, FIRST)
        checkpoint.load_checkpoint(path, state)
        monkeypatch.setenv(TRUSTED_KEY_VARIABLE, key.public_key().public_bytes_raw().hex())
        with pytest.raises(DamagedCheckpointError, match=r"gem.json is not signed"):
            load_train_state(lake, FIRST)
        assert checkpoint.list_checkpoints(lake.root, lake.spec.hash) == []
        monkeypatch.setenv(SIGNING_KEY_VARIABLE, key.private_bytes_raw().hex())
        checkpointer = AsyncCheckpointer()
        checkpointer.save(path, state)
        checkpointer.wait()
        load_train_state(lake, FIRST)
        manifest = path / checkpoint.MANIFEST
        manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
        with pytest.raises(DamagedCheckpointError, match="was not signed by the key"):
            load_train_state(lake, FIRST)


def test_no_new_gem_replaces_one_that_learned_earlier_days(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An upgrade keeps the latest checkpoint alone; training on all days again replaces it."""
    lake = own_gem_lake
    for day in (FIRST, SECOND):
        atomic_io.remove_folder(checkpoint.checkpoint_path(lake.root, day))
    path = checkpoint.checkpoint_path(lake.root, THIRD)
    kept = (path / checkpoint.MANIFEST).read_text()
    command = ["train", "gem", "--spec", str(spec_path), "--lake", lake.root, *GEM_FLAGS]
    for days in (f"{THIRD}", f"{SECOND}:{LAST}"):
        assert main([*command, "--days", days]) == 2
        error = capsys.readouterr().err
        assert f"GEM until {THIRD} has learned the days from {FIRST} on" in error
        assert f"train on days after {THIRD} or on all days from {FIRST} on" in error
    assert (path / checkpoint.MANIFEST).read_text() == kept
    manifest = checkpoint.read_manifest(path, lake.spec.hash)
    assert manifest
    with process_group():
        reader, other = latest_reader(lake, manifest.training), TrainConfig(batch_rows=32)
        assert starting_point(lake, reader, (LAST, LAST), manifest.training)[1] == path
        rebuilt, start = starting_point(lake, reader, (FIRST, LAST), other)
    assert start is None and rebuilt.trained_until == FIRST


def test_no_new_gem_of_days_that_a_later_one_has_learned_is_started(
    own_gem_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where `train clean` has removed the checkpoints of these days, they are not learned alone."""
    lake = own_gem_lake
    for day in (FIRST, SECOND):
        atomic_io.remove_folder(checkpoint.checkpoint_path(lake.root, day))
    command = ["train", "gem", "--spec", str(spec_path), "--lake", lake.root, *GEM_FLAGS]
    for days in (f"{FIRST}", f"{SECOND}", f"{FIRST}:{SECOND}"):
        assert main([*command, "--days", days]) == 2
        error = capsys.readouterr().err
        assert f"GEM until {THIRD} has learned the days from {FIRST} on" in error
        assert f"on all days from {FIRST} on, at least until {THIRD}" in error
    checkpoints = checkpoint.list_checkpoints(lake.root, lake.spec.hash)
    assert [manifest.trained_until for _, manifest in checkpoints] == [THIRD]
    with pytest.raises(UserError, match=f"GEM until {THIRD} has learned it: choose days"):
        checkpoint.require_manifest(lake, SECOND)
    with pytest.raises(UserError, match=f"no GEM was trained until {LAST}; run `gemline train"):
        checkpoint.require_manifest(lake, LAST)


def test_days_after_one_that_was_trained_again_are_trained_again(
    own_gem_lake: Lake, spec_path: Path
) -> None:
    """Their checkpoints have the requested options, but continue the model before."""
    lake = own_gem_lake

    def train(days: str, *options: str) -> Manifest:
        where = ["--spec", str(spec_path), "--lake", lake.root, "--days", days]
        assert main(["train", "gem", *where, *GEM_FLAGS, *options]) == 0
        return checkpoint.require_manifest(lake, THIRD)

    options = ("--dense-lr", "0.0005")
    replaced = train(f"{SECOND}:{THIRD}", *options)
    train(f"{SECOND}")
    trained = train(f"{THIRD}", *options)
    assert trained.state_dir != replaced.state_dir
    assert trained.parent_state_dir == state_of(lake, SECOND).name
    assert train(f"{THIRD}", *options) == trained, "nothing is left to train"


def test_days_before_one_that_has_the_requested_options_are_trained_with_them(
    own_gem_lake: Lake, spec_path: Path
) -> None:
    lake, options = own_gem_lake, ("--dense-lr", "0.0005")
    where = ["--spec", str(spec_path), "--lake", lake.root]
    for days in (f"{THIRD}", f"{SECOND}:{THIRD}"):
        assert main(["train", "gem", *where, "--days", days, *GEM_FLAGS, *options]) == 0
    for day in (SECOND, THIRD):
        assert checkpoint.require_manifest(lake, day).training.dense_lr == 0.0005


@pytest.mark.parametrize(
    ("parents", "linked"),
    [
        ({"a": "", "b": "a", "c": "b", "d": "c"}, "abcd"),
        ({"a": "", "b": "a", "c": "e", "d": "c"}, "ab"),  # b was trained again
        ({"c": "b", "d": "c"}, "cd"),  # a and b were removed
        ({"a": "", "b": "", "c": "", "d": ""}, "abcd"),  # of an earlier version
    ],
)
def test_a_checkpoint_is_linked_unless_the_day_before_was_trained_again(
    parents: dict[str, str], linked: str
) -> None:
    trained = manifest_of(load_spec(SIMULATOR_SPEC), TrainConfig(scale="tiny"))
    checkpoints = []
    for state_dir, parent in parents.items():
        day = FIRST + timedelta(days="abcd".index(state_dir))
        update = {"trained_until": day, "complete": True, "state_dir": state_dir}
        manifest = trained.model_copy(update={**update, "parent_state_dir": parent})
        checkpoints.append((Path(state_dir), manifest))
    found = checkpoint.linked_checkpoints(checkpoints)
    assert "".join(manifest.state_dir for _, manifest in found) == linked


@pytest.mark.parametrize(
    ("window", "keep_days"), [("1h", 7), ("6d", 7), ("30d", 7), ("30d", 30), ("45d", 30)]
)
def test_clean_keeps_the_checkpoint_on_which_rankers_and_evaluations_depend(
    tmp_path: Path, window: str, keep_days: int
) -> None:
    """Right after GEM has learned the latest day, and while it learns the next one."""
    file = tmp_path / "spec.yaml"
    file.write_text(SIMULATOR_SPEC.read_text().replace("window: 3d", f"window: {window}"))
    spec, lake = load_spec(file), str(tmp_path / "lake")
    trained = manifest_of(spec, TrainConfig(scale="tiny"))
    days = [FIRST + timedelta(days=n) for n in range(60)]
    for day in days:
        is_complete = day < days[-1]
        folder = checkpoint.checkpoint_path(lake, day, is_complete)
        manifest = trained.model_copy(update={"trained_until": day, "complete": is_complete})
        folder.mkdir(parents=True)
        (folder / checkpoint.MANIFEST).write_text(manifest.model_dump_json())
    split = latest_mature_split(spec, FIRST, days[-2])
    where = ["--spec", str(file), "--lake", lake, "--keep-days", str(keep_days)]
    assert main(["train", "clean", *where]) == 0
    left = [m.trained_until for _, m in checkpoint.list_checkpoints(lake, spec.hash)]
    assert split.train_last in left
    assert min(left) == min(split.train_last, days[-1] - timedelta(days=keep_days))


def test_no_new_gem_is_started_where_checkpoints_are_not_trusted(
    own_gem_lake: Lake,
    spec_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    monkeypatch.setenv(TRUSTED_KEY_VARIABLE, key.hex())
    flags = ["--spec", str(spec_path), "--lake", own_gem_lake.root, "--days", str(LAST)]
    assert main(["train", "gem", *flags, *GEM_FLAGS]) == 2
    error = capsys.readouterr().err
    assert "can be read or trusted" in error and checkpoint.START_OVER in error
    assert not checkpoint.checkpoint_path(own_gem_lake.root, LAST).exists()


def test_no_day_is_left_without_predictions_where_checkpoints_are_not_trusted(
    own_gem_lake: Lake,
    spec_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Predictions that an earlier, trusted GEM made are not replaced by none."""
    flags = ["--spec", str(spec_path), "--lake", own_gem_lake.root, "--days", str(LAST)]
    before = own_gem_lake.rows_by_day("teacher_predictions")
    assert before
    key = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    monkeypatch.setenv(TRUSTED_KEY_VARIABLE, key.hex())
    assert main(["teacher-predictions", *flags]) == 2
    assert "can be read or trusted" in capsys.readouterr().err
    assert own_gem_lake.rows_by_day("teacher_predictions") == before


def test_a_changed_length_of_histories_applies_from_the_next_day_on(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless an option sets their length, which no later day may change."""
    ((name, sequence),) = lake.spec.sequences.items()
    length = 2 * sequence.max_length
    longer = {name: sequence.model_copy(update={"max_length": length})}
    changed = Lake(lake.root, lake.spec.model_copy(update={"sequences": longer}))
    by_spec, by_option = TrainConfig(), TrainConfig(max_length=8)

    def manifest_of(lake: Lake, day: date, config: TrainConfig) -> Manifest:
        return starting_point(lake, latest_reader(lake, config), (day, day), config)[0]

    def next_length(trained: Manifest, config: TrainConfig) -> int | None:
        found = [(checkpoint.checkpoint_path(lake.root, FIRST), trained)]
        monkeypatch.setattr(checkpoint, "list_checkpoints", lambda *_: found)
        return manifest_of(changed, SECOND, config).training.max_length

    with process_group():
        trained, with_option = (
            manifest_of(lake, FIRST, config).model_copy(update={"complete": True})
            for config in (by_spec, by_option)
        )
        earlier = trained.model_copy(update={"spec_max_length": None})  # of an earlier version
        upgraded = upgraded_manifest(changed, earlier, by_spec.item_table_rows)
        assert next_length(trained, by_spec) == next_length(upgraded, by_spec) == length
        assert next_length(with_option, by_option) == by_option.max_length
        for refused in (earlier, with_option):
            with pytest.raises(UserError, match=f"max_length {refused.training.max_length}"):
                next_length(refused, by_spec)
