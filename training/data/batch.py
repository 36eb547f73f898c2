"""Request-shaped batches: request data is stored once, and rows refer to it.

R requests, B impressions (rows), N events of all histories, O objectives.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.ragged import last_positions


@dataclass(frozen=True)
class History:
    """Ragged histories (N events) of R requests, oldest event first, cut by `offsets` (R+1).

    `age_seconds` (N) count from the visibility time of an event, and are at least 1.
    """

    offsets: Tensor
    item_index: Tensor
    surfaces: Tensor
    types: Tensor
    dwells: Tensor
    age_seconds: Tensor
    item_categorical: dict[str, Tensor]
    item_vectors: dict[str, Tensor]

    @property
    def positions(self) -> Tensor:
        """Positions of all events (N)."""
        return torch.arange(len(self.item_index), device=self.item_index.device)

    def latest(self, max_events: int, types: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Positions (n) of the last `max_events` events of each request, and their offsets (R+1).

        With `types`, only events of these types are counted and returned.
        """
        if not types:
            return last_positions(self.offsets, max_events)
        selected = torch.isin(self.types, torch.tensor(types, device=self.types.device))
        selected_offsets = F.pad(selected.cumsum(0), (1, 0))[self.offsets]
        positions, offsets = last_positions(selected_offsets, max_events)
        return selected.nonzero().flatten()[positions], offsets


@dataclass(frozen=True)
class Batch:
    """A batch of R requests with B impressions; the impressions of a request are consecutive.

    Attributes:
        request_index: (B) The request of each impression.
        as_of: (R) Time of the request, in epoch seconds.
        user_hash: (R) Hash of `user_ids`, not negative, the same on every machine.
        user_categorical: Features of the user, each (R).
        user_numeric: (R, F) Features of the user.
        row_categorical: Features of the item and of the context, each (B).
        row_numeric: (B, F) Features of the item, of the context, and counters.
        row_vectors: Vector features of the item, each (B, d).
        history: Events of the user before the request.
        labels: (B, O) 0 or 1.
        label_mask: (B, O) Final labels to train or evaluate on.
        outcome_values: (B, O) Values of the outcomes, 0 if there are none.
    """

    request_index: Tensor
    as_of: Tensor
    surface: Tensor
    item_index: Tensor
    user_hash: Tensor
    user_categorical: dict[str, Tensor]
    user_numeric: Tensor
    row_categorical: dict[str, Tensor]
    row_numeric: Tensor
    row_vectors: dict[str, Tensor]
    history: History
    labels: Tensor
    label_mask: Tensor
    outcome_values: Tensor
    impression_ids: npt.NDArray[np.object_]
    request_ids: npt.NDArray[np.object_]
    user_ids: npt.NDArray[np.object_]

    def __len__(self) -> int:
        """Number of impressions."""
        return len(self.item_index)


def batch_digest(batch: Batch) -> str:
    """SHA-256 of all arrays of a batch, to check that it is rebuilt exactly."""
    sha = hashlib.sha256()
    _update_hash(sha, batch)
    return sha.hexdigest()


def _update_hash(sha: "hashlib._Hash", value: object) -> None:
    if isinstance(value, torch.Tensor):
        array = value.contiguous().numpy()
        sha.update(f"{array.dtype}{array.shape}".encode())
        sha.update(array.tobytes())
    elif isinstance(value, np.ndarray):
        sha.update("\x1f".join(value).encode())
    elif isinstance(value, dict):
        for name, inner in value.items():
            sha.update(name.encode())
            _update_hash(sha, inner)
    else:
        assert isinstance(value, Batch | History)
        for field in fields(value):
            _update_hash(sha, getattr(value, field.name))
