"""Checkpoints written beside training: a copy is taken at once, and written while steps go on."""

import uuid
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from etl.tables import atomic_io
from etl.tables.place import Place
from training.loop.checkpoint import MANIFEST, Manifest, Trained


@dataclass
class Writer:
    """One checkpoint at a time; it is in its place when `finish` or the next `begin` returns.

    Its collectives have a group of their own, as those of training go on meanwhile. The state goes
    to a folder of a new name, and the manifest that names it is put in place last: on a disk as on
    an object store there is either the checkpoint before or the new one.
    """

    _group: dist.ProcessGroup = field(default_factory=lambda: dist.new_group(backend="gloo"))
    _running: tuple[Place, Manifest, Any] | None = None

    def begin(self, path: Place, trained: Trained) -> None:
        """Take a copy of all that the next step depends on, and begin to write it."""
        self.finish()
        stored = self._new_name()
        trained.asked.told_by_all()
        trained.replicas.settle()
        dist.barrier()
        writing = state_dict_saver.async_save(
            trained.state(),
            checkpoint_id=str(path / stored),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),  # of what all have
            process_group=self._group,
        )
        manifest = trained.manifest.model_copy(update={"stored": stored})
        self._running = path, manifest, writing

    def finish(self) -> None:
        """Wait until what was begun is in its place."""
        if self._running is None:
            return
        path, manifest, writing = self._running
        self._running = None
        try:
            writing.result()
        except CheckpointException as error:  # which is no Exception
            cause, _ = next(iter(error.failures.values()))
            raise RuntimeError(f"a checkpoint could not be written: {cause}") from cause
        if dist.get_rank() == 0:
            atomic_io.write_text(path / MANIFEST, manifest.model_dump_json(indent=1))
            _keep_only(path, manifest.stored)
        dist.barrier()

    def _new_name(self) -> str:
        names = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(names, src=0, group=self._group)
        return names[0]


def _keep_only(path: Place, stored: str) -> None:
    """Remove states that no manifest names."""
    for one in path.iterdir():
        if one.is_dir() and one.name != stored:
            atomic_io.remove_folder(one)
