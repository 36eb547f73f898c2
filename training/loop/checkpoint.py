"""Checkpoints of GEM: everything that the next step depends on, complete or not there.

A checkpoint is a folder with a manifest; the manifest names a folder of safetensors files, one of
each process, with the SHA-256 of each. Nothing in it is pickled, and files are hashed before they
are opened.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel
from torchrec.distributed import DistributedModelParallel

from etl.errors import UserError
from etl.signature import SignatureError, check_signature
from etl.spec.base import Strict
from etl.tables import atomic_io
from etl.tables.lake import Lake
from etl.tables.place import Place, listed, place, text_of
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.digest import digest
from training.loop.expiry import Asked
from training.loop.step import GemModel
from training.parallel.replicas import Replicas

MANIFEST, SIGNATURE = "gem.json", "gem.json.sig"
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]+\.safetensors$")]
log = logging.getLogger(__name__)
REMEMBERED = 100  # batches of a day whose digests are kept


class DamagedCheckpointError(UserError):
    """A checkpoint cannot be used: damaged, changed since it was written, or not signed."""


class Manifest(Strict):
    """What a checkpoint is: enough to rebuild the model, and to refuse a wrong use of it.

    `processes` began the day; `taken` are batches learned from the lane of each, `batches` steps of
    the day, `steps` and `rows` all that were ever learned from. `first_batches` are the digests of
    the first ones of the day, of the first process. `stored` is the folder next to it that holds
    the state, `files` are the SHA-256 of its files.
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
    rows: int = 0
    taken: tuple[int, ...] = ()
    first_batches: tuple[str, ...] = ()
    stored: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""
    files: dict[FileName, Digest] = {}

    @property
    def fm_version(self) -> str:
        """The name under which this GEM's knowledge is kept."""
        settings = hashlib.sha256(self.training.model_dump_json().encode()).hexdigest()[:6]
        return f"{self.trained_from:%Y%m%d}-{self.trained_until:%Y%m%d}-{settings}"

    def next_batch(self, batch: Batch, rows: int) -> "Manifest":
        """The manifest after one more step of the day, on so many rows of all processes."""
        counts: dict[str, object] = {"batches": self.batches + 1, "steps": self.steps + 1}
        counts["rows"] = self.rows + rows
        if self.batches < REMEMBERED:
            counts["first_batches"] = (*self.first_batches, digest(batch))
        return self.model_copy(update=counts)

    def next_day(self, day: date, processes: int) -> "Manifest":
        """The manifest of the same model before its first batch of a day."""
        changed = {"trained_until": day, "complete": False, "processes": processes}
        begun = {"batches": 0, "taken": (), "first_batches": ()}
        return self.model_copy(update=changed | begun)

    def same_run(self, other: "Manifest") -> bool:
        """Whether both are moments of one training run."""
        moment = {"trained_until", "complete", "batches", "steps", "rows", "taken"}
        moment |= {"first_batches", "processes", "stored", "files"}
        return self.model_dump(exclude=moment) == other.model_dump(exclude=moment)


def folder(lake: str, day: date, complete: bool = True) -> Place:
    """Where the GEM that was trained until a day lies, or one in the middle of that day."""
    name = f"{day}" if complete else f"{day}.partial"
    return place(lake, "models", "gem", name)


def read_manifest(path: Place, spec: str) -> Manifest | None:
    """The manifest of a checkpoint, None where there is none.

    Raises DamagedCheckpointError where it cannot be read or is not signed as it has to be,
    UserError where it is of another spec.
    """
    text = text_of(path / MANIFEST)
    if text is None:
        return None
    try:
        manifest = Manifest.model_validate_json(text)
        signature = text_of(path / manifest.stored / SIGNATURE)
        check_signature(text.encode(), signature, path / MANIFEST)
    except ValidationError:
        raise _damaged(path, f"{path / MANIFEST} cannot be read") from None
    except SignatureError as error:
        raise _damaged(path, str(error)) from None
    if manifest.spec != spec:
        raise UserError(
            f"{path} was trained under spec {manifest.spec}, now it is {spec}: use another --lake"
        )
    return manifest


def _damaged(path: Place, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{reason}: remove {path} and train again, which goes on from the checkpoint before"
    )


