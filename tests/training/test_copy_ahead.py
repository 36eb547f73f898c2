"""Batches are read ahead in order, but never across a checkpoint."""

from collections.abc import Iterator
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from training.data.batch import Batch
from training.distributed.device import CPU
from training.trainer.copy_ahead import CopyAhead


@given(st.integers(0, 20), st.integers(0, 9), st.integers(1, 6))
def test_the_next_batch_is_read_before_a_step_unless_a_checkpoint_follows(
    count: int, position: int, segment: int
) -> None:
    reads = 0

    def source() -> Iterator[tuple[Batch, float]]:
        nonlocal reads
        for number in range(count):
            reads += 1
            yield cast("Batch", number), 1.0

    steps = 0
    for batch in CopyAhead(CPU)(source(), position, segment):
        assert batch.host is batch.on_device and cast("int", batch.host) == steps
        steps += 1
        is_saved = (position + steps) % segment == 0
        assert reads == (steps if is_saved else min(steps + 1, count))
    assert steps == count
