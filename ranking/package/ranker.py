"""A ranker: two ONNX programs, tables and a calibration, answering without torch.

R requests, C candidates, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from safetensors.numpy import load_file

from etl.errors import UserError
from features.inputs import Features, features_of
from ranking import calibration
from ranking.auction import Auction, Ranked, ranked
from ranking.inputs import Candidates, Ids, LookUp, Requests
from ranking.package.manifest import RANK, TABLES, USER, VECTORS, RankerManifest, read

Floats = npt.NDArray[np.float64]
Arrays = dict[str, np.ndarray]
CLOSE = 1e-4  # of logits: what another machine's arithmetic may differ by


@dataclass(frozen=True)
class Ranker:
    """Scores the candidates of its surface."""

    manifest: RankerManifest
    user_program: onnxruntime.InferenceSession
    rank_program: onnxruntime.InferenceSession
    tables: Arrays

    @property
    def objectives(self) -> tuple[str, ...]:
        """Objectives, in the order of the columns of `probabilities`."""
        return tuple(self.manifest.spec.objectives)

    @cached_property
    def features(self) -> Features:
        """What it reads."""
        return features_of(self.manifest.spec)

    def state(self, requests: Requests) -> Arrays:
        """What requests tell their candidates: to be computed once, whatever is ranked."""
        inputs = self._look_up().user(requests)._asdict()
        return _run(self.user_program, inputs)

    def probabilities(self, state: Arrays, candidates: Candidates) -> Floats:
        """Calibrated probabilities (R, C, O)."""
        inputs = self._look_up().candidates(candidates)._asdict()
        asked = {f"own_{name}": value for name, value in inputs.items()}
        logits = _run(self.rank_program, state | asked)["logits"].astype(np.float64)
        return calibration.apply(self.manifest.calibration, logits, self.objectives)

    def rank(
        self, requests: Requests, candidates: Candidates, bids: Sequence[float],
        goals: Sequence[str | None], auction: Auction | None = None,
    ) -> list[Ranked]:  # fmt: skip
        """The candidates of one request that take part in its auction, the best first.

        `bids` and `goals` belong to the candidates; the terms are those of the ranker's own spec,
        if no others are given. See ranking/auction.py.
        """
        p = self.probabilities(self.state(requests), candidates)[candidates.present]
        auction = auction or Auction(self.manifest.spec, self.manifest.surface)
        one = np.zeros(len(p), np.int64)
        return ranked(p, auction(p, np.asarray(bids, np.float64), goals, one))

    def _look_up(self) -> LookUp[np.ndarray]:
        return LookUp(self._gather, np.asarray, self.features.match, self.manifest.items)

    def _gather(self, ids: Ids, given: np.ndarray) -> np.ndarray:
        return np.concatenate([*(self.tables[name][ids[name]] for name in sorted(ids)), given], -1)


def _run(program: onnxruntime.InferenceSession, inputs: Arrays) -> Arrays:
    asked = [put.name for put in program.get_inputs()]
    found = program.run(None, {name: np.ascontiguousarray(inputs[name]) for name in asked})
    return dict(zip((put.name for put in program.get_outputs()), found, strict=True))


def load(folder: Path, threads: int = 1) -> Ranker:
    """The ranker of a folder, which scores its own test vectors as it did when it was made.

    Raises UserError where it is missing, damaged, tampered with, or does not.
    """
    manifest = read(folder)
    user, rank = (session(folder / name, threads) for name in (USER, RANK))
    loaded = Ranker(manifest, user, rank, load_file(folder / TABLES))
    worst = apart(loaded, folder / VECTORS)
    if not worst < CLOSE:
        raise UserError(
            f"the ranker in {folder} is off by {worst:.1g} on its own test vectors; export it again"
        )
    return loaded


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """A program on the CPU, with so many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def apart(ranker: Ranker, vectors: Path) -> float:
    """The largest difference between its logits and those kept as test vectors."""
    with np.load(vectors, allow_pickle=False) as stored:
        given: dict[str, Any] = dict(stored)
    state = _run(ranker.user_program, given)
    logits = _run(ranker.rank_program, state | given)["logits"]
    return float(np.abs(logits - given["logits"]).max(initial=0.0))
