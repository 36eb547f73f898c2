"""Asynchronous checkpoints: the state is copied at once and written while training continues."""

import shutil
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from etl.signature import sign
from etl.tables import atomic_io
from etl.tables.uri import StoragePath
from training.trainer.checkpoint import MANIFEST, SIGNATURE, sha256_of
from training.trainer.state import Manifest, TrainState

# Copies on this thread, before the next step changes the tensors.
STAGING_OPTIONS = StagingOptions(False, False, False, False)


class UntiedSavePlanner(DefaultSavePlanner):
    """Writes tied weights as copies, because safetensors tensors must not share memory."""

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)  # replicated tensors are written once
        self._seen_storages: set[int] = set()

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor to write."""
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor)
        storage = data.untyped_storage().data_ptr()
        is_tied = storage in self._seen_storages
        self._seen_storages.add(storage)
        return data.clone() if is_tied else data


class SafetensorsWriter(HuggingFaceStorageWriter):
    """Writes the tensors of each process to one safetensors file; nothing is pickled.

    `file_hashes` are the SHA-256 of all files by name, on the first process once they are written.
    """

    def __init__(self, folder: StoragePath) -> None:
        self.folder = folder
        self.file_hashes: dict[str, str] = {}
        local = folder if isinstance(folder, Path) else atomic_io.staging_folder(folder)
        atomic_io.make_folder(local)
        super().__init__(str(local), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, fsync and hash the file of this process, and upload it to an object store."""
        names = [item.index.fqn for item in plan.items]
        not_tensors = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if not_tensors or len(set(names)) < len(names):
            raise TypeError(f"not one tensor per name and process: {not_tensors or names}")
        written = super().write_data(plan, planner).wait()
        files = {result.storage_data.relative_path for result in written}
        digests = {name: self._sync_and_hash(name) for name in files}
        if not isinstance(self.folder, Path):
            shutil.rmtree(self.path)
        done: Future[list[WriteResult]] = Future()
        done.set_result([replace(result, storage_data=digests) for result in written])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """Collect the hashes of all processes; the result of a process covers all of its files."""
        for process_results in results:
            for result in process_results[:1]:
                self.file_hashes |= result.storage_data

    def _sync_and_hash(self, name: str) -> str:
        file = Path(self.path, name)
        atomic_io.fsync(file)
        atomic_io.fsync(file.parent)
        digest = sha256_of(file)
        if not isinstance(self.folder, Path):
            self.folder.fs.put_file(str(file), (self.folder / name).path)
        return digest


@dataclass
class AsyncCheckpointer:
    """Writes one checkpoint at a time; it is complete when `wait` or the next `save` returns.

    Collectives use a separate process group, because training continues meanwhile. The state is
    written to a folder with a new name, and the manifest that refers to it is written last: both on
    a disk and on an object store, either the previous checkpoint or the new one exists.
    """

    _group: dist.ProcessGroup = field(default_factory=lambda: dist.new_group(backend="gloo"))
    _in_progress: tuple[StoragePath, Manifest, SafetensorsWriter, Any] | None = None

    def save(self, path: StoragePath, train_state: TrainState) -> None:
        """Copy all state that the next step depends on, and start writing it; a collective call.

        The manifest of the state names the folder that is written.
        """
        self.wait()
        state_dir = self._new_state_dir()
        train_state.all_reduce_counts()
        train_state.replicas.synchronize()
        writer = SafetensorsWriter(path / state_dir)
        dist.barrier()
        future = state_dict_saver.async_save(
            train_state.state_dict(),
            storage_writer=writer,
            planner=UntiedSavePlanner(),
            process_group=self._group,
            async_stager=DefaultStager(STAGING_OPTIONS),
        )
        train_state.manifest = train_state.manifest.model_copy(update={"state_dir": state_dir})
        self._in_progress = path, train_state.manifest, writer, future

    def wait(self) -> None:
        """Wait until the checkpoint in progress, if any, is complete; a collective call."""
        if self._in_progress is None:
            return
        path, manifest, writer, future = self._in_progress
        self._in_progress = None
        try:
            future.result()
        except CheckpointException as error:  # a BaseException
            cause, _ = next(iter(error.failures.values()))
            raise RuntimeError(f"a checkpoint could not be written: {cause}") from cause
        if dist.get_rank() == 0:
            _publish(path, manifest.model_copy(update={"file_hashes": writer.file_hashes}))
        dist.barrier()

    def _new_state_dir(self) -> str:
        names = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(names, src=0, group=self._group)
        return names[0]


def _publish(path: StoragePath, manifest: Manifest) -> None:
    """Make a written state the checkpoint of a folder, and remove the previous one."""
    text = manifest.model_dump_json(indent=1)
    signature = sign(text.encode())
    if signature:
        atomic_io.write_text(path / manifest.state_dir / SIGNATURE, signature)
    atomic_io.write_text(path / MANIFEST, text)
    for child in path.iterdir():
        if child.is_dir() and child.name != manifest.state_dir:
            atomic_io.remove_folder(child)
