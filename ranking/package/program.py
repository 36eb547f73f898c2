"""A program of a ranker: named arrays in, named arrays out."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import onnxruntime

Arrays = dict[str, np.ndarray]


class Program(Protocol):
    """Reads the arrays that `inputs` names, gives those that `outputs` names."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what it reads."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what it gives."""

    def __call__(self, given: Mapping[str, np.ndarray]) -> Arrays:
        """Run on arrays of which more may be given than are read."""


class OnnxProgram:
    """An ONNX program on the CPU, from the bytes of its file, with so many threads."""

    def __init__(self, content: bytes, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
        self.inputs = tuple(put.name for put in self._session.get_inputs())
        self.outputs = tuple(put.name for put in self._session.get_outputs())

    def __call__(self, given: Mapping[str, np.ndarray]) -> Arrays:
        """Run on arrays of which more may be given than are read."""
        asked = {name: np.ascontiguousarray(given[name]) for name in self.inputs}
        return dict(zip(self.outputs, self._session.run(None, asked), strict=True))
