"""A trained student to a ranker's folder: two programs, tables, test vectors, a manifest."""

from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.tables import atomic_io
from etl.tables.place import Place
from ranking.calibration import Calibration
from ranking.package import manifest
from ranking.package.manifest import RankerManifest
from ranking.package.ranker import load, loaded
from ranking.student.batches import Inputs
from ranking.student.programs import Traced, traced
from ranking.student.trained import TrainedStudent


def export(
    versions: Place, trained: TrainedStudent, spec: DataSpec, name: str,
    fitted: dict[str, Calibration], example: Inputs, native: bool = False,
) -> Place:  # fmt: skip
    """Write a ranker's folder, whole or not at all, once it loads: its scores are checked there.

    Its version is `name` and a part of the hash of all that it is; the scores of `example` become
    its test vectors. `native` adds programs that are compiled for this machine.
    """
    reader, config = trained.assembly.reader, trained.student.config
    (surface,) = reader.surfaces
    staging = atomic_io.staging_folder(versions / name)
    programs = traced(trained, example)
    for program, file in zip(programs, (manifest.USER, manifest.RANK), strict=True):
        program.to_onnx(staging / file)
    if native:
        for program, file in zip(programs, manifest.COMPILED, strict=True):
            program.to_native(staging / file)
    tables = {key.split(".")[-2]: rows.numpy() for key, rows in trained.tables.state_dict().items()}
    save_file(tables, staging / manifest.TABLES)
    _save_vectors(programs, staging / manifest.VECTORS)
    made = RankerManifest(
        surface=surface,
        version=name,
        spec=spec,
        sequence=reader.sequence,
        max_length=config.max_length,
        events=config.events,
        before=config.before,
        items=trained.items,
        user_rows=config.user_rows,
        calibration=fitted,
        made_with={package: version(package) for package in ("torch", "onnx", "onnxruntime")},
    )
    made = made.model_copy(update={"version": f"{name}-{manifest.digest(staging, made)[:8]}"})
    if native:
        from ranking.compiled import machine, natively

        made = made.model_copy(update={"made_with": made.made_with | machine()})
        manifest.write(staging, made)
        package = manifest.read_package(staging)
        natively(loaded(package, staging), package, staging)
    else:
        manifest.write(staging, made)
        load(staging)
    folder = versions / made.version
    _publish(staging, folder)
    return folder


def _publish(staging: Path, folder: Place) -> None:
    """Move a ranker to the folder of its version, unless that holds the same one already."""
    if folder.exists():
        try:
            manifest.read(folder)
        except UserError:
            atomic_io.remove_folder(folder)  # damaged, or signed by a key that is trusted no more
    atomic_io.publish_folder(staging, folder)


def _save_vectors(programs: tuple[Traced, Traced], path: Path) -> None:
    user, rank = programs
    own = {name: x for name, x in rank.inputs.items() if name not in user.outputs}
    vectors = user.inputs | own | rank.outputs
    np.savez(path, **{name: x.numpy() for name, x in vectors.items()})  # type: ignore[arg-type]
