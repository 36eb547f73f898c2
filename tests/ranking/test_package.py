"""A ranker's folder: it scores as the student did, without torch, or says why it does not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from etl.errors import UserError
from etl.signature import PUBLIC, SECRET
from ranking.calibration import Platt
from ranking.package import manifest
from ranking.package.manifest import FILES, digest, read
from ranking.package.ranker import Ranker, load
from ranking.package.versions import current, identified
from ranking.student.trained import TrainedStudent
from tests.ranking.conftest import FITTED, batch_of
from training.data.reader import Reader


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "feed")
    return tmp_path / "feed"


def test_its_name_tells_it_from_every_other(folder: Path, copy: Path) -> None:
    """Copies on other machines are known by it."""
    told = read(folder)
    other = dict.fromkeys(told.calibration, Platt(slope=2.0, intercept=0.0))
    assert digest(folder, told) == digest(copy, read(copy))
    assert digest(folder, told) != digest(folder, told.model_copy(update={"calibration": other}))
    (copy / FILES[0]).write_bytes(b"another")
    assert digest(folder, told) != digest(copy, told)


@pytest.mark.parametrize("rows", [1, 7, 200])
def test_it_scores_as_the_student_did(
    folder: Path, student: TrainedStudent, reader: Reader, rows: int
) -> None:
    ranker, batch = load(folder), batch_of(reader, rows)
    inputs = student.assembly(batch)
    p = ranker.probabilities(ranker.state(inputs.requests), inputs.candidates)[inputs.rows.there]
    with torch.no_grad():
        logits = student.logits(batch).double().numpy()
    np.testing.assert_allclose(p, FITTED(logits), atol=1e-6)


def test_it_loads_without_torch_training_and_pickle(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ranking.package.ranker import load;"
        "unpickled = []; sys.addaudithook(lambda event, _: unpickled.append(event)"
        " if event == 'pickle.find_class' else None);"
        f"load(Path({str(folder)!r}));"
        "print(unpickled + [m for m in ('torch', 'training', 'pyspark') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(copy: Path, name: str) -> None:
    (copy / name).write_bytes((copy / name).read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{name} is not the file that was saved"):
        load(copy)


def test_a_missing_or_tampered_manifest_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no ranker"):
        load(tmp_path)
    told = json.loads((copy / "ranker.json").read_text())
    for broken in (told | {"files": {}}, told | {"surface": 3}):
        (copy / "ranker.json").write_text(json.dumps(broken))
        with pytest.raises(UserError, match="make the ranker again"):
            load(copy)


def test_a_file_that_is_swapped_after_it_was_hashed_is_not_opened(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are hashed are those that are loaded."""
    read_bytes = Path.read_bytes

    def then_swapped(path: Path) -> bytes:
        content = read_bytes(path)
        path.write_bytes(b"swapped")
        return content

    monkeypatch.setattr(Path, "read_bytes", then_swapped)
    assert isinstance(load(copy), Ranker)
    assert all(read_bytes(copy / name) == b"swapped" for name in FILES)


def test_what_onnx_runtime_cannot_load_is_one_sentence(copy: Path) -> None:
    told = read(copy)
    (copy / "user.onnx").write_bytes(b"no program")
    manifest.write(copy, told)
    with pytest.raises(UserError, match=rf"the ranker in {copy} cannot be loaded \(.*\)$"):
        load(copy)


def test_a_ranker_answers_for_its_own_surface_and_not_once_it_was_rolled_back(
    folder: Path, tmp_path: Path
) -> None:
    ranker, root = load(folder), str(tmp_path)
    assert identified(ranker, root, "feed") is ranker
    with pytest.raises(UserError, match="is of surface feed, not of reels: promote one of reels"):
        identified(ranker, root, "reels")
    pointer = current(root, "feed")
    for name in ("older", ranker.manifest.version):
        pointer.swap(name)
    pointer.rollback()
    with pytest.raises(UserError, match="was rolled back and is barred"):
        identified(ranker, root, "feed")


def test_a_program_that_scores_otherwise_is_refused(copy: Path) -> None:
    with np.load(copy / "vectors.npz") as stored:
        vectors = dict(stored)
    np.savez(copy / "vectors.npz", **(vectors | {"logits": vectors["logits"] + 0.01}))
    told = manifest.RankerManifest.model_validate_json((copy / "ranker.json").read_text())
    manifest.write(copy, told)
    with pytest.raises(UserError, match=r"off by 0\.01 on its own test vectors"):
        load(copy)


def test_a_signature_is_asked_for_where_a_key_is_trusted(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = Ed25519PrivateKey.generate()
    monkeypatch.setenv(PUBLIC, private.public_key().public_bytes_raw().hex())
    with pytest.raises(UserError, match="is not signed"):
        load(copy)
    monkeypatch.setenv(SECRET, private.private_bytes_raw().hex())
    told = manifest.RankerManifest.model_validate_json((copy / "ranker.json").read_text())
    manifest.write(copy, told)
    assert isinstance(load(copy), Ranker)
    text = (copy / "ranker.json").read_text()
    (copy / "ranker.json").write_text(text.replace('"v1-', '"v2-'))
    with pytest.raises(UserError, match="is not what the key"):
        load(copy)
    monkeypatch.setenv(PUBLIC, "abc")
    with pytest.raises(UserError, match="64 hex digits"):
        load(copy)
