"""Programs of a ranker as ONNX: traced once, then filled with newer weights.

A program maps a dictionary of named tensors to another one. Names, order and axes of the tensors
are those of the fields of UserInputs, UserState and CandidateInputs; the last two are prefixed.

Tracing takes seconds and depends on the architecture, not on the weights. The traced graph is
therefore kept as well: its initializers are the weights by name. In the optimized graph, which is
run, some are folded into constants.
"""

import hashlib
import inspect
import os
import shlex
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.onnx import ONNXProgram

from etl.errors import UserError
from ranking.inputs.arrays import (
    CANDIDATE_PREFIX,
    DYNAMIC_AXES,
    STATE_PREFIX,
    CandidateInputs,
    UserInputs,
    declared_axes,
    from_named_arrays,
    named_arrays,
)
from ranking.inputs.from_tables import RankerInputs
from ranking.registry.manifest import LOG_VALUES
from ranking.registry.onnx_programs import OnnxProgram
from ranking.registry.ranker import OUTPUT_TOLERANCE
from ranking.student.model import Student, UserState
from ranking.student.trained import TrainedStudent

NamedTensors = dict[str, Tensor]
INPUT_AXES = {
    **declared_axes(UserInputs),
    **declared_axes(UserState, STATE_PREFIX),
    **declared_axes(CandidateInputs, CANDIDATE_PREFIX),
}
TRACED_FROM = "gemline.traced_from"  # in the metadata of a graph: its `ExportableProgram.origin`
PACKAGES = ("gemline", "torch", "onnx", "onnxscript")  # what traces


class UserProgram(nn.Module):
    """Runs once per request, independent of its candidates."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.student = student

    def forward(self, inputs: NamedTensors) -> NamedTensors:
        """The tensors of UserInputs to those of UserState, prefixed."""
        state = self.student.encode_user(from_named_arrays(UserInputs, inputs))
        return named_arrays(state, STATE_PREFIX)


class RankProgram(nn.Module):
    """Scores the candidates of requests."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.student = student

    def forward(self, inputs: NamedTensors) -> NamedTensors:
        """The tensors of UserState and CandidateInputs, both prefixed, to `logits` (R, C, O).

        With values of outcomes also to their logarithms, `log_values` (R, C, V).
        """
        state = from_named_arrays(UserState, inputs, STATE_PREFIX)
        candidates = from_named_arrays(CandidateInputs, inputs, CANDIDATE_PREFIX)
        hidden = self.student.encode_candidates(state, candidates)
        outputs = {"logits": self.student.head(hidden)}
        if self.student.value_head is not None:
            outputs[LOG_VALUES] = self.student.value_head(hidden)
        return outputs


