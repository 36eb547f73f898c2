"""The two programs of a student, as named tensors in and out, traced on an example.

R requests, C candidates, O objectives.
"""

import os
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from etl.errors import UserError
from ranking.inputs import CandidateInputs, UserInputs
from ranking.student.batches import Inputs
from ranking.student.model import Student
from ranking.student.tensors import State
from ranking.student.trained import TrainedStudent

BEFORE = {name for part in (UserInputs, State) for name in part._fields if "before" in name} | {
    "kept"
}
FIXED = {"user", "numbers", "liked", "told"}  # axis 1 of all others is ragged
Named = dict[str, Tensor]


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


@dataclass(frozen=True)
class Traced:
    """A program, and what it reads and gives on an example."""

    program: nn.Module
    inputs: Named
    outputs: Named

    @property
    def shapes(self) -> tuple[dict[int, object], ...]:
        """Axes of the inputs that may have any size: requests, events and candidates."""
        any_size = torch.export.Dim.DYNAMIC
        both: dict[int, object] = {0: any_size, 1: any_size}
        return tuple({0: any_size} if name in FIXED else both for name in self.inputs)

    def to_onnx(self, path: Path) -> None:
        """Write it as ONNX."""
        found = torch.onnx.export(
            self.program.eval(),
            tuple(self.inputs.values()),
            dynamo=True,
            dynamic_shapes=(self.shapes,),
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            verbose=False,
        )
        assert found is not None
        found.save(path)

    def to_native(self, path: Path) -> None:
        """Write it as native code for one thread of this kind of machine; takes a minute."""
        from torch._inductor import aoti_compile_and_package  # seconds to import

        for weight in self.program.parameters():
            weight.requires_grad_(False)
        each = zip(self.inputs.values(), self.shapes, strict=True)
        inputs = tuple(_two_or_more(x, axes) for x, axes in each)
        found = torch.export.export(self.program.eval(), inputs, dynamic_shapes=(self.shapes,))
        configs = {"cpp.threads": 1}
        aoti_compile_and_package(found, package_path=str(path), inductor_configs=configs)


def _two_or_more(x: Tensor, axes: Iterable[int]) -> Tensor:
    """Axes of one element get it twice: torch.export would take a size of 1 for a constant."""
    for axis in axes:
        x = torch.cat((x, x), axis) if x.shape[axis] == 1 else x
    return x


def require_compiler() -> None:
    """Raises UserError where there is no C++ compiler."""
    asked = os.environ.get("CXX", "g++")
    if shutil.which((shlex.split(asked) or [""])[0]) is None:
        raise UserError(f"no C++ compiler {asked} to compile programs: install it, or set CXX")


@torch.no_grad()
def traced(trained: TrainedStudent, example: Inputs) -> tuple[Traced, Traced]:
    """The program of the user's side, and that of the candidates."""
    student, look_up = trained.student, trained.look_up()
    given = look_up.user(example.requests)._asdict()
    user = {name: given[name] for name in names(UserInputs, student)}
    state = UserProgram(student)(*user.values())
    told = dict(zip(names(State, student), state, strict=True))
    own = {f"own_{k}": v for k, v in look_up.candidates(example.candidates)._asdict().items()}
    logits = RankProgram(student)(*told.values(), *own.values())
    return (
        Traced(UserProgram(student), user, told),
        Traced(RankProgram(student), told | own, {"logits": logits}),
    )
