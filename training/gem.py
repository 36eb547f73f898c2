"""Training GEM day by day: resume from the day before, learn what ripened since, checkpoint."""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from tqdm import tqdm

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.units import each_day
from etl.tables.lake import Lake
from training.data.batch import Batch
from training.data.chunks import Ripened
from training.data.features import Features
from training.data.reader import Reader, Shuffle
from training.loop import checkpoint
from training.loop.checkpoint import Manifest
from training.loop.prequential import Prequential
from training.loop.step import GemModel, train_step
from training.model.config import SCALES, GemConfig, Scale
from training.model.gem import Gem
from training.model.lookup import table_rows
from training.parallel.processes import in_step
from training.parallel.sparse import TorchrecTables, shard

log = logging.getLogger(__name__)


class TrainConfig(Strict):
    """How GEM is trained."""

    scale: Scale = "small"
    batch_rows: int = 128
    dense_rate: float = 1e-3
    sparse_rate: float = 0.05
    weight_decay: float = 0.01
    warmup_steps: int = 50
    sequence: str = "behaviour"
    max_length: int | None = None
    checkpoint_every: int = 200
    seed: int = 0

    @property
    def model(self) -> GemConfig:
        """The sizes that the scale stands for."""
        return SCALES[self.scale]


@dataclass
class Trained:
    """A model with what updates it, and how far it has come."""

    model: GemModel
    tables: DistributedModelParallel
    optimizer: torch.optim.Optimizer
    manifest: Manifest


def build(features: Features, manifest: Manifest, config: TrainConfig) -> Trained:
    """A fresh model of a manifest's sizes, spread over the processes of the group."""
    torch.manual_seed(manifest.seed)
    core = Gem(features, manifest.config)
    rows = table_rows(features, manifest.items)
    tables = shard(TorchrecTables(rows, manifest.config.row_width), config.sparse_rate)
    dense = DistributedDataParallel(core) if dist.get_world_size() > 1 else core
    model = GemModel(core, dense, tables, manifest.items, manifest.config.item_dropout)
    optimizer = torch.optim.AdamW(
        core.parameters(), lr=config.dense_rate, weight_decay=config.weight_decay, fused=True
    )
    return Trained(model, tables, optimizer, manifest)


def train(lake: Lake, days: tuple[date, date], config: TrainConfig) -> list[dict[str, float]]:
    """Train through the given days, each after the other; returns each day's prequential scores.

    Continues from the checkpoint of the day before the first, if there is one, and from the
    middle of a day where an earlier call was killed there.
    """
    reader = Reader.newest(lake, config.sequence, config.max_length)
    trained = resume(lake, reader, days[0], config)
    scores = []
    for day in each_day(trained.manifest.trained_until, days[1]):
        scores.append(train_day(lake, reader, trained, day, config))
        tomorrow = day + timedelta(days=1)
        changed = {"trained_until": tomorrow, "complete": False, "batches": 0}
        trained.manifest = trained.manifest.model_copy(update=changed)
    return scores


def resume(lake: Lake, reader: Reader, first: date, config: TrainConfig) -> Trained:
    """The model as it was before the next batch to train on; its manifest tells which that is."""
    spec = lake.spec.hash
    wanted = Manifest(
        spec=spec,
        config=config.model,
        items=2 * len(reader.items),
        sequence=config.sequence,
        max_length=config.max_length,
        versions=dict(reader.versions),
        trained_from=first,
        trained_until=first,
        complete=False,
        batches=0,
        steps=0,
        seed=config.seed,
    )
    before = first - timedelta(days=1)
    started = checkpoint.read_manifest(checkpoint.folder(lake.root, before), spec)
    path = checkpoint.folder(lake.root, before) if started else None
    if started:
        if started.config != config.model:
            raise UserError(
                f"GEM until {before} has other sizes than scale {config.scale}: train it with the "
                "same --scale, or start from its first day"
            )
        changed = {"trained_until": first, "complete": False, "batches": 0}
        wanted = started.model_copy(update=changed | {"versions": dict(reader.versions)})
    for folder in sorted(checkpoint.folder(lake.root, first).parent.glob("*.partial")):
        partial = checkpoint.read_manifest(folder, spec)
        if partial and _same_run(partial, wanted):
            path, wanted = folder, partial
    trained = build(reader.features, wanted, config)
    if path:
        checkpoint.load(path, trained.model, trained.tables, trained.optimizer)
        log.info("continue from %s", path)
    return trained


def _same_run(partial: Manifest, wanted: Manifest) -> bool:
    changes = {"trained_until", "batches", "steps", "items"}
    return partial.model_dump(exclude=changes) == wanted.model_dump(exclude=changes)


def train_day(
    lake: Lake, reader: Reader, trained: Trained, day: date, config: TrainConfig
) -> dict[str, float]:
    """One pass over all labels that ripened on a day; returns scores taken before each update."""
    model, start = trained.model, trained.manifest
    model.core.train()
    seen = Prequential(reader.features)
    partial = checkpoint.folder(lake.root, day, complete=False)
    for batch in in_step(_batches(lake, reader, day, start, config)):
        manifest = trained.manifest
        _set_rate(trained.optimizer, config, manifest.steps)
        torch.manual_seed(hash((config.seed, manifest.steps, dist.get_rank())) % 2**31)
        seen.add(train_step(model, batch, trained.optimizer), batch)
        counts = {"batches": manifest.batches + 1, "steps": manifest.steps + 1}
        trained.manifest = manifest.model_copy(update=counts)
        if trained.manifest.batches % config.checkpoint_every == 0:
            checkpoint.save(partial, trained.manifest, model, trained.tables, trained.optimizer)
    trained.manifest = trained.manifest.model_copy(update={"complete": True})
    final = checkpoint.folder(lake.root, day)
    checkpoint.save(final, trained.manifest, model, trained.tables, trained.optimizer)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return seen.scores()


def _batches(
    lake: Lake, reader: Reader, day: date, start: Manifest, config: TrainConfig
) -> Iterator[Batch]:
    spec = lake.spec
    first = day == start.trained_from
    after = 0 if first else spec.day_start(day)
    oldest = max(start.trained_from, day - timedelta(days=spec.ripens_after_days + 1))
    batches = reader.batches(
        list(each_day(oldest, day)),
        Ripened(after, spec.day_end(day)),
        config.batch_rows,
        Shuffle(config.seed),
        (dist.get_rank(), dist.get_world_size()),
        skip=start.batches,
    )
    hidden = dist.get_rank() > 0
    return iter(tqdm(batches, desc=f"train gem {day}", unit="batch", disable=hidden or None))


def _set_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    share = min(1.0, (step + 1) / config.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = config.dense_rate * share


def load_trained(lake: Lake, reader: Reader, day: date) -> Trained:
    """The GEM that was trained until a day, for scoring; raises UserError where there is none."""
    path = checkpoint.folder(lake.root, day)
    manifest = checkpoint.read_manifest(path, lake.spec.hash)
    if manifest is None:
        raise UserError(f"no GEM was trained until {day}; run `gemline train gem` for that day")
    trained = build(reader.features, manifest, TrainConfig())
    checkpoint.load(path, trained.model, trained.tables)
    trained.model.core.eval()
    return trained
