"""Compiled programs score like those of ONNX, and run only where a key is trusted."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from etl.errors import UserError
from etl.signature import SIGNING_KEY_VARIABLE, TRUSTED_KEY_VARIABLE
from gemline import main
from ranking.registry.aot import CompiledProgram, load_compiled
from ranking.registry.export import export_ranker
from ranking.registry.manifest import COMPILED_FILES, RankerManifest, write_manifest
from ranking.registry.onnx_programs import Program
from ranking.registry.programs import require_compiler
from ranking.registry.ranker import load_ranker
from ranking.scoring.offsets import RankerCalibration
from ranking.student.trained import TrainedStudent, new_student
from tests.ranking.conftest import FITTED, SMALL, batch_of
from training.data.reader import ExampleReader
from training.teacher.embeddings import TeacherEmbeddings

KEY = Ed25519PrivateKey.generate()


@pytest.fixture(autouse=True)
def trusted_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rankers are signed, and the key is trusted."""
    monkeypatch.setenv(TRUSTED_KEY_VARIABLE, KEY.public_key().public_bytes_raw().hex())
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, KEY.private_bytes_raw().hex())


def signed_copy(folder: Path, target: Path, **changes: object) -> Path:
    """A copy of a ranker with changes of its manifest, signed."""
    shutil.copytree(folder, target)
    manifest = RankerManifest.model_validate_json((target / "ranker.json").read_text())
    write_manifest(target, manifest.model_copy(update=changes))
    return target


@pytest.fixture(scope="module", params=[0, 4], ids=["without teacher", "with teacher history"])
def compiled(
    request: pytest.FixtureRequest, reader: ExampleReader, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainedStudent]:
    """A ranker with compiled programs, and its student."""
    require_compiler()
    config = SMALL.model_copy(update={"teacher_history_length": request.param})
    student = new_student(reader, config, len(reader.items), TeacherEmbeddings.empty())
    student.student.eval()
    example = student.input_builder(batch_of(reader, 30))
    calibration = RankerCalibration(dict.fromkeys(reader.lake.spec.objectives, FITTED))
    path = tmp_path_factory.mktemp("compiled") / "v1"
    folder = export_ranker(path, student, calibration, example, compiled=True)
    assert isinstance(folder, Path)
    return folder, student


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_compiled_and_onnx_programs_give_the_same_probabilities(
    compiled: tuple[Path, TrainedStudent], reader: ExampleReader, tmp_path: Path, rows: int
) -> None:
    folder, student = compiled
    copy = signed_copy(folder, tmp_path / "copy")
    inputs = student.input_builder(batch_of(reader, rows))
    rankers = load_ranker(copy), load_compiled(copy)
    assert isinstance(rankers[1].rank_program, CompiledProgram)
    by_onnx, by_compiled = (
        r.score(r.user_state(inputs.requests), inputs.candidates).probabilities for r in rankers
    )
    np.testing.assert_allclose(by_compiled, by_onnx, atol=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("name", COMPILED_FILES)
def test_a_compiled_program_that_was_changed_is_not_loaded(
    compiled: tuple[Path, TrainedStudent], tmp_path: Path, name: str
) -> None:
    copy = signed_copy(compiled[0], tmp_path / "copy")
    (copy / name).write_bytes((copy / name).read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{name} is not the file that was saved"):
        load_compiled(copy)


@pytest.mark.proof
def test_programs_compiled_for_another_kind_of_cpu_are_refused(
    compiled: tuple[Path, TrainedStudent], tmp_path: Path
) -> None:
    copy = signed_copy(compiled[0], tmp_path / "copy")
    environment = load_ranker(copy).manifest.build_environment | {"cpu": "Z80"}
    other = signed_copy(compiled[0], tmp_path / "other", build_environment=environment)
    with pytest.raises(UserError, match="was compiled with cpu Z80, this machine has"):
        load_compiled(other)


def test_without_compiled_programs_in_the_manifest_onnx_runs(folder: Path, tmp_path: Path) -> None:
    copy = signed_copy(folder, tmp_path / "copy")
    assert not isinstance(load_compiled(copy).rank_program, CompiledProgram)
    for name in COMPILED_FILES:
        (copy / name).write_bytes(b"whatever")
    assert not isinstance(load_compiled(copy).rank_program, CompiledProgram)


def test_a_file_that_is_not_a_program_is_named(folder: Path, tmp_path: Path) -> None:
    onnx_program: Program = load_ranker(signed_copy(folder, tmp_path / "copy")).rank_program
    with pytest.raises(UserError, match=r"rank.pt2 cannot be loaded here .*: compile it again"):
        CompiledProgram(b"whatever", "rank.pt2", onnx_program)


def test_compiled_programs_run_only_where_a_key_is_trusted(
    folder: Path,
    spec_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(TRUSTED_KEY_VARIABLE)
    with pytest.raises(UserError, match=f"are native code: set {TRUSTED_KEY_VARIABLE} to the"):
        load_compiled(folder)
    command = ["rank", "serve", "--spec", str(spec_path), "--lake", str(tmp_path), "--compiled"]
    assert main(command) == 2
    assert f"set {TRUSTED_KEY_VARIABLE}" in capsys.readouterr().err


@pytest.mark.parametrize("compiler", ["no-such-compiler", "no-such-cache g++"])
def test_without_a_compiler_the_error_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(UserError, match="to compile programs: install it, or set CXX"):
        require_compiler()
