"""Request-shaped batches, negative sampling, and the order of an epoch.

Request data is stored once, and rows refer to it. R requests, B impressions (rows), N events of all
histories, O objectives, A extra labels.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from etl.array_types import Bools, Float32, Int64
from training.data.tensor_fields import TensorFields
from training.ops.ragged import last_positions


@dataclass(frozen=True)
class History(TensorFields):
    """Ragged histories (N events) of R requests, oldest event first, cut by `offsets` (R+1).

    `age_seconds` (N) count from the visibility time of an event, and are at least 1. `attributes`
    (N) are codes by column, 0 where missing.
    """

    offsets: Tensor
    item_index: Tensor
    surfaces: Tensor
    types: Tensor
    dwells: Tensor
    age_seconds: Tensor
    attributes: dict[str, Tensor]
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
class Batch(TensorFields):
    """A batch of R requests with B impressions; the impressions of a request are consecutive.

    Attributes:
        request_index: (B) The request of each impression.
        as_of: (R) Time of the request, in epoch seconds.
        user_hash: (R) Hash of `user_ids`, not negative, the same on every machine.
        user_categorical: Features of the user, each (R).
        user_numeric: (R, F) Features of the user.
        user_vectors: Vector features of the user, each (R, d).
        row_categorical: Features of the item and of the context, each (B).
        row_numeric: (B, F) Features of the item, of the context, and counters.
        row_vectors: Vector features of the item, each (B, d).
        context_vectors: Vector features of the context, each (B, d).
        history: Events of the user before the request.
        labels: (B, O) 0 or 1.
        label_mask: (B, O) Final labels to train or evaluate on.
        outcome_values: (B, O) Values of the outcomes, 0 if there are none.
        extra_labels: (B, A) Labels of auxiliary objectives or, with window mixing, of extra
            windows: 0 or 1, or ln(1 + seconds of dwell); A is 0 except in training.
        extra_mask: (B, A) Final extra labels to train on.
        swap_weights: (B, 2) Weights of the impression as the upper and as the lower one of two
            neighbouring positions (`neighbour_swap_weights`); 0 except in training of rankers.
        is_repeated: Whether the rows were trained on before, in an earlier pass.
        is_padding: Whether it is trained only because other processes have further batches.
        selection: The events that a model reads, if they were selected where the batch was read.
    """

    request_index: Tensor
    as_of: Tensor
    surface: Tensor
    item_index: Tensor
    user_hash: Tensor
    user_categorical: dict[str, Tensor]
    user_numeric: Tensor
    user_vectors: dict[str, Tensor]
    row_categorical: dict[str, Tensor]
    row_numeric: Tensor
    row_vectors: dict[str, Tensor]
    context_vectors: dict[str, Tensor]
    history: History
    labels: Tensor
    label_mask: Tensor
    outcome_values: Tensor
    extra_labels: Tensor
    extra_mask: Tensor
    impression_ids: npt.NDArray[np.object_]
    request_ids: npt.NDArray[np.object_]
    user_ids: npt.NDArray[np.object_]
    swap_weights: Tensor = field(metadata={"derived": True})
    is_repeated: bool = False
    is_padding: bool = field(default=False, metadata={"derived": True})
    selection: TensorFields | None = field(default=None, metadata={"derived": True})

    def __len__(self) -> int:
        """Number of impressions."""
        return len(self.item_index)

    def without_labels(self) -> "Batch":
        """The same rows, of which no label is used."""
        return replace(
            self,
            label_mask=torch.zeros_like(self.label_mask),
            extra_mask=torch.zeros_like(self.extra_mask),
        )

    def as_padding(self) -> "Batch":
        """The same rows for a step that learns nothing: without labels, and without numbers.

        Missing numbers do not change running statistics.
        """
        return replace(
            self.without_labels(),
            is_padding=True,
            user_numeric=torch.full_like(self.user_numeric, torch.nan),
            row_numeric=torch.full_like(self.row_numeric, torch.nan),
        )


def batch_digest(batch: Batch) -> str:
    """SHA-256 of the arrays of a batch, to check that it is rebuilt exactly.

    What is derived from them and from a model's configuration does not count.
    """
    sha = hashlib.sha256()
    _update_hash(sha, batch)
    return sha.hexdigest()


def _update_hash(sha: "hashlib._Hash", value: object) -> None:
    if isinstance(value, torch.Tensor):
        array = value.contiguous().numpy()
        sha.update(f"{array.dtype}{array.shape}".encode())
        sha.update(array.data)
    elif isinstance(value, np.ndarray):
        sha.update("\x1f".join(value).encode())
    elif isinstance(value, dict):
        for name, inner in value.items():
            sha.update(name.encode())
            _update_hash(sha, inner)
    elif isinstance(value, bool):
        sha.update(bytes([value]))
    else:
        assert isinstance(value, Batch | History)
        for part in fields(value):
            if "derived" not in part.metadata:
                _update_hash(sha, getattr(value, part.name))


MAX_BATCH_EVENTS = 2**19  # event tokens of width 64 then take 128 MB


@dataclass(frozen=True)
class NegativeSampling:
    """Random sampling of each objective's negatives, at `rates` (O).

    The loss corrects for it, so that predictions stay unbiased: `training.trainer.step.Loss`.
    """

    rates: tuple[float, ...]
    seed: int

    def __call__(self, labels: Float32, label_mask: Bools, *salt: int) -> Bools:
        """The mask (B, O) without negatives that are not sampled; all positives are kept."""
        draws = np.random.default_rng([self.seed, *salt]).random(labels.shape)
        return label_mask & ((labels > 0) | (draws < self.rates))


@dataclass(frozen=True)
class Shuffle:
    """The order of an epoch: random, determined by a seed; with None the stored order.

    Further passes over the same rows have an order of their own, by their number.
    """

    seed: int | None
    epoch: int = 0

    def __call__(self, values: Int64, *salt: int) -> Int64:
        """The values in the order of the seed and the salt."""
        if self.seed is None:
            return values
        epoch = [self.epoch] if self.epoch else []
        return np.random.default_rng([self.seed, *salt, *epoch]).permutation(values)

    def split(self, sizes: Int64, events: Int64, rows: int, *salt: int) -> list[Int64]:
        """The requests (R) of each batch, batches of about `rows` rows and of even cost.

        `sizes` and `events` (R) are the rows and the history events of each request. Batches with
        long histories have fewer rows; each has a request at least.
        """
        batches_for_events = -(-int(events.sum()) // MAX_BATCH_EVENTS)
        count = max(1, round(sizes.sum() / rows), batches_for_events)
        requests = np.arange(len(sizes))
        if self.seed is None:
            is_heavy = events.sum() > MAX_BATCH_EVENTS
            return split_by_cost(requests, sizes + events if is_heavy else sizes, count)
        shuffled = self(requests, *salt)
        batches = balance_by_cost(shuffled, (sizes + events)[shuffled], min(count, len(sizes)))
        return [batches[i] for i in self(np.arange(len(batches)), *salt, 1)]


def split_by_cost(requests: Int64, cost: Int64, count: int) -> list[Int64]:
    """Consecutive parts of about the same total `cost`; costs are given per request."""
    cumulative = np.cumsum(cost)
    edges = np.searchsorted(cumulative, cumulative[-1] * np.arange(1, count) / count, side="right")
    return [part for part in np.split(requests, edges) if len(part)]


def balance_by_cost(requests: Int64, cost: Int64, count: int) -> list[Int64]:
    """Parts of about the same size and total cost: dealt in snake order, the costliest first."""
    order = np.argsort(-cost, kind="stable")
    turn, position = np.divmod(np.arange(len(requests)), count)
    part = np.where(turn % 2, count - 1 - position, position)
    dealt = requests[order][np.argsort(part, kind="stable")]
    return np.split(dealt, np.cumsum(np.bincount(part, minlength=count))[:-1])


@dataclass(frozen=True)
class InputStatistics:
    """Sampled numbers, of rows (n, F) and users (n, U), and means of labels.

    `base_rates` (O) are those of objectives, NaN for those without final labels; `auxiliary_means`
    (A) may be of dwells, too.
    """

    row_numeric: Tensor
    user_numeric: Tensor
    base_rates: Tensor
    auxiliary_means: Tensor
