"""Checkpoints of GEM: everything that the next step depends on, written whole or not at all."""

import hashlib
import shutil
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel
from torchrec.distributed import DistributedModelParallel

from etl.errors import UserError
from etl.spec.base import Strict
from etl.tables import whole
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.digest import digest
from training.loop.expiry import Asked
from training.loop.step import GemModel

MANIFEST = "gem.json"
REMEMBERED = 100  # batches of a day whose digests are kept


class Manifest(Strict):
    """What a checkpoint is: enough to rebuild the model, and to refuse a wrong use of it.

    `first_batches` are the digests of the first ones of the day, of the first process.
    """

    spec: str
    match: tuple[str, ...]
    events: tuple[str, ...]
    training: TrainConfig
    processes: int
    versions: dict[str, int]
    trained_from: date
    trained_until: date
    complete: bool
    batches: int
    steps: int
    first_batches: tuple[str, ...] = ()

    @property
    def fm_version(self) -> str:
        """The name under which this GEM's knowledge is kept."""
        settings = hashlib.sha256(self.training.model_dump_json().encode()).hexdigest()[:6]
        return f"{self.trained_from:%Y%m%d}-{self.trained_until:%Y%m%d}-{settings}"

    def next_batch(self, batch: Batch) -> "Manifest":
        """The manifest after one more batch of the day."""
        counts: dict[str, object] = {"batches": self.batches + 1, "steps": self.steps + 1}
        if self.batches < REMEMBERED:
            counts["first_batches"] = (*self.first_batches, digest(batch))
        return self.model_copy(update=counts)

    def next_day(self, day: date) -> "Manifest":
        """The manifest of the same model before its first batch of a day."""
        changed = {"trained_until": day, "complete": False, "batches": 0, "first_batches": ()}
        return self.model_copy(update=changed)

    def same_run(self, other: "Manifest") -> bool:
        """Whether both are moments of one training run."""
        moment = {"trained_until", "complete", "batches", "steps", "first_batches"}
        return self.model_dump(exclude=moment) == other.model_dump(exclude=moment)


def folder(lake: str, day: date, complete: bool = True) -> Path:
    """Where the GEM that was trained until a day lies, or one in the middle of that day."""
    name = f"{day}" if complete else f"{day}.partial"
    return Path(lake, "models", "gem", name)


def read_manifest(path: Path, spec: str) -> Manifest | None:
    """The manifest of a checkpoint, None where there is none; UserError if of another spec."""
    file = path / MANIFEST
    if not file.is_file():
        return None
    manifest = Manifest.model_validate_json(file.read_text())
    if manifest.spec != spec:
        raise UserError(
            f"{path} was trained under spec {manifest.spec}, now it is {spec}: use another --lake"
        )
    return manifest


@dataclass
class Trained:
    """A model with what updates it, and how far it has come."""

    model: GemModel
    averaged: AveragedModel
    tables: DistributedModelParallel
    asked: Asked
    optimizer: torch.optim.Optimizer
    manifest: Manifest

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "dense": get_model_state_dict(self.model.core),
            "averaged": self.averaged.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model.core, self.optimizer),
            "tables": self.tables.state_dict(),
            "tables_optimizer": self.tables.fused_optimizer.state_dict(),
            "asked": self.asked.days,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Put a state back."""
        set_model_state_dict(self.model.core, state["dense"])
        self.averaged.load_state_dict(state["averaged"])
        set_optimizer_state_dict(self.model.core, self.optimizer, state["optimizer"])
        self.tables.load_state_dict(state["tables"])
        self.tables.fused_optimizer.load_state_dict(state["tables_optimizer"])
        self.asked.days = state["asked"]


def save(path: Path, trained: Trained) -> None:
    """Write a checkpoint beside its place, then move it there."""
    beside = whole.beside(path)
    if dist.get_rank() == 0:
        whole.fresh(path)
    trained.asked.told_by_all()
    dist.barrier()
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # of what all processes have
    state_dict_saver.save(trained.state(), checkpoint_id=str(beside), planner=planner)
    if dist.get_rank() == 0:
        (beside / MANIFEST).write_text(trained.manifest.model_dump_json(indent=1))
        whole.put(path)
    dist.barrier()


def load(path: Path, trained: Trained) -> None:
    """Restore a checkpoint into a model of its sizes, to train on.

    The optimizer has no state for what never had a gradient, such as a history that is not read.
    """
    state = trained.state()
    optimizer = {"optimizer": state.pop("optimizer")}
    state_dict_loader.load(state, checkpoint_id=str(path))
    planner = DefaultLoadPlanner(allow_partial_load=True)
    state_dict_loader.load(optimizer, checkpoint_id=str(path), planner=planner)
    trained.restore(state | optimizer)


def load_weights(path: Path, trained: Trained) -> None:
    """Restore what scores: the averaged weights, as those of the model, and the tables."""
    state: dict[str, Any] = {
        "averaged": trained.averaged.state_dict(),
        "tables": trained.tables.state_dict(),
    }
    state_dict_loader.load(state, checkpoint_id=str(path))
    trained.averaged.load_state_dict(state["averaged"])
    trained.tables.load_state_dict(state["tables"])
    trained.model.core.load_state_dict(trained.averaged.module.state_dict())


def written(lake: str, spec: str) -> list[tuple[Path, Manifest]]:
    """All checkpoints and their manifests, the least trained first."""
    paths = Path(lake, "models", "gem").glob("[0-9]*")
    found = [(path, manifest) for path in paths if (manifest := read_manifest(path, spec))]
    return sorted(found, key=lambda pair: (pair[1].trained_until, pair[1].complete))


def forget(lake: str) -> None:
    """Remove every checkpoint, so that the next training starts from nothing."""
    shutil.rmtree(Path(lake, "models", "gem"), ignore_errors=True)
