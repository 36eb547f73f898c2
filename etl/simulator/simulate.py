"""Simulate raw logs into a folder, day by day.

Records are written to the files of the day on which they are ingested, the truth about impressions
to the file of the day on which they were shown.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from etl.errors import UserError
from etl.simulator import ads, behavior, outcomes
from etl.simulator.arrays import MISSING, Bools, Events, Ints, new_ids
from etl.simulator.config import SECOND_MS, RandomStream, SimulatorConfig
from etl.simulator.log_noise import (
    assign_ingest_times,
    corrupt_lines,
    delay_events,
    duplicate_events,
)
from etl.simulator.outcomes import GroundTruth
from etl.simulator.records import (
    ad_lines,
    event_lines,
    post_lines,
    truth_table,
    user_lines,
    write_lines,
)
from etl.simulator.sessions import Sessions, draw_sessions, draw_steps
from etl.simulator.world import World

MAX_LINES_PER_FILE = 200_000
SHUFFLE_MS = 20 * SECOND_MS  # sigma of the displacement of lines from the order of their ingest
WRITER_THREADS = 2


def write_events(config: SimulatorConfig, folder: Path, day: int, events: Events) -> None:
    """Write the records that were ingested on a day, with malformed lines, in several files."""
    valid = event_lines(config, events)
    malformed_rng = config.rng(RandomStream.MALFORMED, day)
    copied_rows, malformed = corrupt_lines(events, valid, config.malformed, malformed_rng)
    ingest_ms = np.concatenate([events.ingest_time, events.ingest_time[copied_rows]])
    displacement = config.rng(RandomStream.SHUFFLE, day).standard_normal(ingest_ms.size)
    order = np.argsort(ingest_ms + SHUFFLE_MS * displacement)
    lines = pa.chunked_array([valid, malformed])
    for part, start in enumerate(range(0, order.size, MAX_LINES_PER_FILE)):
        path = folder / "events" / config.day_partition(day) / f"part-{part:05d}.json.gz"
        chunk = lines.take(order[start : start + MAX_LINES_PER_FILE])
        write_lines(chunk.combine_chunks(), path)


def write_attributes(world: World, folder: Path, day: int) -> None:
    """Write the items first active on a day, and the users whose attributes changed on it."""
    config = world.config
    posts = world.posts.take(world.posts.first_day == day)
    ads = world.ads.take(world.ads.first_day == day)
    users = world.users.take(world.users.changed_ms >= config.day_start_ms(day))
    name = f"{config.day_partition(day)}.json.gz"
    write_lines(pa.concat_arrays([post_lines(posts), ad_lines(ads)]), folder / "items" / name)
    write_lines(user_lines(users), folder / "users" / name)


def write_truth(config: SimulatorConfig, folder: Path, day: int, truth: GroundTruth) -> None:
    """Write the true probabilities of the impressions of a day."""
    path = folder / "truth" / f"{config.day_partition(day)}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(truth_table(truth), path)


def simulate_day(world: World, day: int, remaining_events: Ints) -> tuple[Events, GroundTruth]:
    """Simulate the sessions that start on one day, and the purchases of that day.

    Args:
        world: The world on that day.
        day: Day of the run, from 0.
        remaining_events: (users,) how many events the sessions of each user may still cause. The
            first session that would exceed it is dropped, as are all later ones of that day.

    Returns:
        The events, and the truth about all impressions, those of dropped sessions included.
    """
    rng = world.config.rng(RandomStream.BEHAVIOUR, day)
    sessions = draw_sessions(world, day, rng)
    steps = draw_steps(sessions, rng)
    shown_ads = ads.serve_ads(world, day, sessions, steps, rng)
    impressions = ads.impression_events(sessions, shown_ads)
    probabilities = outcomes.outcome_probabilities(world, sessions, shown_ads)
    events = Events.concat([
        *behavior.draw_organic_events(world, sessions, steps, rng),
        impressions,
        *behavior.draw_outcome_events(world, impressions, probabilities, rng),
        behavior.draw_purchases(world, day, rng),
    ])  # fmt: skip
    truth = outcomes.ground_truth(world, shown_ads, probabilities)

    is_kept = _within_event_limit(sessions, events, remaining_events)
    events = events.take(np.append(is_kept, True)[events.session])  # MISSING is the last
    return replace(events, event=new_ids(day, len(events))), truth


def _within_event_limit(sessions: Sessions, events: Events, remaining_events: Ints) -> Bools:
    """(sessions,) whether the user's sessions of the day up to each are within the limit."""
    size = np.bincount(events.session[events.session != MISSING], minlength=len(sessions))
    cumulative = np.cumsum(size)
    before_user = (cumulative - size)[np.searchsorted(sessions.user, sessions.user)]
    return cumulative - before_user <= remaining_events[sessions.user]


def simulate(config: SimulatorConfig, out: Path) -> None:
    """Write the raw logs of a run to the folder `out`, which is created when they are complete.

    Does nothing if `out` already holds this run; raises UserError if it holds other files.
    """
    config_json = config.model_dump_json(indent=2) + "\n"
    if out.exists():
        config_file = out / "simulator.json"
        if not config_file.is_file() or config_file.read_text() != config_json:
            raise UserError(f"{out} holds other files: remove it or choose another folder")
        print(f"{out} already holds this run")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        (folder / "simulator.json").write_text(config_json)
        _write_days(config, folder)
        folder.rename(out)


def _write_days(config: SimulatorConfig, folder: Path) -> None:
    """Write all files of a run; records of later days are kept until their files are written."""
    pending_events: list[Events] = []
    pending_truth: list[GroundTruth] = []
    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        writes = []
        for day, (world, new_events, new_truth) in enumerate(_simulate_days(config)):
            day_end_ms = config.day_start_ms(day + 1)
            events = Events.concat([*pending_events, new_events])
            truth = GroundTruth.concat([*pending_truth, new_truth])
            is_ingested = events.ingest_time < day_end_ms
            is_shown = truth.event_time < day_end_ms
            pending_events = [events.take(~is_ingested)]
            pending_truth = [truth.take(~is_shown)]
            writes += [
                pool.submit(write_attributes, world, folder, day),
                pool.submit(write_events, config, folder, day, events.take(is_ingested)),
                pool.submit(write_truth, config, folder, day, truth.take(is_shown)),
            ]
        for write in writes:
            write.result()


def _simulate_days(config: SimulatorConfig) -> Iterator[tuple[World, Events, GroundTruth]]:
    """Yield the world on each day, the events that the day causes, and the truth.

    The truth is limited to the impressions that are ingested within the run.
    """
    world = World.draw(config)
    remaining_events = world.remaining_events
    for day in tqdm(range(config.days), desc=f"simulate {config.name}", unit="day"):
        world = world.advance_to_day(day) if day else world
        events, truth = simulate_day(world, day, remaining_events)
        users = events.user[events.session != MISSING]
        remaining_events = remaining_events - np.bincount(users, minlength=config.users)
        events = assign_ingest_times(events, config.rng(RandomStream.INGEST_DELAY, day))
        logged = events.impression[events.ingest_time < config.end_ms]
        events = delay_events(
            events, config.late, config.end_ms, config.rng(RandomStream.LATE, day)
        )
        events = duplicate_events(
            events, config.duplicates, config.rng(RandomStream.DUPLICATES, day)
        )
        yield world, events, truth.take(np.isin(truth.impression, logged))
