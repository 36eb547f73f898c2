"""A ranker: a surface's student and its calibration in one folder, and the ranking of candidates.

The folder holds weights and a manifest, and loads without the configuration it was trained with.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.model import DataSpec
from etl.tables import whole
from etl.tables.lake import Lake
from ranking.auction import Ranked, expected_value, order
from ranking.calibration import Platt, apply
from ranking.student.model import Student, StudentConfig
from ranking.student.train import TrainedStudent
from training.data.batch import Batch
from training.data.features import features_of
from training.data.reader import Reader
from training.model.lookup import table_rows
from training.model.plain import PlainTables

WEIGHTS, MANIFEST = "weights.safetensors", "ranker.json"


class RankerManifest(Strict):
    """What a ranker is: the whole data spec included, so that it stands alone."""

    surface: str
    version: str
    spec: DataSpec
    model: StudentConfig
    sequence: str
    items: int
    calibration: dict[str, Platt]
    weights_sha256: str


@dataclass(frozen=True)
class Ranker:
    """Scores and ranks the candidates of its surface."""

    manifest: RankerManifest
    student: TrainedStudent

    @property
    def objectives(self) -> tuple[str, ...]:
        """Objectives, in the order of the columns of `probabilities`."""
        return tuple(self.manifest.spec.objectives)

    def reader(self, lake: Lake) -> Reader:
        """A reader of what this ranker reads: the candidates of its surface, request by request.

        Raises UserError where the lake's tables are of another spec.
        """
        manifest = self.manifest
        if manifest.spec.hash != lake.spec.hash:
            raise UserError(
                f"the ranker of {manifest.surface} was trained under spec {manifest.spec.hash}, "
                f"now it is {lake.spec.hash}: train it again"
            )
        own = Lake(lake.root, manifest.spec)
        return Reader.newest(own, manifest.sequence, manifest.model.max_length, manifest.surface)

    def probabilities(self, batch: Batch) -> npt.NDArray[np.float64]:
        """Calibrated probabilities (B, O)."""
        with torch.no_grad():
            raw = torch.sigmoid(self.student(batch).serving).double().numpy()
        return apply(self.manifest.calibration, raw, self.objectives)

    def rank(self, batch: Batch, bids: list[float], goals: list[str | None]) -> list[Ranked]:
        """The candidates of one request, best first by expected value: bid x probability.

        `bids` and `goals` belong to the rows of the batch; see `ranking.auction`.
        """
        p = self.probabilities(batch)
        values = expected_value(self.manifest.spec, self.manifest.surface, p, bids, goals)
        return order(batch.impressions, p, values)


def save(
    folder: Path, spec: DataSpec, surface: str, version: str, sequence: str,
    config: StudentConfig, student: TrainedStudent, calibration: dict[str, Platt],
) -> RankerManifest:  # fmt: skip
    """Write a ranker's folder, whole or not at all."""
    beside = whole.fresh(folder)
    weights = {f"student.{k}": v for k, v in student.student.state_dict().items()}
    weights |= {f"tables.{k}": v for k, v in student.tables.state_dict().items()}
    weights.pop("student.candidate.weight")  # tied to the events' item projection
    save_file({k: v.contiguous() for k, v in weights.items()}, beside / WEIGHTS)
    manifest = RankerManifest(
        surface=surface,
        version=version,
        spec=spec,
        model=config,
        sequence=sequence,
        items=student.items,
        calibration=calibration,
        weights_sha256=_sha256(beside / WEIGHTS),
    )
    (beside / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    whole.put(folder)
    return manifest


def load(folder: Path) -> Ranker:
    """The ranker of a folder; raises UserError where it is missing, damaged or tampered with."""
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} holds no ranker; run `gemline rank train` first")
    try:
        manifest = RankerManifest.model_validate_json((folder / MANIFEST).read_text())
    except ValidationError:
        raise UserError(f"{folder / MANIFEST} is damaged; save the ranker again") from None
    if not (folder / WEIGHTS).is_file() or _sha256(folder / WEIGHTS) != manifest.weights_sha256:
        raise UserError(f"{folder}/{WEIGHTS} is not the file that was saved; save the ranker again")
    features = features_of(manifest.spec)
    model = Student(features, manifest.model)
    tables = PlainTables(table_rows(features, manifest.items), manifest.model.row_width)
    weights = load_file(folder / WEIGHTS)
    weights["student.candidate.weight"] = weights["student.events.item.weight"]
    for prefix, module in (("student.", model), ("tables.", tables)):
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        module.load_state_dict(own)
    model.eval()
    return Ranker(manifest, TrainedStudent(model, tables, manifest.items))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ranker_folder(lake: str, surface: str) -> Path:
    """Where the ranker of a surface lies."""
    return Path(lake, "rankers", surface)
