"""Checkpoints written while training goes on: a copy is taken at once, the steps do not wait."""

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

from etl.signature import signature_of
from etl.tables import atomic_io
from etl.tables.place import Place
from training.loop.checkpoint import MANIFEST, SIGNATURE, Manifest, Trained, sha256_of

STAGER = StagingOptions(False, False, False, False)  # copies on this thread


class UntyingPlanner(DefaultSavePlanner):
    """Gives each tensor memory of its own, also weights that are tied: safetensors asks for it."""

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)  # what all have is written once
        self._given: set[int] = set()

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor to write."""
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor)
        memory = data.untyped_storage().data_ptr()
        tied = memory in self._given
        self._given.add(memory)
        return data.clone() if tied else data


class TensorWriter(HuggingFaceStorageWriter):
    """Writes the tensors of each process to a safetensors file: nothing is pickled.

    `files` are the SHA-256 of all files by name, in the first process once they are written.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.files: dict[str, str] = {}
        local = folder if isinstance(folder, Path) else atomic_io.staging_folder(folder)
        atomic_io.make_folder(local)
        super().__init__(str(local), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, fsync and hash the file of this process; an object store gets it then."""
        names = [item.index.fqn for item in plan.items]
        others = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if others or len(set(names)) < len(names):
            raise TypeError(f"a checkpoint holds one tensor a name and process: {others or names}")
        written = super().write_data(plan, planner).wait()
        digests = {
            name: self._keep(name) for name in {r.storage_data.relative_path for r in written}
        }
        if not isinstance(self.folder, Path):
            shutil.rmtree(self.path)
        done: Future[list[WriteResult]] = Future()
        done.set_result([replace(result, storage_data=digests) for result in written])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Take the hashes of all processes."""
        self.files = {
            name: digest
            for of_process in results
            for result in of_process[:1]
            for name, digest in result.storage_data.items()
        }

    def _keep(self, name: str) -> str:
        file = Path(self.path, name)
        atomic_io.fsync(file)
        atomic_io.fsync(file.parent)
        digest = sha256_of(file)
        if not isinstance(self.folder, Path):
            self.folder.fs.put_file(str(file), (self.folder / name).path)
        return digest


@dataclass
class Writer:
    """One checkpoint at a time; it is in its place when `finish` or the next `begin` returns.

    Its collectives have a group of their own, as those of training go on meanwhile. The state goes
    to a folder of a new name, and the manifest that names it is put in place last: on a disk as on
    an object store there is either the checkpoint before or the new one.
    """

    _group: dist.ProcessGroup = field(default_factory=lambda: dist.new_group(backend="gloo"))
    _running: tuple[Place, Manifest, TensorWriter, Any] | None = None

    def begin(self, path: Place, trained: Trained) -> None:
        """Take a copy of all that the next step depends on, and begin to write it."""
        self.finish()
        stored = self._new_name()
        trained.asked.told_by_all()
        trained.replicas.settle()
        files = TensorWriter(path / stored)
        dist.barrier()
        writing = state_dict_saver.async_save(
            trained.state(),
            storage_writer=files,
            planner=UntyingPlanner(),
            process_group=self._group,
            async_stager=DefaultStager(STAGER),
        )
        manifest = trained.manifest.model_copy(update={"stored": stored})
        self._running = path, manifest, files, writing

    def finish(self) -> None:
        """Wait until what was begun is in its place."""
        if self._running is None:
            return
        path, manifest, files, writing = self._running
        self._running = None
        try:
            writing.result()
        except CheckpointException as error:  # which is no Exception
            cause, _ = next(iter(error.failures.values()))
            raise RuntimeError(f"a checkpoint could not be written: {cause}") from cause
        if dist.get_rank() == 0:
            _publish(path, manifest.model_copy(update={"files": files.files}))
        dist.barrier()

    def _new_name(self) -> str:
        names = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(names, src=0, group=self._group)
        return names[0]


def _publish(path: Place, manifest: Manifest) -> None:
    """Make a state that was written the checkpoint of a folder, and remove the one before."""
    text = manifest.model_dump_json(indent=1)
    signature = signature_of(text.encode())
    if signature:
        atomic_io.write_text(path / manifest.stored / SIGNATURE, signature)
    atomic_io.write_text(path / MANIFEST, text)
    for one in path.iterdir():
        if one.is_dir() and one.name != manifest.stored:
            atomic_io.remove_folder(one)
