"""A ranker: two programs, tables and a calibration, answering without torch.

R requests, C candidates, O objectives.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load as from_bytes

from etl.errors import UserError
from etl.tables.place import Place
from features.inputs import Features, features_of
from ranking import calibration
from ranking.auction import Auction, Ranked, ranked
from ranking.inputs import Candidates, Ids, LookUp, Requests
from ranking.package.manifest import (
    RANK,
    TABLES,
    USER,
    VECTORS,
    Package,
    RankerManifest,
    read_package,
)
from ranking.package.program import Arrays, OnnxProgram, Program

Floats = npt.NDArray[np.float64]
CLOSE = 1e-4  # of logits: what another machine's arithmetic may differ by


@dataclass(frozen=True)
class Ranker:
    """Scores the candidates of its surface."""

    manifest: RankerManifest
    user_program: Program
    rank_program: Program
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
        return self.user_program(self._look_up().user(requests)._asdict())

    def probabilities(self, state: Arrays, candidates: Candidates) -> Floats:
        """Calibrated probabilities (R, C, O)."""
        inputs = self._look_up().candidates(candidates)._asdict()
        asked = {f"own_{name}": value for name, value in inputs.items()}
        logits = self.rank_program(state | asked)["logits"].astype(np.float64)
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


def load(there: Place, threads: int = 1) -> Ranker:
    """The ranker of a folder, which scores its own test vectors as it did when it was made.

    Raises UserError where it is missing, damaged, tampered with, or does not.
    """
    return loaded(read_package(there), there, threads)


def loaded(package: Package, there: Place, threads: int = 1) -> Ranker:
    """The ranker of a package that was read from a folder, by its ONNX programs.

    Raises UserError where they cannot be loaded, or do not give its test vectors.
    """
    manifest, files = package
    try:
        user, rank = (OnnxProgram(files[name], threads) for name in (USER, RANK))
        ranker = Ranker(manifest, user, rank, from_bytes(files[TABLES]))
    except Exception as error:  # of ONNX Runtime or safetensors, each of classes of its own
        reason = str(error).splitlines()[0]
        raise UserError(f"the ranker in {there} cannot be loaded ({reason})") from error
    return checked(ranker, package, there)


def checked(ranker: Ranker, package: Package, there: Place) -> Ranker:
    """The ranker; raises UserError where it does not give the test vectors of its package."""
    worst = apart(ranker, package.files[VECTORS])
    if not worst < CLOSE:
        raise UserError(
            f"the ranker in {there} is off by {worst:.1g} on its own test vectors; export it again"
        )
    return ranker


def apart(ranker: Ranker, vectors: bytes) -> float:
    """The largest difference between its logits and those kept as test vectors."""
    with np.load(io.BytesIO(vectors), allow_pickle=False) as stored:
        given: dict[str, Any] = dict(stored)
    state = ranker.user_program(given)
    logits = ranker.rank_program(state | given)["logits"]
    return float(np.abs(logits - given["logits"]).max(initial=0.0))
