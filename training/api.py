"""The Python API: examples as a PyTorch dataset, and the trained GEM as a model that predicts."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.utils.data import get_worker_info

from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.units import date_range
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from features.schema import USER_TABLE
from training.data.batch import Batch, Shuffle
from training.data.label_window import FINAL_LABELS, LabelWindow
from training.data.reader import ExampleReader
from training.data.shards import Epoch, ShardDataset
from training.model.embeddings import ItemRowMap, TorchEmbeddingTables, table_sizes
from training.model.gem import Gem
from training.trainer.average import EmaModel
from training.trainer.checkpoint import list_checkpoints, verified_state_dir
from training.trainer.compute import apply_compute_config
from training.trainer.resume import check_same_inputs
from training.trainer.state import Manifest, latest_reader
from training.trainer.step import GemModel

Day = str | date


class ExampleDataset(ShardDataset):
    """The examples of some days, as the batches that GEM is trained on.

    Items are complete batches: iterate over the dataset, or use
    `DataLoader(dataset, batch_size=None)`. Each worker reads its own buckets of users, and every
    batch is yielded once; pass `multiprocessing_context="spawn"`, because the table readers use
    threads that do not survive a fork. The dataset is pinned to the latest table versions at its
    creation, so every pass yields the same batches.
    """

    def __init__(
        self,
        lake: str | Path,
        spec: str | Path | DataSpec,
        days: tuple[Day, Day],
        *,
        batch_rows: int = 128,
        sequence: str | None = None,
        max_length: int | None = None,
        surfaces: tuple[str, ...] = (),
        label_window: LabelWindow = FINAL_LABELS,
        seed: int | None = None,
    ) -> None:
        """Open the tables; histories and examples are read while iterating.

        Args:
            lake: Folder or object-store URL of the tables.
            spec: The data spec, or its YAML file.
            days: First and last day, inclusive; strings are ISO dates.
            batch_rows: Impressions per batch, approximately: requests are not split.
            sequence: The spec's sequence to read histories of; optional if the spec has only one.
            max_length: Events per history, by default the sequence's; 0 reads no history.
            surfaces: Surfaces whose impressions are read; by default all.
            label_window: Labels to use, by default all that are final: those that are not null in
                the table. Impressions without one of them are skipped.
            seed: Seed of the order of batches; None for the order in which they are stored.

        Raises:
            UserError: A table or examples of a day are missing, or the spec has no such sequence.
        """
        tables = _open_lake(lake, spec)
        first, last = (_parse_day(day) for day in days)
        reader = ExampleReader.latest(tables, sequence, max_length, surfaces)
        reader.require_days(first, last)
        epoch = Epoch(list(date_range(first, last)), label_window, batch_rows, Shuffle(seed))
        super().__init__(reader, epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches; in a DataLoader worker, those of the worker's shard."""
        worker = get_worker_info()
        epoch = self.epoch.split(worker.num_workers)[worker.id] if worker else self.epoch
        return epoch.batches(self.open_reader())


@dataclass(frozen=True)
class TrainedGem:
    """A trained GEM, in eval mode, on the CPU of this process."""

    lake: Lake
    manifest: Manifest
    model: GemModel

    @property
    def objectives(self) -> tuple[str, ...]:
        """The predicted objectives, in the order of the logits."""
        return tuple(self.lake.spec.objectives)

    @torch.no_grad()
    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The probability of each objective for every impression (B) of a batch.

        Objectives that a surface does not have are also predicted, but are not trained there.
        """
        probabilities = torch.sigmoid(self.model(batch).logits)
        return dict(zip(self.objectives, probabilities.unbind(1), strict=True))

    def dataset(self, days: tuple[Day, Day], batch_rows: int = 2048) -> ExampleDataset:
        """The examples of some days, with the histories that this GEM reads."""
        config = self.manifest.training
        return ExampleDataset(
            self.lake.root,
            self.lake.spec,
            days,
            batch_rows=batch_rows,
            sequence=config.sequence,
            max_length=config.max_length,
            surfaces=config.surfaces,
        )


def load_gem(
    lake: str | Path, spec: str | Path | DataSpec, trained_until: Day | None = None
) -> TrainedGem:
    """Load the latest trained GEM of a lake, or the GEM trained until a given day.

    Works without a process group, for any number of training processes. Items first seen
    after its last day of training share the embedding of the unknown item.

    Args:
        lake: Folder or object-store URL of the tables.
        spec: The data spec, or its YAML file.
        trained_until: The last day of training; strings are ISO dates.

    Raises:
        UserError: The GEM does not exist, or the spec now defines other inputs.
        DamagedCheckpointError: A file of the checkpoint was changed.
    """
    tables = _open_lake(lake, spec)
    day = None if trained_until is None else _parse_day(trained_until)
    complete = [
        (path, manifest)
        for path, manifest in list_checkpoints(tables.root, tables.spec.hash)
        if manifest.complete and day in (None, manifest.trained_until)
    ]
    if not complete:
        until = f" until {day}" if day else ""
        raise UserError(f"no GEM was trained{until} in {tables.root}; run `gemline train gem`")
    path, manifest = complete[-1]
    reader = latest_reader(tables, manifest.training)
    check_same_inputs(manifest, reader)
    return TrainedGem(tables, manifest, _load_model(path, manifest))


def _load_model(path: StoragePath, manifest: Manifest) -> GemModel:
    """The averaged weights and the tables of a checkpoint, in plain torch modules."""
    config, sizes = manifest.training, manifest.training.gem_config
    core = Gem(manifest.features, sizes, manifest.layout or None)
    rows = table_sizes(manifest.features, config.item_table_rows, sizes.user_hash_buckets)
    tables = TorchEmbeddingTables(rows, sizes.embedding_dim, (USER_TABLE,))
    ema = EmaModel(core)
    state = {
        "ema": ema.state_dict(),
        "tables": {
            f"collection.embeddings.{name.removeprefix('tables.')}": weight.detach()
            for name, weight in tables.named_parameters()
        },
        "item_rows": {"row_items": torch.empty(config.item_table_rows, dtype=torch.int64)},
    }
    folder = verified_state_dir(path, manifest.spec_hash)
    files = HuggingFaceStorageReader(str(folder))
    state_dict_loader.load(state, storage_reader=files, no_dist=True)  # tensors are filled in place
    ema.load_state_dict(state["ema"])
    core.load_state_dict(ema.module.state_dict())
    apply_compute_config(core, config.compute, manifest.precision_map)
    core.eval()
    item_rows = ItemRowMap(state["item_rows"]["row_items"])
    return GemModel(core, core, tables, item_rows, sizes.user_hash_buckets)


def _open_lake(lake: str | Path, spec: str | Path | DataSpec) -> Lake:
    return Lake(str(lake), spec if isinstance(spec, DataSpec) else load_spec(Path(spec)))


def _parse_day(day: Day) -> date:
    if isinstance(day, date):
        return day
    try:
        return date.fromisoformat(day)
    except ValueError:
        raise UserError(f"{day!r} is not a day; write it as 2026-01-08") from None
