"""The same log with another end, and all that models read of examples: what may not change."""

import random

import numpy as np

from etl.tables.lake import Lake
from tests.oracle.disorder import BRANDS
from tests.oracle.log import Record, visible
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING


def otherwise(rng: random.Random, records: list[Record], after: int, delay: int) -> list[Record]:
    """The same log up to a second; afterwards things vanish, are others, happen twice or anew."""
    other = []
    for record in records:
        shown = record["type"] == "shown"
        clock = min(record["ts"], record["ingest"]) if shown else visible(record, delay)
        fate = rng.choice(("gone", "changed", "twice")) if clock >= after else "kept"
        if fate == "gone":
            continue
        changed = {"item": rng.choice(list(BRANDS)), "surface": "home"} if fate == "changed" else {}
        other.append(record | changed)
        if fate == "twice":
            again = {"id": f"{record['id']}-again", "type": rng.choice(("click", "buy", "look"))}
            other.append(record | again | {"imp": None, "request": None})
    return other


def as_read(lake: Lake) -> dict[str, tuple]:
    """All that models read of each impression, items by their names."""
    reader = Reader.newest(lake)
    names = reader.items.names
    found = {}
    for batch in reader.batches(reader.days(), EVERYTHING, 100, Shuffle(None)):
        for row, impression in enumerate(batch.impressions):
            found[impression] = (*row_of(batch, row, names), *history_of(batch, row, names))
    return found


def row_of(batch: Batch, row: int, names: np.ndarray) -> tuple:
    request = int(batch.request[row])
    ids = {name: int(values[row]) for name, values in batch.row_ids.items()}
    users = {name: int(values[request]) for name, values in batch.user_ids.items()}
    numbers = batch.row_numbers[row].numpy().tobytes()
    at = int(batch.as_of[request]), int(batch.surface[row]), names[int(batch.item[row])]
    return (*at, ids, users, numbers)


def history_of(batch: Batch, row: int, names: np.ndarray) -> tuple:
    history, request = batch.history, int(batch.request[row])
    at = slice(int(history.offsets[request]), int(history.offsets[request + 1]))
    columns = (history.surfaces, history.types, history.dwells, history.ages)
    columns = (*columns, *history.item_ids.values())
    items = names[history.items[at].numpy()].tolist()
    return (items, *(column[at].tolist() for column in columns))
