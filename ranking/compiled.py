"""A ranker's programs compiled for this machine (AOTInductor), beside those of ONNX.

They are native code: who loads them runs what their maker wrote. Their SHA-256 stands in the
manifest, which is signed where a key is configured.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._inductor import aoti_compile_and_package, aoti_load_package

from etl.errors import UserError
from ranking.package.manifest import COMPILED
from ranking.package.program import Arrays, Program
from ranking.package.ranker import Ranker, checked, load
from ranking.student.programs import Traced


class CompiledProgram:
    """A package that reads and gives what another form of the same program does."""

    def __init__(self, path: Path, same: Program) -> None:
        self.inputs, self.outputs = same.inputs, same.outputs
        self._run = aoti_load_package(str(path), run_single_threaded=True)

    def __call__(self, given: Mapping[str, np.ndarray]) -> Arrays:
        """Run on arrays of which more may be given than are read."""
        asked = (torch.from_numpy(np.ascontiguousarray(given[name])) for name in self.inputs)
        with torch.inference_mode():
            found = self._run(*asked)
        found = (found,) if isinstance(found, Tensor) else found
        return {name: x.numpy() for name, x in zip(self.outputs, found, strict=True)}


def require_compiler() -> None:
    """Raises UserError where there is no C++ compiler."""
    asked = os.environ.get("CXX", "g++")
    if shutil.which(asked) is None:
        raise UserError(f"no C++ compiler {asked} to compile programs: install it, or set CXX")


def package(traced: Traced, path: Path) -> None:
    """Write the package of a program; takes a minute."""
    inputs = tuple(traced.inputs.values())
    for weight in traced.program.parameters():
        weight.requires_grad_(False)
    found = torch.export.export(traced.program.eval(), inputs, dynamic_shapes=(traced.shapes,))
    aoti_compile_and_package(found, package_path=str(path))


def load_compiled(folder: Path) -> Ranker:
    """The ranker of a folder by its compiled programs, on one thread.

    Raises UserError as `load` does, and where it has no such programs.
    """
    plain = load(folder)
    if not set(COMPILED) <= set(plain.manifest.files):
        raise UserError(
            f"the ranker in {folder} was not compiled: run `gemline rank train --compiled`"
        )
    torch.set_num_threads(1)
    user, rank = (folder / name for name in COMPILED)
    compiled = replace(
        plain,
        user_program=CompiledProgram(user, plain.user_program),
        rank_program=CompiledProgram(rank, plain.rank_program),
    )
    return checked(compiled, folder)
