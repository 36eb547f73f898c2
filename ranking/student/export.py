"""A trained student to a ranker's folder: two ONNX programs, tables, test vectors, a manifest."""

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from etl.spec.model import DataSpec
from etl.tables import whole
from ranking.calibration import Calibration
from ranking.inputs import CandidateInputs, UserInputs
from ranking.package import manifest
from ranking.package.manifest import RankerManifest
from ranking.package.ranker import load
from ranking.student.batches import Inputs
from ranking.student.model import Student
from ranking.student.tensors import State
from ranking.student.trained import TrainedStudent

BEFORE = {name for part in (UserInputs, State) for name in part._fields if "before" in name} | {
    "kept"
}
FIXED = {"user", "numbers", "liked", "told"}  # axis 1 of all others is ragged


class UserProgram(nn.Module):
    """What a request tells its candidates."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.student = student

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs of `names(UserInputs)` to the state of `names(State)`."""
        missing = [inputs[0][:, :0]] * (len(UserInputs._fields) - len(inputs))
        state = self.student.user(UserInputs(*inputs, *missing))
        return tuple(state)[: len(names(State, self.student))]


class RankProgram(nn.Module):
    """Logits of candidates."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.student = student

    def forward(self, *inputs: Tensor) -> Tensor:
        """A state and candidates to logits (R, C, O)."""
        told = len(names(State, self.student))
        missing = [inputs[0][:, :0]] * (len(State._fields) - told)
        state = State(*inputs[:told], *missing)
        hidden = self.student.rank(state, CandidateInputs(*inputs[told:]))
        logits: Tensor = self.student.head(hidden)
        return logits


def names(fields: type, student: Student) -> list[str]:
    """The inputs or outputs that a student has; those of before only where it reads them."""
    given: tuple[str, ...] = fields._fields  # type: ignore[attr-defined]
    return [name for name in given if student.before is not None or name not in BEFORE]


def export(
    versions: Path, trained: TrainedStudent, spec: DataSpec, name: str,
    fitted: dict[str, Calibration], example: Inputs,
) -> Path:  # fmt: skip
    """Write a ranker's folder, whole or not at all, once it loads: its scores are checked there.

    Its version is `name` and a part of the hash of what it holds; the scores of `example` become
    its test vectors.
    """
    student, reader = trained.student, trained.assembly.reader
    (surface,) = reader.surfaces
    beside = whole.fresh(versions / name)
    look_up = trained.look_up()
    with torch.no_grad():
        user = dict(_there(look_up.user(example.requests), student))
        state = UserProgram(student)(*user.values())
        told = dict(zip(names(State, student), state, strict=True))
        own = {f"own_{k}": v for k, v in look_up.candidates(example.candidates)._asdict().items()}
        logits = RankProgram(student)(*told.values(), *own.values())
    to_onnx(UserProgram(student), user, list(told), beside / manifest.USER)
    to_onnx(RankProgram(student), told | own, ["logits"], beside / manifest.RANK)
    tables = {key.split(".")[-2]: rows.numpy() for key, rows in trained.tables.state_dict().items()}
    save_file(tables, beside / manifest.TABLES)
    vectors = {k: v.numpy() for k, v in (user | own | {"logits": logits}).items()}
    np.savez(beside / manifest.VECTORS, **vectors)
    made = RankerManifest(
        surface=surface,
        version=f"{name}-{manifest.digest(beside)[:8]}",
        spec=spec,
        sequence=reader.sequence,
        max_length=student.config.max_length,
        events=student.config.events,
        before=student.config.before,
        items=trained.items,
        user_rows=student.config.user_rows,
        calibration=fitted,
        made_with={package: version(package) for package in ("torch", "onnx", "onnxruntime")},
    )
    manifest.write(beside, made)
    load(beside)
    folder = versions / made.version
    whole.put(folder, beside)
    return folder


def _there(inputs: UserInputs[Tensor], student: Student) -> dict[str, Tensor]:
    found = inputs._asdict()
    return {name: found[name] for name in names(UserInputs, student)}


def to_onnx(program: nn.Module, inputs: dict[str, Tensor], outputs: list[str], path: Path) -> None:
    """Write a program that takes any number of requests, events and candidates."""
    any_size = torch.export.Dim.DYNAMIC
    shapes = tuple({0: any_size} if n in FIXED else {0: any_size, 1: any_size} for n in inputs)
    found = torch.onnx.export(
        program.eval(),
        tuple(inputs.values()),
        dynamo=True,
        dynamic_shapes=(shapes,),
        input_names=list(inputs),
        output_names=outputs,
        verbose=False,
    )
    assert found is not None
    found.save(path)
