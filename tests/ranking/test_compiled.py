"""Programs compiled for this machine score as those of ONNX do, and are loaded only if asked."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from etl.errors import UserError
from ranking.compiled import load_compiled, require_compiler
from ranking.package.manifest import COMPILED
from ranking.package.ranker import load
from ranking.student.export import export
from ranking.student.trained import TrainedStudent
from tests.ranking.conftest import FITTED, batch_of
from training.data.reader import Reader


@pytest.fixture(scope="module")
def native(student: TrainedStudent, reader: Reader, tmp_path_factory) -> Path:
    spec, example = reader.lake.spec, student.assembly(batch_of(reader, 30))
    fitted = dict.fromkeys(spec.objectives, FITTED)
    return export(tmp_path_factory.mktemp("n"), student, spec, "v1", fitted, example, native=True)


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_both_forms_say_the_same(
    native: Path, student: TrainedStudent, reader: Reader, rows: int
) -> None:
    inputs = student.assembly(batch_of(reader, rows))
    said = [
        ranker.probabilities(ranker.state(inputs.requests), inputs.candidates)
        for ranker in (load(native), load_compiled(native))
    ]
    np.testing.assert_allclose(*said, atol=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("name", COMPILED)
def test_a_package_that_is_not_the_one_saved_never_runs(
    native: Path, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "feed"
    shutil.copytree(native, copy)
    (copy / name).write_bytes((copy / name).read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{name} is not the file that was saved"):
        load_compiled(copy)


def test_a_planted_package_never_runs(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "feed"
    shutil.copytree(folder, copy)
    for name in COMPILED:
        (copy / name).write_bytes(b"whatever")
    with pytest.raises(UserError, match="was not compiled: run `gemline rank train --compiled`"):
        load_compiled(copy)


def test_without_a_compiler_the_fix_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="no C\\+\\+ compiler no-such-compiler"):
        require_compiler()
