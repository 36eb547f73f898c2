"""A look-up in two parts, as in TorchRec's TrainPipelineSparseDist.

The ids of the next batch are sent to the processes that hold their rows while a step computes; its
vectors are looked up in its own step, after all updates before. n ids of a table, d table width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable

from training.distributed.sharding import TorchrecTables


@dataclass(frozen=True)
class StartedLookup:
    """A look-up whose ids have been sent; `requested` are the ids (n) of each table."""

    tables: DistributedModelParallel
    context: EmbeddingCollectionContext
    ids: Awaitable[KJTList]
    requested: Mapping[str, Tensor]

    def vectors(self) -> dict[str, Tensor]:
        """The present vectors (n, d) of the ids of each table; a collective call, once."""
        ids = self.ids.wait()
        if self.tables.device.type == "cuda":
            stream = torch.cuda.current_stream()
            ids.record_stream(stream)
            self.context.record_stream(stream)
            for requested in self.requested.values():
                requested.record_stream(stream)
        tables: TorchrecTables = self.tables.module
        return tables.by_table(tables.collection.compute_and_output_dist(self.context, ids))


def start_lookup(tables: DistributedModelParallel, ids: Mapping[str, Tensor]) -> StartedLookup:
    """Send the ids (n) of each table on the current stream; a collective call.

    The host waits for the splits (numbers of ids), which are exchanged first, not for the ids.
    """
    collection = tables.module.collection
    context = collection.create_context()
    splits = collection.input_dist(context, tables.module.jagged_ids(ids))
    return StartedLookup(tables, context, splits.wait(), ids)
