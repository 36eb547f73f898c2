"""Where a training run starts: from nothing, from the day before, or where it was cut off."""

from datetime import date, timedelta

import torch.distributed as dist

from etl.errors import UserError
from etl.tables.lake import Lake
from etl.tables.place import Place
from training.config import TrainConfig
from training.data.reader import Reader
from training.loop import checkpoint
from training.loop.checkpoint import Manifest


def starting_point(
    lake: Lake, reader: Reader, days: tuple[date, date], config: TrainConfig
) -> tuple[Manifest, Place | None]:
    """The model as it was before the next batch to train on, and its checkpoint if it has one.

    Raises UserError where earlier days are missing, or were trained with what cannot be changed.
    """
    written = checkpoint.written(lake.root, lake.spec.hash)
    wanted = _new(lake, reader, days[0], config)
    path = None
    earlier = [pair for pair in written if pair[1].complete and pair[1].trained_until < days[0]]
    if earlier:
        path, before = earlier[-1]
        _check(before, wanted)
        kept = {"steps": before.steps, "rows": before.rows, "trained_from": before.trained_from}
        wanted = wanted.model_copy(update=kept)
    for folder, manifest in written:
        if manifest.same_run(wanted) and days[0] <= manifest.trained_until <= days[1]:
            path, wanted = folder, manifest
    if wanted.complete:
        wanted = wanted.next_day(wanted.trained_until + timedelta(days=1), dist.get_world_size())
    return wanted, path


def _new(lake: Lake, reader: Reader, first: date, config: TrainConfig) -> Manifest:
    return Manifest(
        spec=lake.spec.hash,
        match=lake.spec.match,
        events=reader.events,
        training=config.model_copy(
            update={"sequence": reader.sequence, "max_length": reader.length}
        ),
        processes=dist.get_world_size(),
        versions=dict(reader.versions),
        trained_from=first,
        trained_until=first,
        complete=False,
        batches=0,
        steps=0,
    )


def _check(before: Manifest, wanted: Manifest) -> None:
    """Whether a new day may go on from the model of the days before."""
    day, first = before.trained_until, wanted.trained_until
    if day + timedelta(days=1) != first:
        raise UserError(
            f"GEM was trained until {day}: train the days from then to {first} first, or remove "
            "models/gem from the lake to start over"
        )
    old, new = before.training.reads(), wanted.training.reads()
    changed = [f"{name} {old[name]}" for name in old if old[name] != new[name]]
    changed += [f"match {', '.join(before.match)}"] if before.match != wanted.match else []
    changed += [f"events {', '.join(before.events)}"] if before.events != wanted.events else []
    if changed:
        raise UserError(
            f"GEM until {day} was trained with {'; '.join(changed)}: go on with the same, or "
            "remove models/gem from the lake to start over"
        )


def refuse_other_reading(manifest: Manifest, reader: Reader) -> None:
    """Raises UserError where a spec tells models to read other things than a model has learned."""
    spec = reader.lake.spec
    if (manifest.match, manifest.events) != (spec.match, reader.events):
        raise UserError(
            f"GEM until {manifest.trained_until} was trained with other `match` or `sequences` "
            f"than spec {spec.name} has now: take the change back, or train it anew"
        )
