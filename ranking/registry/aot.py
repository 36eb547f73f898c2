"""A ranker's programs as native code for one kind of machine (AOTInductor), in addition to ONNX.

Loading such a program runs native code. Compiled programs are therefore loaded only if
GEMLINE_TRUSTED_KEY is set, with which rankers are verified, and only on the kind of machine that
compiled them.
"""

import io
import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import torch
from torch._inductor import aoti_load_package

from etl.errors import UserError
from etl.tables.uri import StoragePath
from ranking.registry.manifest import (
    COMPILED_FILES,
    RankerPackage,
    read_package,
    require_trusted_key,
)
from ranking.registry.onnx_programs import Arrays, Program
from ranking.registry.ranker import (
    ExportedRanker,
    ranker_from_package,
    verify_test_vectors,
)


class CompiledProgram:
    """A compiled program with the inputs and outputs of its ONNX form, run on one thread.

    Raises:
        UserError: The content cannot be loaded.
    """

    def __init__(self, content: bytes, name: str, onnx_program: Program) -> None:
        self.inputs, self.outputs = onnx_program.inputs, onnx_program.outputs
        try:
            self._run = aoti_load_package(io.BytesIO(content), run_single_threaded=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{name} cannot be loaded here ({reason}): compile it again") from None

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Run on named arrays; those that are not inputs are ignored."""
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in self.inputs
        }
        with torch.inference_mode():
            outputs = self._run(tensors)
        return {name: outputs[name].numpy() for name in self.outputs}


def build_platform() -> dict[str, str]:
    """The versions and the kind of CPU that compiled programs depend on."""
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": version("torch"), "cpu": cpu}


def load_compiled(folder: StoragePath) -> ExportedRanker:
    """The ranker of a folder with its compiled programs, or with ONNX where it has none.

    Raises:
        UserError: As `load_ranker` does; no key is trusted; or the programs were compiled for
            another kind of machine.
    """
    require_trusted_key()
    package = read_package(folder)
    ranker = ranker_from_package(package, folder)
    if not set(COMPILED_FILES) <= set(ranker.manifest.file_hashes):
        return ranker
    for field, expected in build_platform().items():
        compiled_with = ranker.manifest.build_environment.get(field)
        if compiled_with != expected:
            raise UserError(
                f"the ranker in {folder} was compiled with {field} {compiled_with}, this machine "
                f"has {expected}: train it here with `gemline rank train --compiled`"
            )
    return with_compiled_programs(ranker, package, folder)


def with_compiled_programs(
    ranker: ExportedRanker, package: RankerPackage, folder: StoragePath
) -> ExportedRanker:
    """The ranker with the compiled programs of its package, checked on its test vectors."""
    user_file, rank_file = COMPILED_FILES
    contents = package.file_contents
    compiled = replace(
        ranker,
        user_program=CompiledProgram(
            contents[user_file], f"{folder}/{user_file}", ranker.user_program
        ),
        rank_program=CompiledProgram(
            contents[rank_file], f"{folder}/{rank_file}", ranker.rank_program
        ),
    )
    return verify_test_vectors(compiled, package, folder)
