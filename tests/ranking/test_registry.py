"""A ranker's folder scores like its student, without torch, or is refused with a named fault."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from etl.errors import UserError
from etl.signature import SIGNING_KEY_VARIABLE, TRUSTED_KEY_VARIABLE
from etl.tables.atomic_io import local_path
from ranking.registry import manifest
from ranking.registry.manifest import (
    REQUIRED_FILES,
    TEST_VECTORS_FILE,
    RankerTraining,
    ranker_hash,
    read_manifest,
    read_package,
)
from ranking.registry.ranker import (
    ExportedRanker,
    live_pointer,
    load_ranker,
    rankers_folder,
    validate_ranker,
    verify_test_vectors,
    version_to_evaluate,
    versions_before,
)
from ranking.scoring.calibration import PlattScaling
from ranking.student.config import StudentTrainConfig
from ranking.student.trained import TrainedStudent
from tests.conftest import FIRST
from tests.ranking.conftest import FITTED, batch_of
from training.data.reader import ExampleReader


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of an exported ranker."""
    shutil.copytree(folder, tmp_path / "feed")
    return tmp_path / "feed"


def test_the_hash_identifies_a_ranker_by_its_content(folder: Path, copy: Path) -> None:
    """Copies on other machines have the same hash."""
    original = read_manifest(folder)
    calibrations = dict.fromkeys(original.calibration, PlattScaling(slope=2.0, intercept=0.0))
    recalibrated = original.model_copy(update={"calibration": calibrations})
    assert ranker_hash(folder, original) == ranker_hash(copy, read_manifest(copy))
    assert ranker_hash(folder, original) != ranker_hash(folder, recalibrated)
    (copy / REQUIRED_FILES[0]).write_bytes(b"another")
    assert ranker_hash(folder, original) != ranker_hash(copy, original)


def sign_again(folder: Path) -> None:
    """Rewrite the manifest with the current hashes of the files."""
    text = (folder / "ranker.json").read_text()
    manifest.write_manifest(folder, manifest.RankerManifest.model_validate_json(text))


def test_a_manifest_is_read_without_the_files_that_loading_verifies(
    folder: Path, tmp_path: Path
) -> None:
    rankers = rankers_folder(str(tmp_path), "feed")
    for name in ("older", "damaged"):
        shutil.copytree(folder, local_path(rankers / name))
        live_pointer(str(tmp_path), "feed").promote(name)
    (local_path(rankers / "damaged") / REQUIRED_FILES[0]).write_bytes(b"another")
    assert read_manifest(rankers / "damaged") == read_manifest(folder)
    with pytest.raises(UserError, match="is not the file that was saved"):
        load_ranker(rankers / "damaged")
    spec = read_manifest(folder).spec
    assert list(versions_before(str(tmp_path), "feed", 0, spec)) == [rankers / "older"]


def test_versions_of_another_spec_are_not_evaluated(folder: Path, tmp_path: Path) -> None:
    """The live one has learned labels of the days, one of the spec before has not."""
    manifest_of = read_manifest(folder)
    spec = manifest_of.spec
    before = spec.model_copy(update={"request_session_gap": 7})
    training = RankerTraining(
        config=StudentTrainConfig(), first_day=FIRST, labels_until=10, newest_labels={}
    )
    root = str(tmp_path)
    changes: dict[str, dict[str, object]] = {
        "older": {"spec": before},
        "live": {"training": training},
    }
    for name, update in changes.items():
        version = local_path(rankers_folder(root, "feed") / name)
        shutil.copytree(folder, version)
        manifest.write_manifest(version, manifest_of.model_copy(update=update))
        live_pointer(root, "feed").promote(name)
    assert list(versions_before(root, "feed", 9, spec)) == []
    assert version_to_evaluate(root, "feed", 9, spec).name == "live"
    assert version_to_evaluate(root, "feed", 10, spec).name == "live"
    assert version_to_evaluate(root, "feed", 9, before).name == "older"


@pytest.mark.parametrize("rows", [1, 7, 200])
def test_a_ranker_scores_as_its_student_does(
    folder: Path, student: TrainedStudent, reader: ExampleReader, rows: int
) -> None:
    ranker, batch = load_ranker(folder), batch_of(reader, rows)
    inputs = student.input_builder(batch)
    user_state = ranker.user_state(inputs.requests)
    p = ranker.score(user_state, inputs.candidates).probabilities[inputs.candidate_index.mask]
    with torch.no_grad():
        logits = student.logits(batch).double().numpy()
    np.testing.assert_allclose(p, FITTED(logits), atol=1e-6)


