"""The programs of a ranker: functions of named arrays, run by ONNX Runtime."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import onnxruntime

Arrays = dict[str, np.ndarray]


class Program(Protocol):
    """A function of named arrays."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that it reads."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that it returns."""

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Run on named arrays; those that are not inputs are ignored."""


class OnnxProgram:
    """An ONNX program, run by ONNX Runtime on one CPU thread."""

    def __init__(self, content: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
        self.inputs = tuple(node.name for node in self._session.get_inputs())
        self.outputs = tuple(node.name for node in self._session.get_outputs())

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Run on named arrays; those that are not inputs are ignored."""
        inputs = {name: np.ascontiguousarray(arrays[name]) for name in self.inputs}
        return dict(zip(self.outputs, self._session.run(None, inputs), strict=True))
