"""Bytes that a process hands to collectives, by what kind they are: counted, not estimated."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.model.lookup import Tables

COLLECTIVES = "c10d"
SECOND = {"alltoall_base", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base"}
FLOAT, INT = 4, 8  # bytes


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
            name = func._schema.name.partition("::")[2].removesuffix("_")
            sent = args[1] if name in SECOND else args[0]
            tensors = [leaf for leaf in tree_leaves(sent) if isinstance(leaf, Tensor)]
            self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


@dataclass
class Counted:
    """Tables; how many look-ups there were, and of how many ids."""

    tables: Tables
    calls: int = 0
    ids: int = 0

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        self.calls += 1
        self.ids += sum(map(len, ids.values()))
        return self.tables(ids)


def exchanged(calls: int, ids: int, tables: int, width: int, group: int) -> int:
    """Bytes of the all-to-alls of whole tables, in groups of so many processes; sums over all.

    Forth an id, how many there are of each table, and three numbers for each process of the group;
    back a row for each id, and forth its gradient. 2 n D floats: 2508.03854, section 3.
    """
    if group == 1:
        return 0
    return 2 * ids * width * FLOAT + ids * INT + calls * INT * (tables + 3 * group)