def test_a_ranker_loads_without_torch_training_and_pickle(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ranking.registry.ranker import load_ranker;"
        "unpickled = []; sys.addaudithook(lambda event, _: unpickled.append(event)"
        " if event == 'pickle.find_class' else None);"
        f"load_ranker(Path({str(folder)!r}));"
        "print(unpickled + [m for m in ('torch', 'training', 'pyspark') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_truncated_file_is_named(copy: Path, name: str) -> None:
    (copy / name).write_bytes((copy / name).read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{name} is not the file that was saved"):
        load_ranker(copy)


def test_a_missing_or_tampered_manifest_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no ranker"):
        load_ranker(tmp_path)
    original = json.loads((copy / "ranker.json").read_text())
    changes: list[dict[str, object]] = [{"file_hashes": {}}, {"surface": 3}]
    for change in changes:
        (copy / "ranker.json").write_text(json.dumps(original | change))
        with pytest.raises(UserError, match="run `gemline rank train` again"):
            load_ranker(copy)


def test_a_file_that_is_swapped_after_it_was_hashed_is_not_read_again(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are hashed are those that are loaded."""
    read_bytes = Path.read_bytes

    def read_then_swap(path: Path) -> bytes:
        content = read_bytes(path)
        path.write_bytes(b"swapped")
        return content

    monkeypatch.setattr(Path, "read_bytes", read_then_swap)
    assert isinstance(load_ranker(copy), ExportedRanker)
    assert all(read_bytes(copy / name) == b"swapped" for name in REQUIRED_FILES)


def test_a_program_that_onnx_runtime_cannot_load_is_reported_in_one_line(copy: Path) -> None:
    original = read_manifest(copy)
    (copy / "user.onnx").write_bytes(b"no program")
    manifest.write_manifest(copy, original)
    with pytest.raises(UserError, match=rf"the ranker in {copy} cannot be loaded \(.*\)$"):
        load_ranker(copy)


def test_a_ranker_is_valid_for_its_own_surface_unless_it_was_rolled_back(
    folder: Path, tmp_path: Path
) -> None:
    ranker, root = load_ranker(folder), str(tmp_path)
    assert validate_ranker(ranker, root, "feed") is ranker
    with pytest.raises(UserError, match="is of surface feed, not of reels: promote one of reels"):
        validate_ranker(ranker, root, "reels")
    pointer = live_pointer(root, "feed")
    for name in ("older", ranker.manifest.version):
        pointer.promote(name)
    pointer.rollback()
    with pytest.raises(UserError, match="was rolled back and is blocked"):
        validate_ranker(ranker, root, "feed")


def test_a_program_whose_scores_are_not_those_of_the_test_vectors_is_refused(copy: Path) -> None:
    with np.load(copy / "vectors.npz") as stored:
        vectors = dict(stored)
    np.savez(copy / "vectors.npz", **(vectors | {"logits": vectors["logits"] + 0.01}))
    sign_again(copy)
    with pytest.raises(UserError, match=r"off by 0\.01 on its own test vectors"):
        load_ranker(copy)


def test_only_log_values_may_be_unknown_in_test_vectors(folder: Path) -> None:
    """Logits of NaN are refused although the test vectors have them too: a training diverged."""
    ranker, package = load_ranker(folder), read_package(folder)

    def verify(**outputs: np.ndarray) -> None:
        with np.load(io.BytesIO(package.file_contents[TEST_VECTORS_FILE])) as stored:
            vectors = dict(stored) | outputs
        content = io.BytesIO()
        np.savez(content, **vectors)
        contents = {**package.file_contents, TEST_VECTORS_FILE: content.getvalue()}
        expected = package._replace(file_contents=contents)
        verify_test_vectors(replace(ranker, rank_program=FixedProgram(outputs)), expected, folder)

    unknown, known = np.full((1, 2, 3), np.nan, np.float32), np.zeros((1, 2, 3), np.float32)
    verify(logits=known, log_values=unknown)
    for value in (np.nan, np.inf):
        with pytest.raises(UserError, match="with logits that are not finite"):
            verify(logits=np.full_like(known, value), log_values=unknown)


@dataclass(frozen=True)
class FixedProgram:
    """A program with the same outputs for all inputs."""

    values: dict[str, np.ndarray]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.values


def test_a_signature_is_required_where_a_key_is_trusted(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = Ed25519PrivateKey.generate()
    monkeypatch.setenv(TRUSTED_KEY_VARIABLE, private.public_key().public_bytes_raw().hex())
    with pytest.raises(UserError, match="is not signed"):
        load_ranker(copy)
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, private.private_bytes_raw().hex())
    sign_again(copy)
    assert isinstance(load_ranker(copy), ExportedRanker)
    text = (copy / "ranker.json").read_text()
    (copy / "ranker.json").write_text(text.replace('"v1-', '"v2-'))
    with pytest.raises(UserError, match="was not signed by the key"):
        load_ranker(copy)
    monkeypatch.setenv(TRUSTED_KEY_VARIABLE, "abc")
    with pytest.raises(UserError, match="64 hex digits"):
        load_ranker(copy)
