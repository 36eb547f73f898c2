"""Programs compiled for this machine score as those of ONNX do, and run only if trusted."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from etl.errors import UserError
from etl.signature import PUBLIC, SECRET
from gemline import main
from ranking.compiled import CompiledProgram, load_native
from ranking.package.manifest import COMPILED, RankerManifest, write
from ranking.package.program import Program
from ranking.package.ranker import load
from ranking.student.export import export
from ranking.student.programs import require_compiler
from ranking.student.trained import TrainedStudent, new_student
from tests.ranking.conftest import FITTED, SMALL, batch_of
from training.data.reader import Reader
from training.knowledge.earlier import Earlier

KEY = Ed25519PrivateKey.generate()


@pytest.fixture(autouse=True)
def trusted() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PUBLIC, KEY.public_key().public_bytes_raw().hex())
        patch.setenv(SECRET, KEY.private_bytes_raw().hex())
        yield


def signed(folder: Path, place: Path, **changes: object) -> Path:
    """A copy with another manifest, signed."""
    shutil.copytree(folder, place)
    told = RankerManifest.model_validate_json((place / "ranker.json").read_text())
    write(place, told.model_copy(update=changes))
    return place


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "with what GEM kept"])
def native(request, reader: Reader, tmp_path_factory) -> tuple[Path, TrainedStudent]:
    require_compiler()
    made = new_student(
        reader, SMALL.model_copy(update={"before": request.param}), len(reader.items),
        Earlier.nothing(),
    )  # fmt: skip
    made.student.eval()
    spec, example = reader.lake.spec, made.assembly(batch_of(reader, 30))
    fitted = dict.fromkeys(spec.objectives, FITTED)
    folder = tmp_path_factory.mktemp("native")
    return export(folder, made, spec, "v1", fitted, example, native=True), made


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_both_forms_say_the_same(
    native: tuple[Path, TrainedStudent], reader: Reader, tmp_path: Path, rows: int
) -> None:
    folder, student = native
    own = signed(folder, tmp_path / "own")
    inputs = student.assembly(batch_of(reader, rows))
    rankers = load(own), load_native(own)
    assert isinstance(rankers[1].rank_program, CompiledProgram)
    said = [r.probabilities(r.state(inputs.requests), inputs.candidates) for r in rankers]
    np.testing.assert_allclose(*said, atol=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("name", COMPILED)
def test_a_package_that_is_not_the_one_saved_never_runs(
    native: tuple[Path, TrainedStudent], tmp_path: Path, name: str
) -> None:
    own = signed(native[0], tmp_path / "own")
    (own / name).write_bytes((own / name).read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{name} is not the file that was saved"):
        load_native(own)


@pytest.mark.proof
def test_what_another_kind_of_machine_compiled_is_refused(
    native: tuple[Path, TrainedStudent], tmp_path: Path
) -> None:
    made = load(signed(native[0], tmp_path / "own")).manifest.made_with
    other = signed(native[0], tmp_path / "other", made_with=made | {"cpu": "Z80"})
    with pytest.raises(UserError, match="was compiled with cpu Z80, not"):
        load_native(other)


def test_without_packages_or_with_planted_ones_onnx_answers(folder: Path, tmp_path: Path) -> None:
    own = signed(folder, tmp_path / "own")
    assert not isinstance(load_native(own).rank_program, CompiledProgram)
    for name in COMPILED:
        (own / name).write_bytes(b"whatever")
    assert not isinstance(load_native(own).rank_program, CompiledProgram)


def test_what_is_no_package_is_told(folder: Path, tmp_path: Path) -> None:
    same: Program = load(signed(folder, tmp_path / "own")).rank_program
    with pytest.raises(UserError, match=r"rank.pt2 cannot be loaded here .*: compile it again"):
        CompiledProgram(b"whatever", "rank.pt2", same)


def test_native_code_runs_only_where_somebody_is_trusted(
    folder: Path, spec_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.delenv(PUBLIC)
    with pytest.raises(UserError, match=f"are native code: set {PUBLIC} to whom you trust"):
        load_native(folder)
    asked = ["rank", "serve", "--spec", str(spec_path), "--lake", str(tmp_path), "--compiled"]
    assert main(asked) == 2
    assert f"set {PUBLIC}" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["no-such-compiler", "no-such-cache g++"])
def test_without_a_compiler_the_fix_is_told(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("CXX", asked)
    with pytest.raises(UserError, match="to compile programs: install it, or set CXX"):
        require_compiler()
