"""Export of a trained student as a ranker: two programs, tables, test vectors and a manifest.

A program maps a dictionary of named tensors to another one. Names, order and axes of the tensors
are those of the fields of UserInputs, UserState and CandidateInputs; the last two are prefixed.
"""

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
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from torch import Tensor, nn

from etl.errors import UserError
from etl.tables import atomic_io
from etl.tables.uri import StoragePath
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
from ranking.registry import manifest
from ranking.registry.calibration_offsets import write_offsets
from ranking.registry.manifest import RankerManifest, RankerTraining
from ranking.registry.model_card import model_card
from ranking.registry.ranker import load_ranker, ranker_from_package
from ranking.scoring.offsets import RankerCalibration
from ranking.student.model import Student, UserState
from ranking.student.trained import TrainedStudent

NamedTensors = dict[str, Tensor]
INPUT_AXES = {
    **declared_axes(UserInputs),
    **declared_axes(UserState, STATE_PREFIX),
    **declared_axes(CandidateInputs, CANDIDATE_PREFIX),
}


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
            outputs[manifest.LOG_VALUES] = self.student.value_head(hidden)
        return outputs


@dataclass(frozen=True)
class TrainingSnapshot:
    """The record of a student's training, and the state from which it continues, by name."""

    record: RankerTraining
    state: NamedTensors


@dataclass(frozen=True)
class TracedProgram:
    """A program with the inputs and outputs of an example."""

    module: nn.Module
    inputs: NamedTensors
    outputs: NamedTensors

    @property
    def dynamic_shapes(self) -> dict[str, dict[int, object]]:
        """The axes of each input whose size varies from call to call, for torch.export."""
        return {
            name: dict.fromkeys(_dynamic_axes(name), torch.export.Dim.DYNAMIC)
            for name in self.inputs
        }

    def to_onnx(self, path: Path) -> None:
        """Write the program as ONNX."""
        with warnings.catch_warnings():
            # The exporter deep-copies a class of PyTorch that PyTorch has deprecated.
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
            onnx_program = torch.onnx.export(
                self.module.eval(),
                kwargs={"inputs": self.inputs},
                dynamo=True,
                dynamic_shapes={"inputs": self.dynamic_shapes},
                input_names=list(self.inputs),
                output_names=list(self.outputs),
                verbose=False,
            )
        assert onnx_program is not None
        onnx_program.save(path)

    def compile_aot(self, path: Path) -> None:
        """Write the program as native code for one thread of this kind of CPU; takes a minute."""
        from torch._inductor import aoti_compile_and_package  # seconds to import

        for weight in self.module.parameters():
            weight.requires_grad_(False)
        inputs = {name: _at_least_two(x, _dynamic_axes(name)) for name, x in self.inputs.items()}
        exported = torch.export.export(
            self.module.eval(), (inputs,), dynamic_shapes=(self.dynamic_shapes,)
        )
        aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs={"cpp.threads": 1}
        )


def _dynamic_axes(name: str) -> list[int]:
    return [axis for axis, letter in enumerate(INPUT_AXES[name]) if letter in DYNAMIC_AXES]


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
def trace_programs(
    trained: TrainedStudent, example: RankerInputs
) -> tuple[TracedProgram, TracedProgram]:
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
    return (
        TracedProgram(UserProgram(student), user_tensors, user_state),
        TracedProgram(RankProgram(student), rank_tensors, logits),
    )


