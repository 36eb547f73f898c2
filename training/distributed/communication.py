"""Counters of the bytes that a process sends in collectives and of its embedding look-ups."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.model.embeddings import EmbeddingTables

COLLECTIVES = "c10d"
INPUT_IS_SECOND_ARGUMENT = {
    "alltoall_base",
    "allgather",
    "_allgather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
}
FLOAT_BYTES, INT_BYTES = 4, 8


class CommunicationCounter(TorchDispatchMode):
    """Context manager that counts the bytes sent by each kind of collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count the input of a collective, then run it."""
        if func.namespace == COLLECTIVES:
            name = func._schema.name.partition("::")[2].removesuffix("_")
            inputs = args[1] if name in INPUT_IS_SECOND_ARGUMENT else args[0]
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


@dataclass
class LookupCounter:
    """Embedding tables that count look-ups and their ids."""

    tables: EmbeddingTables
    calls: int = 0
    ids: int = 0

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        self.calls += 1
        self.ids += sum(map(len, ids.values()))
        return self.tables(ids)


def expected_all_to_all_bytes(
    calls: int, ids: int, tables: int, width: int, group_size: int
) -> int:
    """Bytes of all all-to-alls of table-wise sharded tables (2508.03854, section 3).

    A look-up sends the ids, their number by table, and three numbers for each process of the group;
    a row is returned for each id, and its gradient is sent back.

    Args:
        calls: Number of look-ups of all processes.
        ids: Number of ids of all look-ups.
        tables: Number of tables.
        width: Width of the tables.
        group_size: Processes that share a copy of the tables.
    """
    if group_size == 1:
        return 0
    rows_and_gradients = 2 * ids * width * FLOAT_BYTES
    lengths = calls * INT_BYTES * (tables + 3 * group_size)
    return rows_and_gradients + ids * INT_BYTES + lengths
