"""Training GEM day by day: resume from the day before, learn what ripened since, checkpoint."""

import logging
import sys
from datetime import date, timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from etl.errors import UserError
from etl.spec.units import each_day
from etl.tables import atomic_io
from etl.tables.lake import Lake
from training.build import build, newest_reader
from training.config import ALONE, SpreadOptions, TrainConfig
from training.data.reader import Reader
from training.day import Day
from training.loop import checkpoint
from training.loop.checkpoint import Trained
from training.loop.cost import Meter
from training.loop.loss import Loss
from training.loop.nan_guard import report_non_finite_loss
from training.loop.prequential import Prequential
from training.loop.step import NonFiniteLossError, train_step
from training.loop.timeline import Timeline
from training.loop.writer import Writer
from training.parallel.processes import in_step
from training.parallel.sparse import renew
from training.resume import refuse_other_reading, starting_point

log = logging.getLogger(__name__)


def train(
    lake: Lake,
    days: tuple[date, date],
    config: TrainConfig,
    timeline: Timeline | None = None,
    spread: SpreadOptions = ALONE,
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
    trained = build(reader.features, manifest, reader.items.known_by(days[1]), spread)
    timeline.spent("model")
    if path:
        checkpoint.load(path, trained)
        log.info("continue from %s", path)
        timeline.spent("checkpoint")
    scores, meter, writer = [], Meter(timeline), Writer()
    for day in each_day(manifest.trained_until, days[1]):
        begin(trained, reader, day)
        scores.append(train_day(lake, reader, trained, day, meter, writer))
        trained.manifest = trained.manifest.next_day(day + timedelta(days=1), dist.get_world_size())
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
    lake: Lake, reader: Reader, trained: Trained, day: date, meter: Meter, writer: Writer
) -> dict[str, float]:
    """One pass over all labels that ripened on a day; returns scores taken before each update."""
    model, start = trained.model, trained.manifest
    config = start.training
    model.core.train()
    loss = Loss.of(config, reader.features.objectives)
    seen = Prequential(reader.features, loss)
    partial = checkpoint.folder(lake.root, day, complete=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    of_day = Day(lake, reader, day, start)
    batches, spare = of_day.of(rank, world), of_day.spare(rank)
    told = {"desc": f"train gem {day}", "unit": "batch", "disable": rank > 0 or None}
    for batch, rows in (bar := tqdm(in_step(batches, spare), **told)):
        meter.begin(trained, batch)
        manifest = trained.manifest
        _set_rate(trained.optimizer, config, manifest.steps)
        torch.manual_seed(hash((config.seed, manifest.steps, dist.get_rank())) % 2**31)
        try:
            output = train_step(model, batch, rows, trained.optimizer, loss)
        except NonFiniteLossError as error:
            raise report_non_finite_loss(partial.parent, trained, batch, error.ranks) from None
        seen.add(output, batch)
        trained.averaged.update_parameters(model.core)
        trained.replicas.stepped()
        trained.manifest = manifest.next_batch(batch, round(rows * world))
        bar.set_postfix(meter.after(batch), refresh=False)
        if trained.manifest.batches % config.checkpoint_every == 0:
            taken = batches.taken_by_all(start.processes)
            trained.manifest = trained.manifest.model_copy(update={"taken": taken})
            writer.begin(partial, trained)
            meter.timeline.spent("checkpoint")
    trained.manifest = trained.manifest.model_copy(update={"complete": True, "taken": ()})
    writer.begin(checkpoint.folder(lake.root, day), trained)
    writer.finish()
    meter.timeline.spent("checkpoint")
    if rank == 0:
        atomic_io.remove_folder(partial)
    return seen.scores()


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
