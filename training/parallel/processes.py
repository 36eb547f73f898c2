"""The process group: one process or many, under torchrun or not."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from etl.errors import UserError
from training.data.batch import Batch

TIMEOUT = timedelta(minutes=5)


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """The default gloo group while inside; gives (rank, world). Alone without torchrun."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        meeting = f"file://{tempfile.mkdtemp()}/alone"
        dist.init_process_group("gloo", meeting, rank=0, world_size=1, timeout=TIMEOUT)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def in_step(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches for as long as any process has one; a process that ran out repeats an unlabelled one.

    All processes take the same number of steps, as their collectives must meet. Raises UserError
    where one has no batch at all.
    """
    last = None
    while True:
        batch = next(batches, None)
        more = torch.tensor([batch is not None], dtype=torch.int32)
        dist.all_reduce(more, op=dist.ReduceOp.MAX)
        if not more.item():
            return
        if batch is None:
            if last is None:
                raise UserError("a process has no rows on this day: use fewer --processes")
            batch = replace(last, known=torch.zeros_like(last.known))
        last = batch
        yield batch
