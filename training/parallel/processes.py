"""The process group: one process or many, under torchrun or not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from etl.errors import TemporaryError, UserError
from training.data.batch import Batch
from training.parallel.memory import keep_freed_memory

TIMEOUT = timedelta(minutes=5)
ROLL_CALL = timedelta(seconds=5)
IN_VAIN = "Timed out", "Connection closed", "Connection reset"  # as gloo says it


@contextmanager
def naming_the_missing() -> Iterator[None]:
    """Raise TemporaryError with the ranks of processes that do not answer."""
    apart = dist.new_group(backend="gloo")  # what has timed out is closed
    try:
        yield
    except RuntimeError as error:
        if not any(mark in str(error) for mark in IN_VAIN):
            raise
        try:
            dist.monitored_barrier(apart, timeout=ROLL_CALL, wait_all_ranks=True)
        except RuntimeError as missing:
            raise TemporaryError(
                f"processes do not answer any more: {missing}. The last checkpoint is complete; "
                "run the same command again to go on from it"
            ) from error
        raise


@contextmanager
def process_group(timeout: timedelta = TIMEOUT) -> Iterator[tuple[int, int]]:
    """The default gloo group while inside; gives (rank, world). Alone without torchrun.

    Raises TemporaryError, with their ranks, where others have not answered for so long.
    """
    keep_freed_memory()
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1, timeout=timeout)
    try:
        with naming_the_missing():
            yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def in_step(batches: Iterator[Batch], spare: Iterator[Batch]) -> Iterator[tuple[Batch, float]]:
    """Batches for as long as any process has one, and the mean of the processes' rows.

    All processes take the same number of steps, as their collectives must meet: one that ran out
    repeats its last batch without labels, or where it had none the first of `spare`. Raises
    UserError where a process has not even that.
    """
    last = None
    while True:
        batch = next(batches, None)
        rows = torch.tensor(float(len(batch) if batch else 0))
        dist.all_reduce(rows)
        if not rows:
            return
        if batch is None:
            last = last or next(spare, None)
            if last is None:
                raise UserError("a process has no rows on this day: use fewer --processes")
            batch = replace(last, known=torch.zeros_like(last.known))
        last = batch
        yield batch, float(rows) / dist.get_world_size()
