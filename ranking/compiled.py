"""A ranker's programs compiled for this kind of machine (AOTInductor), beside those of ONNX.

They are native code: whoever loads them runs what their maker wrote. So they are loaded only where
GEMLINE_TRUSTED_KEY names who signs rankers, and only on the kind of machine that made them.
"""

import io
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor
from torch._inductor import aoti_load_package

from etl.errors import UserError
from etl.signature import PUBLIC
from etl.tables.place import Place
from ranking.package.manifest import COMPILED, Package, read_package
from ranking.package.program import Arrays, Program
from ranking.package.ranker import Ranker, checked, loaded


class CompiledProgram:
    """A package that reads and gives what another form of the same program does, on one thread.

    Raises UserError where the file cannot be loaded.
    """

    def __init__(self, content: bytes, name: str, same: Program) -> None:
        self.inputs, self.outputs = same.inputs, same.outputs
        try:
            self._run = aoti_load_package(io.BytesIO(content), run_single_threaded=True)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise UserError(f"{name} cannot be loaded here ({said}): compile it again") from None

    def __call__(self, given: Mapping[str, np.ndarray]) -> Arrays:
        """Run on arrays of which more may be given than are read."""
        asked = (torch.from_numpy(np.ascontiguousarray(given[name])) for name in self.inputs)
        with torch.inference_mode():
            found = self._run(*asked)
        found = (found,) if isinstance(found, Tensor) else found
        return {name: x.numpy() for name, x in zip(self.outputs, found, strict=True)}


def machine() -> dict[str, str]:
    """What compiled programs depend on."""
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": version("torch"), "cpu": cpu}


def load_native(there: Place) -> Ranker:
    """The ranker of a folder by its compiled programs; by ONNX where it was made without them.

    Raises UserError as `load` does, where no key is trusted, and where another kind of machine
    compiled it.
    """
    if not os.environ.get(PUBLIC):
        raise UserError(f"compiled programs are native code: set {PUBLIC} to whom you trust")
    package = read_package(there)
    plain = loaded(package, there)
    if not set(COMPILED) <= set(plain.manifest.files):
        return plain
    for what, here in machine().items():
        made = plain.manifest.made_with.get(what)
        if made != here:
            raise UserError(f"the ranker in {there} was compiled with {what} {made}, not {here}")
    return natively(plain, package, there)


def natively(plain: Ranker, package: Package, there: Place) -> Ranker:
    """The same ranker by the compiled programs of its package, checked on its test vectors."""
    user, rank = (
        CompiledProgram(package.files[name], f"{there}/{name}", same)
        for name, same in zip(COMPILED, (plain.user_program, plain.rank_program), strict=True)
    )
    return checked(replace(plain, user_program=user, rank_program=rank), package, there)
