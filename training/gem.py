"""Training GEM day by day: resume from the day before, learn what ripened since, checkpoint."""

import logging
import shutil
import sys
from collections.abc import Iterator
from datetime import date, timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from etl.errors import UserError
from etl.spec.units import each_day
from etl.tables.lake import Lake
from features.inputs import USER, Features
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.lanes import Pass, read
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened
from training.loop import checkpoint
from training.loop.average import averaged
from training.loop.checkpoint import Manifest, Trained
from training.loop.compute import prepare
from training.loop.cost import Meter
from training.loop.diverged import diverged
from training.loop.expiry import Asked
from training.loop.loss import Loss, thinning
from training.loop.prequential import Prequential
from training.loop.step import GemModel, train_step
from training.loop.timeline import Timeline
from training.model.gem import Gem
from training.model.lookup import ItemRows, table_rows
from training.parallel.processes import in_step
from training.parallel.sparse import TorchrecTables, renew, shard
from training.resume import refuse_other_reading, starting_point

log = logging.getLogger(__name__)


def _spread(core: Gem) -> DistributedDataParallel:
    """A batch without histories, or a spec without numbers, leaves some parameters unused."""
    return DistributedDataParallel(core, find_unused_parameters=True)


def newest_reader(lake: Lake, config: TrainConfig) -> Reader:
    """A reader of the newest tables, of what a configuration reads."""
    return Reader.newest(lake, config.sequence, config.max_length, config.surfaces)


def build(features: Features, manifest: Manifest, known: npt.NDArray[np.bool_]) -> Trained:
    """A fresh model of a manifest's sizes, spread over the processes of the group.

    `known` (I) tells the items that it has learned of, or is going to.
    """
    config, sizes = manifest.training, manifest.training.sizes
    items = ItemRows(config.item_rows, torch.from_numpy(known))
    torch.manual_seed(config.seed)
    core = Gem(features, sizes)
    rows = table_rows(features, config.item_rows, sizes.user_rows)
    tables = shard(TorchrecTables(rows, sizes.row_width, (USER,)), config.sparse_rate)
    asked = Asked.never(tables, rows)
    average = averaged(core)
    prepare(core, config.compute)
    dense = _spread(core) if dist.get_world_size() > 1 else core
    model = GemModel(core, dense, asked, items, sizes.user_rows, sizes.item_dropout)
    optimizer = torch.optim.AdamW(
        core.parameters(), lr=config.dense_rate, weight_decay=config.weight_decay, fused=True
    )
    return Trained(model, average, tables, asked, optimizer, manifest)


def train(
    lake: Lake, days: tuple[date, date], config: TrainConfig, timeline: Timeline | None = None
) -> list[dict[str, float]]:
    """Train through the given days, each after the other; returns each day's prequential scores.

    Goes on from the checkpoint of the day before the first, if there is one, and from where an
    earlier call was killed. `timeline` goes on with what went before. Raises UserError where a day
    has no examples.
    """
    timeline = timeline or Timeline()
    reader = newest_reader(lake, config)
    reader.require(*days)
    manifest, path = starting_point(lake, reader, days, config)
    timeline.spent("tables")
    trained = build(reader.features, manifest, reader.items.known_by(days[1]))
    timeline.spent("model")
    if path:
        checkpoint.load(path, trained)
        log.info("continue from %s", path)
        timeline.spent("checkpoint")
    scores, meter = [], Meter(timeline)
    for day in each_day(manifest.trained_until, days[1]):
        begin(trained, reader, day)
        scores.append(train_day(lake, reader, trained, day, meter))
        trained.manifest = trained.manifest.next_day(day + timedelta(days=1))
    if dist.get_rank() == 0:
        tqdm.write(str(timeline), sys.stderr)
    return scores


def begin(trained: Trained, reader: Reader, day: date) -> None:
    """Before the first batch of a day: rows that nobody asked for in a long time start anew."""
    asked, start = trained.asked, trained.manifest
    asked.today = day.toordinal()
    if start.batches:
        return
    new = torch.from_numpy(reader.items.new_on(day))
    gone = asked.gone(new, trained.model.items, day, start.training.forget_after_days)
    torch.manual_seed(hash((start.training.seed, start.steps)) % 2**31)
    renew(trained.tables, gone)
    asked.forget(gone)


def train_day(
    lake: Lake, reader: Reader, trained: Trained, day: date, meter: Meter
) -> dict[str, float]:
    """One pass over all labels that ripened on a day; returns scores taken before each update."""
    model, start = trained.model, trained.manifest
    config = start.training
    model.core.train()
    loss = Loss.of(config, reader.features.objectives)
    seen = Prequential(reader.features, loss)
    partial = checkpoint.folder(lake.root, day, complete=False)
    shard = dist.get_rank(), dist.get_world_size()
    batches = day_batches(lake, reader, day, start, shard)
    spare = day_batches(lake, reader, day, start.model_copy(update={"batches": 0}), shard)
    told = {"desc": f"train gem {day}", "unit": "batch", "disable": dist.get_rank() > 0 or None}
    for batch, rows in (bar := tqdm(in_step(batches, spare), **told)):
        meter.begin(trained, batch)
        manifest = trained.manifest
        _set_rate(trained.optimizer, config, manifest.steps)
        torch.manual_seed(hash((config.seed, manifest.steps, dist.get_rank())) % 2**31)
        output = train_step(model, batch, rows, trained.optimizer, loss)
        if output is None:
            raise diverged(partial.parent, trained, batch)
        seen.add(output, batch)
        trained.averaged.update_parameters(model.core)
        trained.manifest = manifest.next_batch(batch)
        bar.set_postfix(meter.after(batch), refresh=False)
        if trained.manifest.batches % config.checkpoint_every == 0:
            checkpoint.save(partial, trained)
            meter.timeline.spent("checkpoint")
    trained.manifest = trained.manifest.model_copy(update={"complete": True})
    final = checkpoint.folder(lake.root, day)
    checkpoint.save(final, trained)
    meter.timeline.spent("checkpoint")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return seen.scores()


def day_batches(
    lake: Lake, reader: Reader, day: date, start: Manifest, shard: tuple[int, int]
) -> Iterator[Batch]:
    """The batches of a day and of a process (rank, world), from where a manifest has come to."""
    spec, config = lake.spec, start.training
    first = day == start.trained_from
    after = 0 if first else spec.day_start(day)
    oldest = max(start.trained_from, day - timedelta(days=spec.ripens_after_days + 1))
    asked = Pass(
        list(each_day(oldest, day)),
        Ripened(after, spec.day_end(day), thinning=thinning(config, tuple(spec.objectives))),
        config.batch_rows,
        Shuffle(config.seed),
        shard,
        start.batches,
    )
    return read(reader, asked, config.workers)


def _set_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    share = min(1.0, (step + 1) / config.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = config.dense_rate * share


def load_trained(lake: Lake, day: date) -> tuple[Trained, Reader]:
    """The GEM that was trained until a day, for scoring, and a reader of what it reads.

    Items first seen later are unknown to it: their rows were never learned. Raises UserError where
    there is none, or where it read what the spec no longer tells.
    """
    path = checkpoint.folder(lake.root, day)
    manifest = checkpoint.read_manifest(path, lake.spec.hash)
    if manifest is None:
        raise UserError(f"no GEM was trained until {day}; run `gemline train gem` for that day")
    reader = newest_reader(lake, manifest.training)
    refuse_other_reading(manifest, reader)
    trained = build(reader.features, manifest, reader.items.known_by(day))
    checkpoint.load_weights(path, trained)
    trained.model.core.eval()
    return trained, reader
