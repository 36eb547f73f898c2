"""Which processes hold a table's shards between them, and which hold the same shard again.

T processes, M replica groups, L = T / M processes in a group.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from etl.errors import UserError

REPLICATE, SHARD = "replicate", "shard"


def mesh_of(groups: int) -> DeviceMesh:
    """The mesh (M, L) of all processes: row i is group i, processes i, M + i, 2 M + i and so on.

    Copies of a shard so lie on neighbours, which share a machine (2508.03854, section 3). Raises
    UserError where the processes can't be split evenly.
    """
    world = dist.get_world_size()
    if world % groups:
        raise UserError(f"--spread.groups {groups}: {world} processes can't be split evenly so")
    ranks = torch.arange(world).view(world // groups, groups).T.contiguous()
    return DeviceMesh("cpu", ranks, mesh_dim_names=(REPLICATE, SHARD))
