"""Checkpoints written beside training: a copy is taken at once, and written while steps go on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from etl.tables import whole
from training.loop.checkpoint import MANIFEST, Manifest, Trained


@dataclass
class Writer:
    """One checkpoint at a time; it is in its place when `finish` or the next `begin` returns.

    Its collectives have a group of their own, as those of training go on meanwhile.
    """

    _group: dist.ProcessGroup = field(default_factory=lambda: dist.new_group(backend="gloo"))
    _running: tuple[Path, Manifest, Any] | None = None

    def begin(self, path: Path, trained: Trained) -> None:
        """Take a copy of all that the next step depends on, and begin to write it."""
        self.finish()
        if dist.get_rank() == 0:
            whole.fresh(path)
        trained.asked.told_by_all()
        trained.replicas.settle()
        dist.barrier()
        writing = state_dict_saver.async_save(
            trained.state(),
            checkpoint_id=str(whole.beside(path)),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),  # of what all have
            process_group=self._group,
        )
        self._running = path, trained.manifest, writing

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
            (whole.beside(path) / MANIFEST).write_text(manifest.model_dump_json(indent=1))
            whole.put(path)
        dist.barrier()
