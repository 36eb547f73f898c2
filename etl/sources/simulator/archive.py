"""The raw folder: which records go to which file of a day."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.sources.simulator.columns import Events
from etl.sources.simulator.config import SECOND_MS, SimulatorConfig, Stream
from etl.sources.simulator.json_lines import write_lines
from etl.sources.simulator.malformed import corrupt_some
from etl.sources.simulator.outcomes import Truth
from etl.sources.simulator.records import ad_lines, event_lines, post_lines, truth_table, user_lines
from etl.sources.simulator.world import World

PART_LINES = 200_000
SHUFFLE_MS = 20 * SECOND_MS  # sigma of how far a line is from its place in the order of landing


def write_events(config: SimulatorConfig, folder: Path, day: int, events: Events) -> None:
    """The lines that landed on a day, the malformed ones among them, in parts."""
    good = event_lines(config, events)
    source, bad = corrupt_some(events, good, config.malformed, config.rng(Stream.MALFORMED, day))
    landed_ms = np.concatenate([events.ingest_time, events.ingest_time[source]])
    shuffle = config.rng(Stream.SHUFFLE, day).standard_normal(landed_ms.size)
    order = np.argsort(landed_ms + SHUFFLE_MS * shuffle)
    lines = pa.chunked_array([good, bad])
    for part, start in enumerate(range(0, order.size, PART_LINES)):
        path = folder / "events" / config.day_name(day) / f"part-{part:05d}.json.gz"
        chunk = lines.take(order[start : start + PART_LINES])
        write_lines(chunk.combine_chunks(), path)


def write_catalogue(world: World, folder: Path, day: int) -> None:
    """The items that appear on a day, and the users whose attributes begin or change on it."""
    config = world.config
    posts = world.posts.take(world.posts.first_day == day)
    ads = world.ads.take(world.ads.first_day == day)
    users = world.users.take(world.users.changed_ms >= config.day_ms(day))
    name = f"{config.day_name(day)}.json.gz"
    write_lines(pa.concat_arrays([post_lines(posts), ad_lines(ads)]), folder / "items" / name)
    write_lines(user_lines(users), folder / "users" / name)


def write_truth(config: SimulatorConfig, folder: Path, day: int, truth: Truth) -> None:
    """The truth about the impressions of a day."""
    path = folder / "truth" / f"{config.day_name(day)}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(truth_table(truth), path)
