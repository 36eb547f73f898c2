"""A checkpoint is tensors and nothing else, each file as it was saved, or it is refused by name."""

import logging
import pickle
import re
from datetime import date
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from etl.signature import PUBLIC, SECRET
from etl.tables.lake import Lake
from gemline import main
from tests.conftest import FIRST, GEM_FLAGS, ROOT
from training.gem import load_trained
from training.loop import checkpoint
from training.loop.checkpoint import DamagedCheckpointError
from training.loop.writer import Writer
from training.parallel.processes import process_group

SECOND, THIRD = date(2026, 1, 2), date(2026, 1, 3)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.file,)


def state_of(lake: Lake, day: date) -> Path:
    """The folder of the tensors of a checkpoint."""
    path = checkpoint.folder(lake.root, day)
    manifest = checkpoint.read_manifest(path, lake.spec.hash)
    assert manifest and isinstance(path, Path)
    return path / manifest.stored


def load(lake: Lake, day: date) -> None:
    """Read it as those do who score with it, and as training does that goes on from it."""
    with process_group():
        trained, _ = load_trained(lake, day)
        checkpoint.load(checkpoint.folder(lake.root, day), trained)


def test_nothing_in_a_checkpoint_is_unpickled(own_gem_lake: Lake, tmp_path: Path) -> None:
    """Whatever file is planted or replaced: none is opened before all are as they were saved."""
    folder, gone_off = state_of(own_gem_lake, FIRST), tmp_path / "gone-off"
    bomb = pickle.dumps(Bomb(gone_off))
    assert [file.suffix for file in folder.iterdir()] == [".safetensors"]
    planted = [folder / ".metadata", folder / "__0_0.distcp", folder / "more.safetensors"]
    for file in (*planted, *folder.iterdir()):
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(bomb)
        with pytest.raises(DamagedCheckpointError, match=f"{re.escape(file.name)} is not a file"):
            load(own_gem_lake, FIRST)
        file.unlink() if before is None else file.write_bytes(before)
    assert not gone_off.exists()
    load(own_gem_lake, FIRST)


def test_no_code_of_ours_unpickles_files() -> None:
    found = [
        str(path.relative_to(ROOT))
        for folder in ("etl", "features", "training", "ranking", "dags")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bpickle\b(?!=False)|torch\.load\(|FileSystemReader", path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("content", ["", "{", '{"spec": 3}'])
def test_a_damaged_manifest_costs_its_own_checkpoint_and_no_other(
    own_gem_lake: Lake, spec_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """A power loss has cut it to nothing, say: the day is trained again from the one before."""
    lake = own_gem_lake
    file = checkpoint.folder(lake.root, THIRD) / checkpoint.MANIFEST
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        left = [found.trained_until for _, found in checkpoint.written(lake.root, lake.spec.hash)]
    assert left == [FIRST, SECOND] and str(file) in caplog.text
    with process_group(), pytest.raises(DamagedCheckpointError, match=f"{file} cannot be read"):
        load_trained(lake, THIRD)
    if not content:
        where = ["--spec", str(spec_path), "--lake", lake.root, "--days", str(THIRD)]
        assert main(["train", "gem", *where, *GEM_FLAGS]) == 0
        load(lake, THIRD)


def test_a_file_that_a_power_loss_has_cut_is_named(own_gem_lake: Lake) -> None:
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


def test_a_checkpoint_is_signed_and_checked_where_keys_say_so(
    own_gem_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, path = own_gem_lake, checkpoint.folder(own_gem_lake.root, FIRST)
    key = Ed25519PrivateKey.generate()
    with process_group():
        trained, _ = load_trained(lake, FIRST)
        checkpoint.load(path, trained)
        monkeypatch.setenv(PUBLIC, key.public_key().public_bytes_raw().hex())
        with pytest.raises(DamagedCheckpointError, match=r"gem.json is not signed"):
            load_trained(lake, FIRST)
        assert checkpoint.written(lake.root, lake.spec.hash) == []
        monkeypatch.setenv(SECRET, key.private_bytes_raw().hex())
        writer = Writer()
        writer.begin(path, trained)
        writer.finish()
        load_trained(lake, FIRST)
        manifest = path / checkpoint.MANIFEST
        manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
        with pytest.raises(DamagedCheckpointError, match="is not what the key of"):
            load_trained(lake, FIRST)
