"""The process group, the device mesh, and synchronized iteration over batches.

T processes, M replica groups, L = T / M processes in a group.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from etl.errors import TemporaryError, UserError
from training.data.batch import Batch
from training.distributed.device import BACKENDS, CPU

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAX_INT32 = 2**31 - 1


def retain_freed_memory() -> None:
    """Make glibc reuse large freed blocks instead of returning them to the system.

    Every step allocates the same large tensors, and the system would fill their pages with zeros
    each time, which takes a tenth of a Wukong step on a CPU. A no-op without glibc.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt:
            mallopt(M_MMAP_THRESHOLD, MAX_INT32)
            mallopt(M_TRIM_THRESHOLD, MAX_INT32)


REPLICATE, SHARD = "replicate", "shard"


def build_mesh(replica_groups: int, device: torch.device = CPU) -> DeviceMesh:
    """The mesh (M, L) of all processes; row i is replica group i: ranks i, M + i, 2 M + i, ...

    Replicas of a shard have neighboring ranks, usually on one machine (2508.03854, section 3).
    Raises UserError if the processes can't be divided into that many groups.
    """
    world = dist.get_world_size()
    if world % replica_groups:
        raise UserError(
            f"--parallelism.table-replicas {replica_groups}: {world} processes can't be divided "
            f"into {replica_groups} equal groups"
        )
    ranks = torch.arange(world).view(world // replica_groups, replica_groups).T.contiguous()
    return DeviceMesh(device.type, ranks, mesh_dim_names=(REPLICATE, SHARD))


COLLECTIVE_TIMEOUT = timedelta(minutes=5)
BARRIER_TIMEOUT = timedelta(seconds=5)
LOST_PEER_ERRORS = "Timed out", "Connection closed", "Connection reset"  # messages of gloo


@contextmanager
def report_missing_ranks() -> Iterator[None]:
    """Raise TemporaryError with the ranks of lost processes if a collective inside fails."""
    barrier_group = dist.new_group(backend="gloo")  # a group is closed after a timeout
    try:
        yield
    except RuntimeError as error:
        if not any(message in str(error) for message in LOST_PEER_ERRORS):
            raise
        try:
            dist.monitored_barrier(barrier_group, timeout=BARRIER_TIMEOUT, wait_all_ranks=True)
        except RuntimeError as missing:
            raise TemporaryError(
                f"lost processes: {missing}. The last checkpoint is complete; "
                "run the same command again to resume from it"
            ) from error
        raise


@contextmanager
def process_group(
    timeout: timedelta = COLLECTIVE_TIMEOUT, device: torch.device = CPU
) -> Iterator[tuple[int, int]]:
    """Context of the default process group of a device; yields (rank, world size).

    Gloo on a CPU; on CUDA NCCL, with gloo beside it for tensors on the host. Without torchrun the
    group is this process alone. Raises TemporaryError with the ranks of processes that do not
    respond within `timeout`.
    """
    retain_freed_memory()
    backend = BACKENDS[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        with report_missing_ranks():
            yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def synchronized_batches(
    batches: Iterator[Batch], fallback_batches: Iterator[Batch]
) -> Iterator[tuple[Batch, float]]:
    """Yield batches until all processes are exhausted, with the mean number of rows per process.

    All processes must take the same number of steps, because each step has collectives. A process
    without further batches repeats its last one as padding, or the first fallback batch if there is
    none. Raises UserError if both are missing.
    """
    last: Batch | None = None
    while True:
        batch = next(batches, None)
        rows = _sum_over_processes(len(batch) if batch else 0)
        if not rows:
            return
        if batch is None:
            last = last or next(fallback_batches, None)
            if last is None:
                raise UserError("a process has no rows on this day; use fewer --processes")
            batch = last.as_padding()
        last = batch
        yield batch, rows / dist.get_world_size()


def _sum_over_processes(value: int) -> int:
    """The sum of a number over all processes; a collective call."""
    if dist.get_world_size() == 1:
        return value
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)