def export_ranker(
    path: StoragePath,
    trained: TrainedStudent,
    calibration: RankerCalibration,
    example: RankerInputs,
    training: TrainingSnapshot | None = None,
    compiled: bool = False,
) -> StoragePath:
    """Write a ranker to a new folder, atomically, after it has been loaded and checked.

    Args:
        path: The folder without the suffix that export adds: a prefix of the content's hash. The
            folder's name is the ranker's version.
        trained: The student.
        calibration: The calibration of each objective, and offsets by segment.
        example: Inputs on which programs are traced; with their scores they are the test vectors.
        training: What a refit needs to continue the training.
        compiled: Add programs that are compiled for this kind of machine.

    Returns:
        The folder.
    """
    staging = atomic_io.staging_folder(path)
    programs = trace_programs(trained, example)
    _write_programs(programs, staging, compiled)
    tables = {key.split(".")[-2]: rows.numpy() for key, rows in trained.tables.state_dict().items()}
    save_file(tables, staging / manifest.TABLES_FILE)
    _save_test_vectors(programs, staging / manifest.TEST_VECTORS_FILE)
    ranker_manifest = _manifest(trained, path.name, calibration)
    if training is not None:
        save_torch_file(training.state, staging / manifest.TRAINING_FILE)
        ranker_manifest = ranker_manifest.model_copy(update={"training": training.record})
    ranker_version = f"{path.name}-{manifest.ranker_hash(staging, ranker_manifest)[:8]}"
    ranker_manifest = ranker_manifest.model_copy(update={"version": ranker_version})
    (staging / manifest.MODEL_CARD).write_text(model_card(ranker_manifest))
    if calibration.offsets is not None:
        offsets = calibration.offsets.model_copy(update={"version": ranker_version})
        write_offsets(staging, offsets)
    _write_checked_manifest(staging, ranker_manifest, compiled)
    folder = path.parent / ranker_version
    _publish_version(staging, folder)
    return folder


def _write_programs(
    programs: tuple[TracedProgram, TracedProgram], folder: Path, compiled: bool
) -> None:
    for program, file in zip(programs, (manifest.USER_ONNX, manifest.RANK_ONNX), strict=True):
        program.to_onnx(folder / file)
    if compiled:
        for program, file in zip(programs, manifest.COMPILED_FILES, strict=True):
            program.compile_aot(folder / file)


def _manifest(
    trained: TrainedStudent, version_prefix: str, calibration: RankerCalibration
) -> RankerManifest:
    reader, config = trained.input_builder.reader, trained.student.config
    (surface,) = reader.surfaces
    packages = ("torch", "onnx", "onnxruntime")
    return RankerManifest(
        surface=surface,
        version=version_prefix,
        spec=reader.lake.spec,
        sequence=reader.sequence,
        max_length=config.max_length,
        encoded_events=config.encoded_events,
        teacher_history_length=config.teacher_history_length,
        num_items=trained.num_items,
        user_hash_buckets=config.user_hash_buckets,
        calibration=dict(calibration.by_objective),
        has_calibration_offsets=calibration.offsets is not None,
        position_effects=_position_effects(trained, surface),
        build_environment={package: version(package) for package in packages},
    )


def _position_effects(trained: TrainedStudent, surface: str) -> dict[str, tuple[float, ...]] | None:
    """What each position of a surface adds to the logits, by objective."""
    bias, features = trained.student.position_bias, trained.input_builder.reader.features
    if bias is None:
        return None
    effects = bias.effects()[1 + features.surfaces.index(surface)].T
    return {
        name: tuple(row)
        for name, row in zip(features.objectives, effects.detach().tolist(), strict=True)
    }


def _write_checked_manifest(staging: Path, ranker_manifest: RankerManifest, compiled: bool) -> None:
    """Write the manifest, then load the ranker, which checks its test vectors."""
    if not compiled:
        manifest.write_manifest(staging, ranker_manifest)
        load_ranker(staging)
        return
    from ranking.registry.aot import build_platform, with_compiled_programs

    environment = ranker_manifest.build_environment | build_platform()
    manifest.write_manifest(
        staging, ranker_manifest.model_copy(update={"build_environment": environment})
    )
    package = manifest.read_package(staging)
    with_compiled_programs(ranker_from_package(package, staging), package, staging)


def _publish_version(staging: Path, folder: StoragePath) -> None:
    """Move a ranker to the folder of its version, unless that holds the same one already."""
    if folder.exists():
        try:
            manifest.read_manifest(folder)
        except UserError:
            atomic_io.remove_folder(folder)  # damaged, or signed by a key that is no longer trusted
    atomic_io.publish_folder(staging, folder)


def _save_test_vectors(programs: tuple[TracedProgram, TracedProgram], path: Path) -> None:
    """Save the inputs of both programs, without outputs of the first program, and the scores."""
    user, rank = programs
    candidates = {name: x for name, x in rank.inputs.items() if name not in user.outputs}
    vectors = user.inputs | candidates | rank.outputs
    np.savez(path, **{name: x.numpy() for name, x in vectors.items()})  # type: ignore[arg-type]
