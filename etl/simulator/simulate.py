"""Simulate raw logs into a folder, day by day.

Records are written to the files of the day on which they are ingested, the truth about impressions
to the file of the day on which they were shown.

Noise of logs: ingest delays, late and duplicate records, and malformed lines.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from etl.array_types import Bools, Int64
from etl.errors import UserError
from etl.simulator import ads, behavior
from etl.simulator.ads import GroundTruth
from etl.simulator.arrays import MISSING, Events, new_ids
from etl.simulator.audience import audit_impressions
from etl.simulator.billing import billed_spend, target_returns
from etl.simulator.config import (
    DAY_MS,
    HOUR_MS,
    SECOND_MS,
    EventType,
    RandomStream,
    SimulatorConfig,
)
from etl.simulator.records import (
    ad_lines,
    audience_label_lines,
    audit_lines,
    event_lines,
    post_lines,
    spend_lines,
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
    is_first_day = world.ads.first_day == day
    ads = world.ads.take(is_first_day)
    targets = target_returns(config, world.ads, world.taste)[is_first_day]
    users = world.users.take(world.users.changed_ms >= config.day_start_ms(day))
    name = f"{config.day_partition(day)}.json.gz"
    write_lines(
        pa.concat_arrays([post_lines(posts), ad_lines(ads, targets)]), folder / "items" / name
    )
    write_lines(user_lines(users), folder / "users" / name)


def write_audience(world: World, folder: Path, day: int, events: Events) -> None:
    """Write the labels that providers changed on a day, and the audits of its impressions."""
    config, audience = world.config, world.audience
    if audience is None:
        return
    name, start_ms = f"{config.day_partition(day)}.json.gz", config.day_start_ms(day)
    providers = [provider.name for provider in audience.config.providers]
    labels = audience_label_lines(audience, start_ms, providers)
    reports = audit_impressions(config, day, events, world.users, world.ads)
    write_lines(labels, folder / "audience_labels" / name)
    write_lines(audit_lines(reports), folder / "audits" / name)


def write_spend(world: World, folder: Path, day: int, events: Events) -> None:
    """Write what each advertiser is billed for the events of a day: the bids of the ads' goals."""
    if not world.config.billing:
        return
    spend = billed_spend(world.ads, events, world.config.advertisers)
    path = folder / "spend" / f"{world.config.day_partition(day)}.json.gz"
    write_lines(spend_lines(spend), path)


def write_truth(config: SimulatorConfig, folder: Path, day: int, truth: GroundTruth) -> None:
    """Write the true probabilities of the impressions of a day."""
    path = folder / "truth" / f"{config.day_partition(day)}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(truth_table(truth), path)


def simulate_day(world: World, day: int, remaining_events: Int64) -> tuple[Events, GroundTruth]:
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
    probabilities = ads.outcome_probabilities(world, sessions, shown_ads)
    events = Events.concat([
        *behavior.draw_organic_events(world, sessions, steps, rng),
        impressions,
        *behavior.draw_outcome_events(world, impressions, probabilities, rng),
        behavior.draw_purchases(world, day, rng),
    ])  # fmt: skip
    truth = ads.ground_truth(world, shown_ads, probabilities)

    is_kept = _within_event_limit(sessions, events, remaining_events)
    events = events.take(np.append(is_kept, True)[events.session])  # MISSING is the last
    events = replace(events, event=new_ids(day, len(events)))
    refunds = draw_refunds(world, day, events)
    refund_ids = new_ids(day, len(events) + len(refunds))[len(events) :]
    return Events.concat([events, replace(refunds, event=refund_ids)]), truth


def draw_refunds(world: World, day: int, events: Events) -> Events:
    """Refunds of the conversions among the events of a day, without ids."""
    config = world.config.refunds
    conversions = events.take(events.type == EventType.CONVERSION)
    if config is None:
        return conversions.take(np.zeros(len(conversions), bool))
    rng = world.config.rng(RandomStream.REFUNDS, day)
    category = world.ads.category[conversions.item]
    rate = 2 * config.rate * category / (world.config.categories - 1)
    is_refunded = rng.random(len(conversions)) < rate
    delay_ms = config.mean_delay_hours * HOUR_MS * rng.standard_exponential(len(conversions))
    refunded = conversions.take(is_refunded)
    delay = np.ceil(delay_ms[is_refunded]).astype(np.int64)
    return refunded.follow_up(EventType.REFUND, delay, refunded=refunded.event)


def _within_event_limit(sessions: Sessions, events: Events, remaining_events: Int64) -> Bools:
    """(sessions,) whether the user's sessions of the day up to each are within the limit."""
    size = np.bincount(events.session[events.session != MISSING], minlength=len(sessions))
    cumulative = np.cumsum(size)
    before_user = (cumulative - size)[np.searchsorted(sessions.user, sessions.user)]
    return cumulative - before_user <= remaining_events[sessions.user]


