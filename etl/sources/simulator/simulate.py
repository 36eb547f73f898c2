"""Simulate raw logs into a folder, day by day."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from etl.errors import UserError
from etl.sources.simulator.archive import write_catalogue, write_events, write_truth
from etl.sources.simulator.columns import ABSENT, Events
from etl.sources.simulator.config import SimulatorConfig, Stream
from etl.sources.simulator.day import live
from etl.sources.simulator.disorder import arrive, delay_some, repeat_some
from etl.sources.simulator.outcomes import Truth
from etl.sources.simulator.world import World

WRITERS = 2


def simulate(config: SimulatorConfig, out: Path) -> None:
    """Write the raw logs of a run to the folder `out`, which appears when they are complete.

    Raises UserError if `out` holds anything but this very run.
    """
    resolved = config.model_dump_json(indent=2) + "\n"
    if out.exists():
        record = out / "simulator.json"
        if not record.is_file() or record.read_text() != resolved:
            raise UserError(f"{out} holds something else: remove it or choose another folder")
        print(f"{out} already holds this run")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        (folder / "simulator.json").write_text(resolved)
        _write_days(config, folder)
        folder.rename(out)


def _write_days(config: SimulatorConfig, folder: Path) -> None:
    """Every file of the run: records by the day on which they land, truth by that of the event."""
    waiting: list[Events] = []
    untold: list[Truth] = []
    with ThreadPoolExecutor(WRITERS) as pool:
        writes = []
        for day, (world, fresh, fresh_truth) in enumerate(_days(config)):
            midnight_ms = config.day_ms(day + 1)
            events = Events.concat([*waiting, fresh])
            truth = Truth.concat([*untold, fresh_truth])
            landed, told = events.ingest_time < midnight_ms, truth.event_time < midnight_ms
            waiting, untold = [events.take(~landed)], [truth.take(~told)]
            writes += [
                pool.submit(write_catalogue, world, folder, day),
                pool.submit(write_events, config, folder, day, events.take(landed)),
                pool.submit(write_truth, config, folder, day, truth.take(told)),
            ]
        for write in writes:
            write.result()


def _days(config: SimulatorConfig) -> Iterator[tuple[World, Events, Truth]]:
    """The world on each day, the records that the day causes and the truth behind them.

    The truth is told of the impressions that are logged within the run.
    """
    world = World.draw(config)
    room = world.room
    for day in tqdm(range(config.days), desc=f"simulate {config.name}", unit="day"):
        world = world.on(day) if day else world
        events, truth = live(world, day, room)
        spent = events.user[events.session != ABSENT]
        room = room - np.bincount(spent, minlength=config.users)
        events = arrive(events, config.rng(Stream.TRANSIT, day))
        logged = events.impression[events.ingest_time < config.end_ms]
        events = delay_some(events, config.late, config.end_ms, config.rng(Stream.LATE, day))
        events = repeat_some(events, config.duplicates, config.rng(Stream.DUPLICATES, day))
        yield world, events, truth.take(np.isin(truth.impression, logged))
