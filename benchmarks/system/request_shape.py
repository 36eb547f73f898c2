"""Request-shaped training, which encodes a history once per request instead of once per row.

A GEM of the simulator's features with a tiny interaction part and two sequence layers over 200
events, on random batches, so that the ratio shows what sharing the history saves.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.harness import SIMULATOR_SPEC, BenchmarkResult
from benchmarks.system.model_blocks import cpu_seconds
from etl.spec import load_spec
from features.schema import FeatureSchema, feature_schema
from training.config import TrainConfig
from training.data.batch import Batch, History
from training.data.synthetic import BatchShape, random_batch
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sharding import TorchrecTables, rowwise_adagrad_params, shard_tables
from training.model.config import SCALES
from training.model.embeddings import item_row_map_up_to, table_sizes
from training.model.gem import Gem, GemOutput
from training.trainer.step import GemModel, Loss, train_step

LENGTH, ITEMS = 200, 5000
SHAPE = BatchShape(requests=32, rows_per_request=8, events_per_request=LENGTH, items=ITEMS)
MODEL_CONFIG = SCALES["tiny"].model_copy(
    update={
        "event_width": 64, "event_layers": 2, "encoded_events": LENGTH, "window": None,
        "dropout": 0.0, "item_dropout": 0.0,
    }
)  # fmt: skip


def measure_request_shape(result: BenchmarkResult) -> None:
    """`request_shaped_ratio`; None if the two shapes do not have the same loss."""
    features = feature_schema(load_spec(SIMULATOR_SPEC))
    batch = random_batch(features, SHAPE)
    with process_group():
        by_request = make_training_step(features, batch)
        by_row = make_training_step(features, one_row_per_request(batch))
        request_loss, row_loss = (loss_of(step(), features, batch) for step in (by_request, by_row))
        seconds = cpu_seconds({"requests": by_request, "rows": by_row}, rounds=5)
    difference = abs(request_loss - row_loss)
    ratio = seconds["rows"] / seconds["requests"]
    is_equal = difference < 1e-6
    result.record(
        "request_shaped_ratio", ratio if is_equal else None, f"losses differ: {difference}"
    )
    speed = {name: len(batch) / duration for name, duration in seconds.items()}
    result.rows.append(
        (
            f"{SHAPE.rows_per_request} rows per request, {LENGTH} events",
            f"{speed['requests']:,.0f} rows/s",
            f"{speed['rows']:,.0f} rows/s one by one; losses {difference:.0e} apart",
            f"{ratio:.1f}",
            ">= 7",
        )
    )


def loss_of(output: GemOutput | None, features: FeatureSchema, batch: Batch) -> float:
    """The training loss of an output."""
    assert output is not None
    return float(Loss.from_config(TrainConfig(), features)(output, batch, len(batch)))


def make_training_step(features: FeatureSchema, batch: Batch) -> Callable[[], GemOutput | None]:
    """The trainer's step on a batch; each call returns the output before its update."""
    torch.manual_seed(0)
    core = Gem(features, MODEL_CONFIG)
    rows = table_sizes(features, ITEMS, MODEL_CONFIG.user_hash_buckets)
    tables = shard_tables(
        TorchrecTables(rows, MODEL_CONFIG.embedding_dim),
        build_mesh(1),
        rowwise_adagrad_params(0.05),
    )
    model = GemModel(core, core, tables, item_row_map_up_to(ITEMS), MODEL_CONFIG.user_hash_buckets)
    optimizer = torch.optim.AdamW(core.parameters(), fused=True)
    loss = Loss.from_config(TrainConfig(), features)
    return lambda: train_step(model, batch, len(batch), optimizer, loss)


def one_row_per_request(batch: Batch) -> Batch:
    """The same rows, each as a separate request."""
    history, request = batch.history, batch.request_index
    events = (request[:, None] * LENGTH + torch.arange(LENGTH)).flatten()
    columns = ("item_index", "surfaces", "types", "dwells", "age_seconds")
    return replace(
        batch,
        request_index=torch.arange(len(batch)),
        as_of=batch.as_of[request],
        user_hash=batch.user_hash[request],
        user_ids=batch.user_ids[request],
        user_categorical={name: ids[request] for name, ids in batch.user_categorical.items()},
        user_numeric=batch.user_numeric[request],
        user_vectors={name: vectors[request] for name, vectors in batch.user_vectors.items()},
        request_ids=batch.request_ids[request.numpy()],
        history=History(
            offsets=torch.arange(len(batch) + 1) * LENGTH,
            item_categorical={name: ids[events] for name, ids in history.item_categorical.items()},
            item_vectors={name: v[events] for name, v in history.item_vectors.items()},
            **{name: getattr(history, name)[events] for name in columns},
        ),
    )
