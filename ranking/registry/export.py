"""Export of a trained student as a ranker: two programs, tables, test vectors and a manifest."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from etl.errors import UserError
from etl.tables import atomic_io
from etl.tables.uri import StoragePath
from ranking.inputs.from_tables import RankerInputs
from ranking.registry import manifest
from ranking.registry.calibration_offsets import write_offsets
from ranking.registry.manifest import RankerManifest, RankerTraining
from ranking.registry.model_card import model_card
from ranking.registry.programs import ExportableProgram, NamedTensors, exportable_programs
from ranking.registry.ranker import load_ranker, ranker_from_package
from ranking.scoring.offsets import RankerCalibration
from ranking.scoring.predictions import SegmentedPredictions
from ranking.student.trained import TrainedStudent


@dataclass(frozen=True)
class TrainingSnapshot:
    """The record of a student's training, and the state from which it continues, by name.

    `day_predictions`, if it ends within a day, are those of the labels that have become final on
    the day, from before they were learned.
    """

    record: RankerTraining
    state: NamedTensors
    day_predictions: SegmentedPredictions | None = None


def export_ranker(
    path: StoragePath,
    trained: TrainedStudent,
    calibration: RankerCalibration,
    example: RankerInputs,
    training: TrainingSnapshot | None = None,
    compiled: bool = False,
    earlier: StoragePath | None = None,
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
        earlier: A version whose traced graphs are filled with the student's weights, where its
            architecture is the same.

    Returns:
        The folder.
    """
    staging = atomic_io.staging_folder(path)
    programs = exportable_programs(trained, example)
    graphs = {} if earlier is None else manifest.read_graphs(earlier)
    _write_programs(programs, staging, compiled, graphs)
    tables = {key.split(".")[-2]: rows.numpy() for key, rows in trained.tables.state_dict().items()}
    save_file(tables, staging / manifest.TABLES_FILE)
    _save_test_vectors(programs, staging / manifest.TEST_VECTORS_FILE)
    ranker_manifest = _manifest(trained, path.name, calibration)
    if training is not None:
        save_torch_file(training.state, staging / manifest.TRAINING_FILE)
        if training.day_predictions is not None:
            arrays = training.day_predictions.to_arrays()
            np.savez(staging / manifest.DAY_FILE, **arrays)  # type: ignore[arg-type]
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
    programs: tuple[ExportableProgram, ExportableProgram],
    folder: Path,
    compiled: bool,
    earlier_graphs: Mapping[str, bytes],
) -> None:
    onnx_files = (manifest.USER_ONNX, manifest.RANK_ONNX)
    for program, file, graph in zip(programs, onnx_files, manifest.GRAPH_FILES, strict=True):
        program.write_onnx(folder / file, folder / graph, earlier_graphs.get(graph))
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
            manifest.read_package(folder)
        except UserError:
            atomic_io.remove_folder(folder)  # damaged, or signed by a key that is no longer trusted
    atomic_io.publish_folder(staging, folder)


def _save_test_vectors(programs: tuple[ExportableProgram, ExportableProgram], path: Path) -> None:
    """Save the inputs of both programs, without outputs of the first program, and the scores."""
    user, rank = programs
    candidates = {name: x for name, x in rank.inputs.items() if name not in user.outputs}
    vectors = user.inputs | candidates | rank.outputs
    np.savez(path, **{name: x.numpy() for name, x in vectors.items()})  # type: ignore[arg-type]
