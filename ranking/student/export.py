"""A trained student to a ranker's folder: two programs, tables, test vectors, a manifest."""

from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from etl.spec.model import DataSpec
from etl.tables import whole
from etl.tables.place import Place
from ranking.calibration import Calibration
from ranking.package import manifest
from ranking.package.manifest import RankerManifest
from ranking.package.ranker import checked, load
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
    beside = whole.fresh(versions / name)
    programs = traced(trained, example)
    for program, file in zip(programs, (manifest.USER, manifest.RANK), strict=True):
        program.to_onnx(beside / file)
    if native:
        for program, file in zip(programs, manifest.COMPILED, strict=True):
            program.to_native(beside / file)
    tables = {key.split(".")[-2]: rows.numpy() for key, rows in trained.tables.state_dict().items()}
    save_file(tables, beside / manifest.TABLES)
    _save_vectors(programs, beside / manifest.VECTORS)
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
    made = made.model_copy(update={"version": f"{name}-{manifest.digest(beside, made)[:8]}"})
    if native:
        from ranking.compiled import machine, natively

        made = made.model_copy(update={"made_with": made.made_with | machine()})
        manifest.write(beside, made)
        checked(natively(load(beside), beside), beside)
    else:
        manifest.write(beside, made)
        load(beside)
    folder = versions / made.version
    whole.put(folder, beside)
    return folder


def _save_vectors(programs: tuple[Traced, Traced], path: Path) -> None:
    user, rank = programs
    own = {name: x for name, x in rank.inputs.items() if name not in user.outputs}
    vectors = user.inputs | own | rank.outputs
    np.savez(path, **{name: x.numpy() for name, x in vectors.items()})  # type: ignore[arg-type]
