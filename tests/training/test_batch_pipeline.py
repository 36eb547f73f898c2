"""Batches are prepared ahead in order, but never across a checkpoint; look-ups read new rows."""

from collections.abc import Iterator
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from training.data.batch import Batch
from training.distributed.device import CPU
from training.distributed.lookup import StartedLookup, start_lookup
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sharding import TorchrecTables, rowwise_adagrad_params, shard_tables
from training.trainer.batch_pipeline import BatchPipeline

ROWS = {"item": 20, "tag": 5}


@given(st.integers(0, 20), st.integers(0, 9), st.integers(1, 6))
def test_a_batch_is_prepared_before_the_step_before_it_unless_a_checkpoint_follows(
    count: int, position: int, segment: int
) -> None:
    read: list[int] = []
    started: list[tuple[int, int]] = []

    def source() -> Iterator[tuple[Batch, float]]:
        for number in range(count):
            read.append(number)
            yield cast("Batch", number), 1.0

    def start(batch: Batch, batch_position: int) -> StartedLookup:
        started.append((cast("int", batch), batch_position))
        return cast("StartedLookup", batch)

    steps = 0
    for batch in BatchPipeline(CPU, start)(source(), position, segment):
        assert batch.host is batch.on_device and cast("int", batch.host) == steps
        assert cast("int", batch.lookup) == steps
        steps += 1
        is_saved = (position + steps) % segment == 0
        assert len(read) == (steps if is_saved else min(steps + 1, count))
        assert started == [(number, position + number) for number in read]
    assert steps == count


def test_a_started_lookup_returns_rows_as_they_are_when_they_are_read() -> None:
    """Started before an update of its rows, it returns the updated rows, as a later one does."""
    ids = {"item": torch.tensor([3, 7, 3, 19]), "tag": torch.tensor([1, 4])}
    with process_group():
        tables = shard_tables(TorchrecTables(ROWS, 8), build_mesh(1), rowwise_adagrad_params(0.1))
        started = start_lookup(tables, ids)
        old = tables(ids)
        torch.cat(list(old.values())).sum().backward()
        early, late = started.vectors(), tables(ids)
        for name in ROWS:
            assert torch.equal(early[name], late[name])
            assert not torch.equal(early[name], old[name])


def test_gradients_of_a_started_lookup_update_the_tables() -> None:
    ids = {"item": torch.tensor([3, 7]), "tag": torch.tensor([1])}
    with process_group():
        tables = shard_tables(TorchrecTables(ROWS, 8), build_mesh(1), rowwise_adagrad_params(0.1))
        before = tables(ids)["item"].detach().clone()
        start_lookup(tables, ids).vectors()["item"].sum().backward()
        assert bool((tables(ids)["item"] < before).all())