@dataclass
class Trained:
    """A model with what updates it, and how far it has come."""

    model: GemModel
    averaged: AveragedModel
    tables: DistributedModelParallel
    replicas: Replicas
    asked: Asked
    optimizer: torch.optim.Optimizer
    manifest: Manifest

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, all of it tensors."""
        return {
            "dense": get_model_state_dict(self.model.core),
            "averaged": self.averaged.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model.core, self.optimizer)["state"],
            "tables": self.tables.state_dict(),
            "tables_optimizer": self.tables.fused_optimizer.state_dict()["state"],
            "asked": self.asked.days,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Put a state back; rates and other settings of the optimizers stay as they are."""
        core, fused = self.model.core, self.tables.fused_optimizer
        set_model_state_dict(core, state["dense"])
        self.averaged.load_state_dict(state["averaged"])
        settings = get_optimizer_state_dict(core, self.optimizer)
        dense = {**settings, "state": state["optimizer"]}
        set_optimizer_state_dict(core, self.optimizer, dense)
        self.tables.load_state_dict(state["tables"])
        fused.load_state_dict({**fused.state_dict(), "state": state["tables_optimizer"]})
        self.asked.days = state["asked"]


def load(path: Place, trained: Trained) -> None:
    """Restore a checkpoint into a model of its sizes, to train on.

    The optimizer has no state for what never had a gradient, such as a history that is not read.
    Raises DamagedCheckpointError where a file is not the one that was saved.
    """
    folder = _verified(path, trained.manifest.spec)
    state = trained.state()
    optimizer = {"optimizer": state.pop("optimizer")}
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    state_dict_loader.load(
        optimizer,
        storage_reader=HuggingFaceStorageReader(str(folder)),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    trained.restore(state | optimizer)


def load_weights(path: Place, trained: Trained) -> None:
    """Restore what scores: the averaged weights, as those of the model, and the tables.

    Raises DamagedCheckpointError where a file is not the one that was saved.
    """
    folder = _verified(path, trained.manifest.spec)
    state: dict[str, Any] = {
        "averaged": trained.averaged.state_dict(),
        "tables": trained.tables.state_dict(),
    }
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    trained.averaged.load_state_dict(state["averaged"])
    trained.tables.load_state_dict(state["tables"])
    trained.model.core.load_state_dict(trained.averaged.module.state_dict())


def _verified(path: Place, spec: str) -> Path:
    """The folder on this machine with the state of a checkpoint, its files as they were saved.

    Raises DamagedCheckpointError where a file is missing, changed or not among those saved.
    """
    manifest = read_manifest(path, spec)
    if manifest is None:
        raise _damaged(path, f"{path} holds no checkpoint")
    folder = atomic_io.local_path(path / manifest.stored)
    found = {file.name for file in folder.glob("*") if file.name != SIGNATURE}
    for name in sorted(found | set(manifest.files)):
        digest = manifest.files.get(name)
        if name not in found or digest is None or sha256_of(folder / name) != digest:
            raise _damaged(path, f"{folder / name} is not a file that was saved")
    return folder


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's bytes, as hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def written(lake: str, spec: str) -> list[tuple[Place, Manifest]]:
    """All checkpoints and their manifests, the least trained first; the log names damaged ones."""
    paths = listed(place(lake, "models", "gem"), "[0-9]*")
    found = _readable(paths, spec)
    return sorted(found, key=lambda pair: (pair[1].trained_until, pair[1].complete))


def _readable(paths: list[Place], spec: str) -> Iterator[tuple[Place, Manifest]]:
    for path in paths:
        try:
            manifest = read_manifest(path, spec)
        except DamagedCheckpointError as error:
            log.warning("left out: %s", error)
            continue
        if manifest:
            yield path, manifest


def written_until(lake: Lake, day: date) -> bool:
    """Whether there is the GEM that was trained until a day."""
    return read_manifest(folder(lake.root, day), lake.spec.hash) is not None


def forget(lake: str) -> None:
    """Remove every checkpoint, so that the next training starts from nothing."""
    atomic_io.remove_folder(place(lake, "models", "gem"))


def forget_old(lake: str, spec: str, keep_days: int) -> list[date]:
    """Remove the GEMs that are older than the newest by more than some days; returns their days."""
    made = written(lake, spec)
    if not made:
        return []
    oldest = made[-1][1].trained_until - timedelta(days=keep_days)
    gone = [(path, found.trained_until) for path, found in made if found.trained_until < oldest]
    for path, _ in gone:
        atomic_io.remove_folder(path)
    return [day for _, day in gone]