@dataclass(frozen=True)
class ExportableProgram:
    """A program with the inputs and outputs of an example."""

    module: nn.Module
    inputs: NamedTensors
    outputs: NamedTensors
    built_from: str = ""  # the configuration of the module, and the hash of the spec

    @property
    def dynamic_shapes(self) -> dict[str, dict[int, object]]:
        """The axes of each input whose size varies from call to call, for torch.export."""
        return {
            name: dict.fromkeys(_dynamic_axes(name), torch.export.Dim.DYNAMIC)
            for name in self.inputs
        }

    @property
    def origin(self) -> str:
        """A hash of the architecture and of the code that a traced graph depends on.

        Code of other modules counts by the version of its package.
        """
        sources = sorted({inspect.getfile(type(module)) for module in self.module.modules()})
        parts = [
            self.built_from,
            repr(self.module),
            *(
                f"{name} {list(tensor.shape)} {tensor.dtype}"
                for name, tensor in self._weights().items()
            ),
            *(f"{name} {_fixed_sizes(name, x)} {x.dtype}" for name, x in self.inputs.items()),
            *(f"{package} {version(package)}" for package in PACKAGES),
            *(Path(source).read_text() for source in sources),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def write_onnx(self, path: Path, graph_path: Path, earlier_graph: bytes | None) -> None:
        """Write the program as ONNX, and its traced graph to another file.

        The program is not traced where `earlier_graph` is a graph of the same origin that computes
        the outputs of the example once it has the weights of this program.
        """
        if earlier_graph is not None and (graph := self._filled_graph(earlier_graph)):
            _save_graph(graph, path, graph_path)
            if self._is_computed_by(path):
                return
        _save_graph(self._trace_graph(), path, graph_path)

    def _filled_graph(self, graph: bytes) -> ONNXProgram | None:
        """A traced graph with the weights of this program; None if it is of another origin."""
        import onnx
        from onnxscript import ir

        model = ir.from_proto(onnx.load_model_from_string(graph))
        if model.metadata_props.get(TRACED_FROM) != self.origin:
            return None
        weights = self._weights()
        for name, initializer in model.graph.initializers.items():
            if name in weights:  # the others are constants of the architecture
                initializer.const_value = ir.tensor(weights[name].detach().numpy(), name=name)
        return ONNXProgram(model, None)

    def _weights(self) -> NamedTensors:
        """Parameters and buffers by name, which are the initializers of the traced graph."""
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def _is_computed_by(self, path: Path) -> bool:
        """Whether a program that was written computes the outputs of the example."""
        found = OnnxProgram(path.read_bytes())({k: x.numpy() for k, x in self.inputs.items()})
        return all(
            np.allclose(found[name], expected, OUTPUT_TOLERANCE, OUTPUT_TOLERANCE, equal_nan=True)
            for name, expected in self.outputs.items()
        )

    def _trace_graph(self) -> ONNXProgram:
        """The program as a graph that is not optimized."""
        from onnxscript import ir

        with warnings.catch_warnings():
            # The exporter deep-copies a class of PyTorch that PyTorch has deprecated.
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
            graph = torch.onnx.export(
                self.module.eval(),
                kwargs={"inputs": self._inputs_to_trace()},
                dynamo=True,
                dynamic_shapes={"inputs": self.dynamic_shapes},
                verbose=False,
                optimize=False,
            )
        assert graph is not None
        # Otherwise an input that is returned as it is would have one name for both.
        ir.passes.common.OutputFixPass()(graph.model)
        named_values = (*graph.model.graph.inputs, *graph.model.graph.outputs)
        for value, name in zip(named_values, (*self.inputs, *self.outputs), strict=True):
            value.name = name
        graph.model.metadata_props[TRACED_FROM] = self.origin
        return graph

    def _inputs_to_trace(self) -> NamedTensors:
        """The inputs of the example, with at least two requests and candidates."""
        return {name: _at_least_two(x, _dynamic_axes(name)) for name, x in self.inputs.items()}

    def compile_aot(self, path: Path) -> None:
        """Write the program as native code for one thread of this kind of CPU; takes a minute."""
        from torch._inductor import aoti_compile_and_package  # seconds to import

        for weight in self.module.parameters():
            weight.requires_grad_(False)
        exported = torch.export.export(
            self.module.eval(), (self._inputs_to_trace(),), dynamic_shapes=(self.dynamic_shapes,)
        )
        aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs={"cpp.threads": 1}
        )


def _save_graph(graph: ONNXProgram, path: Path, graph_path: Path) -> None:
    """Save a graph as it was traced, and optimized."""
    graph.save(graph_path)
    graph.optimize()
    graph.save(path)


def _dynamic_axes(name: str) -> list[int]:
    return [axis for axis, letter in enumerate(INPUT_AXES[name]) if letter in DYNAMIC_AXES]


def _fixed_sizes(name: str, x: Tensor) -> list[int | None]:
    """The sizes of an input; None for those that vary from call to call."""
    dynamic = _dynamic_axes(name)
    return [None if axis in dynamic else size for axis, size in enumerate(x.shape)]


def _at_least_two(x: Tensor, axes: Iterable[int]) -> Tensor:
    """Repeat axes of size 1, which torch.export would take for constants."""
    for axis in axes:
        x = torch.cat((x, x), axis) if x.shape[axis] == 1 else x
    return x


def require_compiler() -> None:
    """Raises UserError if there is no C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    executable = (shlex.split(compiler) or [""])[0]
    if shutil.which(executable) is None:
        raise UserError(f"no C++ compiler {compiler} to compile programs: install it, or set CXX")


@torch.no_grad()
def exportable_programs(
    trained: TrainedStudent, example: RankerInputs
) -> tuple[ExportableProgram, ExportableProgram]:
    """The user program and the rank program, with their inputs and outputs on an example."""
    student, lookup = trained.student, trained.lookup()
    user_inputs = lookup.user_inputs(example.requests)
    if student.teacher_history is None:
        user_inputs = user_inputs._replace(teacher_history=None)
    candidates = lookup.candidate_inputs(example.candidates)
    user_tensors = named_arrays(user_inputs)
    user_state = UserProgram(student)(user_tensors)
    rank_tensors = user_state | named_arrays(candidates, CANDIDATE_PREFIX)
    logits = RankProgram(student)(rank_tensors)
    reader = trained.input_builder.reader
    built_from = f"{reader.lake.spec.hash} {reader.surfaces} {student.config.model_dump_json()}"
    return (
        ExportableProgram(UserProgram(student), user_tensors, user_state, built_from),
        ExportableProgram(RankProgram(student), rank_tensors, logits, built_from),
    )
