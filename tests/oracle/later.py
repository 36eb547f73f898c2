"""Changes of a log after a second, which must not affect the model inputs of earlier examples."""

import random
from typing import Any

import pyarrow as pa

from etl.tables.lake import Lake
from tests.oracle.disorder import BRANDS
from tests.oracle.log import Record, visible_ts
from training.data.batch import Batch, Shuffle
from training.data.label_window import ALL_LABELS
from training.data.reader import ExampleReader


def change_future(
    rng: random.Random, records: list[Record], since: int, delay: int
) -> list[Record]:
    """The same log up to a second; later records are dropped, changed or followed by new ones."""
    changed = []
    for record in records:
        is_impression = record["type"] == "shown"
        second = min(record["ts"], record["ingest"]) if is_impression else visible_ts(record, delay)
        fate = rng.choice(("removed", "changed", "followed")) if second >= since else "unchanged"
        if fate == "removed":
            continue
        other: Record = {
            "item": rng.choice(list(BRANDS)),
            "surface": "home",
            "dwell": 5000,
            "quantity": 7,
            "code": "sale",
            "query": "changed",
            "filters": ["changed"],
            "view": [9, 9],
        }
        other = other if fate == "changed" else {}
        changed.append(record | other)
        if fate == "followed":
            follower = {"id": f"{record['id']}-again", "type": rng.choice(("click", "buy", "look"))}
            changed.append(record | follower | {"imp": None, "request": None})
    return changed


def model_inputs(lake: Lake) -> dict[str, tuple[Any, ...]]:
    """All model inputs of each impression, by its id; items by their ids."""
    reader = ExampleReader.latest(lake)
    item_ids = reader.items.item_ids
    inputs = {}
    for batch in reader.batches(reader.days(), ALL_LABELS, 100, Shuffle(None)):
        for row, impression in enumerate(batch.impression_ids):
            inputs[impression] = (
                *_row_inputs(batch, row, item_ids),
                *_history_inputs(batch, row, item_ids),
            )
    return inputs


def _row_inputs(batch: Batch, row: int, item_ids: pa.Array) -> tuple[Any, ...]:
    request = int(batch.request_index[row])
    row_categorical = {name: int(values[row]) for name, values in batch.row_categorical.items()}
    user_categorical = {n: int(values[request]) for n, values in batch.user_categorical.items()}
    return (
        int(batch.as_of[request]),
        int(batch.surface[row]),
        item_ids[int(batch.item_index[row])].as_py(),
        row_categorical,
        user_categorical,
        batch.row_numeric[row].numpy().tobytes(),
        {name: matrix[request].tolist() for name, matrix in batch.user_vectors.items()},
        {name: matrix[row].tolist() for name, matrix in batch.row_vectors.items()},
        {name: matrix[row].tolist() for name, matrix in batch.context_vectors.items()},
    )


def _history_inputs(batch: Batch, row: int, item_ids: pa.Array) -> tuple[Any, ...]:
    history, request = batch.history, int(batch.request_index[row])
    events = slice(int(history.offsets[request]), int(history.offsets[request + 1]))
    columns = (
        history.surfaces,
        history.types,
        history.dwells,
        history.age_seconds,
        *history.attributes.values(),
        *history.item_categorical.values(),
    )
    items = item_ids.take(pa.array(history.item_index[events].numpy())).to_pylist()
    return (items, *(column[events].tolist() for column in columns))
