"""Values of weights that may be sharded by FSDP; both functions are collective calls then."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def full_values(weight: Tensor) -> Tensor:
    """All values of a weight."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


@torch.no_grad()
def set_values(weight: Tensor, values: Tensor) -> None:
    """Replace the values of a weight in place."""
    if isinstance(weight, DTensor):
        local = distribute_tensor(values, weight.device_mesh, weight.placements).to_local()
        weight.to_local().copy_(local)
    else:
        weight.copy_(values)
