"""Training in request shape, where a history is encoded once, beside one history a row.

A GEM of the simulator's features with a tiny non-sequence side and two sequence layers over 200
events, so that the figure is of what request shape saves, on random batches.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.model.limit import cpu_seconds
from benchmarks.result import Result
from etl.spec import load_spec
from features.inputs import Features, features_of
from training.config import TrainConfig
from training.data.batch import Batch, History
from training.loop.loss import Loss
from training.loop.step import GemModel, train_step
from training.model.config import SCALES
from training.model.gem import Gem, Output
from training.model.lookup import first_items, table_rows
from training.parallel.mesh import mesh_of
from training.parallel.processes import process_group
from training.parallel.sparse import TorchrecTables, adagrad, shard

SPEC = Path(__file__).parents[2] / "conf" / "specs" / "simulator.yaml"
REQUESTS, EACH, LENGTH, ITEMS = 32, 8, 200, 5000
SIZES = SCALES["tiny"].model_copy(
    update={
        "event_width": 64, "event_layers": 2, "encoded_events": LENGTH, "window": None,
        "dropout": 0.0, "item_dropout": 0.0,
    }
)  # fmt: skip


def measure(result: Result) -> None:
    """`request_shaped_ratio`, and that both shapes have the same loss."""
    features = features_of(load_spec(SPEC))
    batch = random_batch(features)
    with process_group():
        shaped, rows = step(features, batch), step(features, by_row(batch))
        apart = abs(loss_of(shaped(), features, batch) - loss_of(rows(), features, batch))
        seconds = cpu_seconds({"requests": shaped, "rows": rows}, rounds=5)
    ratio = seconds["rows"] / seconds["requests"]
    result.take("request_shaped_ratio", ratio if apart < 1e-6 else None, f"losses differ: {apart}")
    each = {name: len(batch) / taken for name, taken in seconds.items()}
    result.rows.append(
        (f"{EACH} rows a request, {LENGTH} events", f"{each['requests']:,.0f} rows/s",
         f"{each['rows']:,.0f} rows/s one by one; losses {apart:.0e} apart", f"{ratio:.1f}", ">= 7")
    )  # fmt: skip


def loss_of(output: Output | None, features: Features, batch: Batch) -> float:
    """The loss that was trained on."""
    assert output is not None
    return float(Loss.of(TrainConfig(), features.objectives)(output, batch, len(batch)))


def step(features: Features, batch: Batch) -> Callable[[], Output | None]:
    """The trainer's step on a batch, again and again; gives what was put out before the update."""
    torch.manual_seed(0)
    core = Gem(features, SIZES)
    rows = table_rows(features, ITEMS, SIZES.user_rows)
    tables = shard(TorchrecTables(rows, SIZES.row_width), mesh_of(1), adagrad(0.05))
    model = GemModel(core, core, tables, first_items(ITEMS), SIZES.user_rows, 0.0)
    optimizer = torch.optim.AdamW(core.parameters(), fused=True)
    loss = Loss.of(TrainConfig(), features.objectives)
    return lambda: train_step(model, batch, len(batch), optimizer, loss)


def random_batch(features: Features) -> Batch:
    """Requests that differ in everything, with histories of one length."""
    generator = torch.Generator().manual_seed(0)
    rows, events = REQUESTS * EACH, REQUESTS * LENGTH

    def below(top: int, count: int) -> Tensor:
        return torch.randint(1, top, (count,), generator=generator)

    def ids(tables: dict[str, int], count: int) -> dict[str, Tensor]:
        return {name: below(top, count) for name, top in tables.items()}

    def vectors(count: int) -> dict[str, Tensor]:
        widths = features.item.vectors.items()
        return {name: torch.randn(count, width, generator=generator) for name, width in widths}

    ages = below(10**6, events).view(REQUESTS, LENGTH).sort(1, descending=True).values.flatten()
    history = History(
        offsets=torch.arange(REQUESTS + 1) * LENGTH,
        items=below(ITEMS, events),
        surfaces=below(len(features.surfaces) + 1, events),
        types=below(len(features.events) + 1, events),
        dwells=below(128, events),
        ages=ages,
        item_ids=ids(features.item.ids, events),
        item_vectors=vectors(events),
    )
    labels = (torch.rand(rows, len(features.objectives), generator=generator) < 0.2).float()
    return Batch(
        request=torch.arange(REQUESTS).repeat_interleave(EACH),
        as_of=torch.zeros(REQUESTS, dtype=torch.long),
        surface=below(len(features.surfaces) + 1, rows),
        item=below(ITEMS, rows),
        user=below(2**40, REQUESTS),
        user_ids=ids(features.user.ids, REQUESTS),
        user_numbers=torch.randn(REQUESTS, len(features.user.numbers), generator=generator),
        row_ids=ids(features.item.ids | features.context.ids, rows),
        row_numbers=torch.randn(rows, len(features.row_numbers), generator=generator),
        row_vectors=vectors(rows),
        history=history,
        labels=labels,
        known=torch.ones_like(labels),
        values=torch.zeros_like(labels),
        impressions=np.arange(rows).astype(object),
        requests=np.arange(REQUESTS).astype(object),
        users=np.arange(REQUESTS).astype(str).astype(object),
    )


def by_row(batch: Batch) -> Batch:
    """The same rows, each a request of its own."""
    history, own = batch.history, batch.request
    at = (own[:, None] * LENGTH + torch.arange(LENGTH)).flatten()
    columns = ("items", "surfaces", "types", "dwells", "ages")
    return replace(
        batch,
        request=torch.arange(len(batch)),
        as_of=batch.as_of[own],
        user=batch.user[own],
        users=batch.users[own],
        user_ids={name: ids[own] for name, ids in batch.user_ids.items()},
        user_numbers=batch.user_numbers[own],
        requests=batch.requests[own.numpy()],
        history=History(
            offsets=torch.arange(len(batch) + 1) * LENGTH,
            item_ids={name: ids[at] for name, ids in history.item_ids.items()},
            item_vectors={name: v[at] for name, v in history.item_vectors.items()},
            **{name: getattr(history, name)[at] for name in columns},
        ),
    )
