"""A request-shaped batch: what belongs to a request is there once, candidates point at it.

R requests, B impressions (rows), N events of all histories, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.ragged import newest


@dataclass(frozen=True)
class History:
    """Ragged histories (N events) of R requests, oldest first, cut by `offsets` (R+1).

    `ages` are seconds from the event's visibility to the request, at least 1.
    """

    offsets: Tensor
    items: Tensor
    surfaces: Tensor
    types: Tensor
    dwells: Tensor
    ages: Tensor
    item_ids: dict[str, Tensor]
    item_vectors: dict[str, Tensor]

    @property
    def positions(self) -> Tensor:
        """Positions of all events (N)."""
        return torch.arange(len(self.items), device=self.items.device)

    def newest(self, most: int, types: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Positions (n) of the last `most` events of each request, and their offsets (R+1).

        With `types` only events of those are counted and returned.
        """
        if not types:
            return newest(self.offsets, most)
        wanted = torch.isin(self.types, torch.tensor(types, device=self.types.device))
        at, cuts = newest(F.pad(wanted.cumsum(0), (1, 0))[self.offsets], most)
        return wanted.nonzero().flatten()[at], cuts


@dataclass(frozen=True)
class Batch:
    """`as_of` (seconds), `user*` and `requests` have R rows, the rest B; labels, known and
    values (B, O). Rows of a request lie together.

    `user` is a hash of the name in `users`, at least 0, the same everywhere. `known` marks labels
    whose window has closed and that are trained or evaluated now; `values` are what outcomes were
    worth, 0 where not told.
    """

    request: Tensor
    as_of: Tensor
    surface: Tensor
    item: Tensor
    user: Tensor
    user_ids: dict[str, Tensor]
    user_numbers: Tensor
    row_ids: dict[str, Tensor]
    row_numbers: Tensor
    row_vectors: dict[str, Tensor]
    history: History
    labels: Tensor
    known: Tensor
    values: Tensor
    impressions: npt.NDArray[np.object_]
    requests: npt.NDArray[np.object_]
    users: npt.NDArray[np.object_]

    def __len__(self) -> int:
        """Number of impressions."""
        return len(self.item)
