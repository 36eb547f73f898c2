"""Bytes that a process hands to collectives, by what kind they are: counted, not estimated."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = "c10d"


class Moved(TorchDispatchMode):
    """While inside, counts the bytes of the tensors that each kind of collective sends."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count a collective, and do it."""
        if func.namespace == COLLECTIVES:
            name = func._schema.name.partition("::")[2].strip("_")
            sent = args[1] if name in TO_AND_FRO else args[0]
            tensors = [leaf for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor)]
            self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


TO_AND_FRO = {"alltoall_base", "alltoall", "_allgather_base", "allgather", "_reduce_scatter_base"}