def simulate(config: SimulatorConfig, out: Path) -> None:
    """Write the raw logs of a run to the folder `out`, which is created when they are complete.

    Does nothing if `out` already holds this run; raises UserError if it holds other files.
    """
    config_json = config.model_dump_json(indent=2, exclude_none=True) + "\n"
    if out.exists():
        config_file = out / "simulator.json"
        if not config_file.is_file() or config_file.read_text() != config_json:
            raise UserError(f"{out} holds other files: remove it or choose another folder")
        print(f"{out} already holds this run")
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(
            f"{out.parent} cannot be made ({error.strerror}): name another folder"
        ) from None
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
        for day, (world, new_events, new_truth) in enumerate(simulate_days(config)):
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
                pool.submit(write_audience, world, folder, day, events.take(is_ingested)),
                pool.submit(write_spend, world, folder, day, events.take(is_ingested)),
            ]
        for write in writes:
            write.result()


def simulate_days(config: SimulatorConfig) -> Iterator[tuple[World, Events, GroundTruth]]:
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


MIN_INGEST_DELAY_MS, MEAN_INGEST_DELAY_MS = 200, 4 * SECOND_MS
CONVERSION_REPORTING_DELAY_MS = (1 * HOUR_MS, 6 * HOUR_MS)  # after the conversion
LATE_ARRIVAL_DELAY_MS = (2 * HOUR_MS, 2 * DAY_MS)  # after the event
DUPLICATE_DELAY_MS = (1, 12 * HOUR_MS)  # after the first copy


def assign_ingest_times(events: Events, rng: np.random.Generator) -> Events:
    """The events with their usual ingest times."""
    n = len(events)
    ingest_delay = MIN_INGEST_DELAY_MS + MEAN_INGEST_DELAY_MS * rng.standard_exponential(n)
    reporting_delay = rng.uniform(*CONVERSION_REPORTING_DELAY_MS, size=n)
    delay = ingest_delay + np.where(events.type == EventType.CONVERSION, reporting_delay, 0)
    return replace(events, ingest_time=events.event_time + delay.astype(np.int64))


def delay_events(events: Events, rate: float, end_ms: int, rng: np.random.Generator) -> Events:
    """Delay a share `rate` of the events by hours to days, unless the run would have ended."""
    n = len(events)
    delayed_ms = events.event_time + _log_uniform(LATE_ARRIVAL_DELAY_MS, n, rng)
    late_ms = np.maximum(events.ingest_time, delayed_ms)
    is_late = (rng.random(n) < rate) & (late_ms < end_ms)
    return replace(events, ingest_time=np.where(is_late, late_ms, events.ingest_time))


def duplicate_events(events: Events, rate: float, rng: np.random.Generator) -> Events:
    """The events, and later copies of a share `rate` of them."""
    copies = events.take(rng.random(len(events)) < rate)
    ingest_ms = copies.ingest_time + _log_uniform(DUPLICATE_DELAY_MS, len(copies), rng)
    return Events.concat([events, replace(copies, ingest_time=ingest_ms)])


def _log_uniform(bounds: tuple[int, int], count: int, rng: np.random.Generator) -> Int64:
    low, high = bounds
    return np.exp(rng.uniform(np.log(low), np.log(high), size=count)).astype(np.int64)


class Corruption(NamedTuple):
    """A regular expression replaced in a line; applies to records in which `field` is set."""

    field: str
    pattern: str
    replacement: str


CORRUPTIONS = (
    Corruption("event_time", r".{12}\n$", "\n"),  # cut off
    Corruption("event_time", r"^.*\n$", "{}\n"),
    Corruption("event_time", r'"event_time":\d+', '"event_time":"noon"'),
    Corruption("event_time", r'"event_time":\d+', '"event_time":86400000'),  # in 1970
    Corruption("event_time", r'"event_time":\d+', '"event_time":4294967295000'),  # in 2106
    Corruption("event_time", r'"event_time":\d+', '"event_time":9999999999999999999'),
    Corruption("event_time", r'"event_time":\d+', '"event_time":99999999999999999'),
    Corruption("position", r'"position":\d+', '"position":"top"'),
    Corruption("dwell_ms", r'"dwell_ms":', '"dwell_ms":-1'),  # negative
    Corruption("user", r'"user_id":"\w+",', ""),
    Corruption("item", r'"item_id":"\w+",', ""),
    Corruption("surface", r'"surface":"\w+"', '"surface":"watch"'),
)


def corrupt_lines(
    events: Events, lines: pa.StringArray, rate: float, rng: np.random.Generator
) -> tuple[Int64, pa.StringArray]:
    """Corrupted copies of some lines, `rate` per line and equally many of each corruption.

    Returns:
        The (m,) rows that were copied, and the m malformed lines.
    """
    expected = rate * len(events) / len(CORRUPTIONS)
    rows, malformed = [], []
    for corruption in CORRUPTIONS:
        eligible = np.flatnonzero(getattr(events, corruption.field) != MISSING)
        chosen = rng.choice(eligible, min(rng.poisson(expected), eligible.size))
        rows.append(chosen)
        malformed.append(
            pc.replace_substring_regex(
                lines.take(chosen), pattern=corruption.pattern, replacement=corruption.replacement
            )
        )
    return np.concatenate(rows), pa.concat_arrays(malformed)
