"""Random batches: for measurements, and to compare models of two specs on the same inputs.

R requests, B rows, N events, F numeric features, A auxiliary objectives.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from features.schema import FeatureSchema
from training.data.batch import Batch, History


@dataclass(frozen=True)
class BatchShape:
    """The size of a random batch: all requests have as many rows and events."""

    requests: int
    rows_per_request: int
    events_per_request: int
    items: int


class RandomValues:
    """Random values of features, by the names of a schema."""

    def __init__(self, features: FeatureSchema, seed: int) -> None:
        self.features = features
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, upper: int, count: int) -> Tensor:
        """Integers (count) from 1 below `upper`."""
        return torch.randint(1, upper, (count,), generator=self.generator)

    def ids(self, tables: Mapping[str, int], count: int) -> dict[str, Tensor]:
        """Values (count) of categorical features; `tables` are the rows of their tables."""
        return {name: self.integers(rows, count) for name, rows in tables.items()}

    def vectors(self, widths: Mapping[str, int], count: int) -> dict[str, Tensor]:
        """Values (count, width) of vector features."""
        return {
            name: torch.randn(count, width, generator=self.generator)
            for name, width in widths.items()
        }

    def numbers(self, columns: Sequence[str], count: int) -> Tensor:
        """Values (count, F) of numeric features."""
        return torch.randn(count, len(columns), generator=self.generator)

    def auxiliary_labels(self, count: int) -> Tensor:
        """Labels (count, A) of auxiliary objectives: 0 or 1, or a positive number for a dwell."""
        targets = self.features.auxiliary_objectives.values()
        is_dwell = torch.tensor([target == "dwell" for target in targets], dtype=torch.bool)
        draws = torch.rand(count, len(targets), generator=self.generator)
        return torch.where(is_dwell, 4 * draws, (draws < 0.2).float())


def random_batch(features: FeatureSchema, shape: BatchShape, seed: int = 0) -> Batch:
    """A batch of random requests, with histories of one length."""
    values, requests = RandomValues(features, seed), shape.requests
    rows, events = requests * shape.rows_per_request, requests * shape.events_per_request
    ages = values.integers(10**6, events).view(requests, -1).sort(1, descending=True).values
    history = History(
        offsets=torch.arange(requests + 1) * shape.events_per_request,
        item_index=values.integers(shape.items, events),
        surfaces=values.integers(len(features.surfaces) + 1, events),
        types=values.integers(len(features.events) + 1, events),
        dwells=values.integers(128, events),
        age_seconds=ages.flatten(),
        attributes=values.ids(features.history_attributes, events),
        item_categorical=values.ids(features.item.categorical, events),
        item_vectors=values.vectors(features.item.vectors, events),
    )
    labels = torch.rand(rows, len(features.objectives), generator=values.generator) < 0.2
    return Batch(
        request_index=torch.arange(requests).repeat_interleave(shape.rows_per_request),
        as_of=torch.zeros(requests, dtype=torch.long),
        surface=values.integers(len(features.surfaces) + 1, rows),
        item_index=values.integers(shape.items, rows),
        user_hash=values.integers(2**40, requests),
        user_categorical=values.ids(features.user.categorical, requests),
        user_numeric=values.numbers(features.user.numeric, requests),
        user_vectors=values.vectors(features.user.vectors, requests),
        row_categorical=values.ids(features.item.categorical | features.context.categorical, rows),
        row_numeric=values.numbers(features.numeric_columns, rows),
        row_vectors=values.vectors(features.item.vectors, rows),
        context_vectors=values.vectors(features.context.vectors, rows),
        history=history,
        labels=labels.float(),
        label_mask=torch.ones_like(labels),
        outcome_values=torch.zeros_like(labels, dtype=torch.float32),
        extra_labels=values.auxiliary_labels(rows),
        extra_mask=torch.ones(rows, len(features.auxiliary_objectives), dtype=torch.bool),
        impression_ids=np.arange(rows).astype(object),
        request_ids=np.arange(requests).astype(object),
        user_ids=np.arange(requests).astype(str).astype(object),
        swap_weights=torch.zeros(rows, 2),
    )


def with_features_of(
    batch: Batch, old: FeatureSchema, new: FeatureSchema, changed: Collection[str], seed: int = 1
) -> Batch:
    """The same requests as another schema has them: other codes, and values of new features.

    Values of new features, and of the `changed` columns, are random. Labels are those of the old
    objectives.
    """
    random = RandomValues(new, seed)
    surfaces, types = _codes(old.surfaces, new.surfaces), _codes(old.events, new.events)

    def kept(values: Mapping[str, Tensor], drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: values[name] if name in values and name not in changed else fresh
            for name, fresh in drawn.items()
        }

    def numbers(values: Tensor, before: Sequence[str], after: Sequence[str]) -> Tensor:
        columns = dict(zip(before, values.unbind(1), strict=True))
        fresh = dict(zip(after, random.numbers(after, len(values)).unbind(1), strict=True))
        return torch.stack(list(kept(columns, fresh).values()), 1) if after else values[:, :0]

    history, rows = batch.history, len(batch)
    events, requests = len(history.types), len(batch.as_of)
    row_tables = new.item.categorical | new.context.categorical
    item_ids = random.ids(new.item.categorical, events)
    return replace(
        batch,
        surface=surfaces[batch.surface],
        user_categorical=kept(batch.user_categorical, random.ids(new.user.categorical, requests)),
        user_numeric=numbers(batch.user_numeric, old.user.numeric, new.user.numeric),
        user_vectors=kept(batch.user_vectors, random.vectors(new.user.vectors, requests)),
        row_categorical=kept(batch.row_categorical, random.ids(row_tables, rows)),
        row_numeric=numbers(batch.row_numeric, old.numeric_columns, new.numeric_columns),
        row_vectors=kept(batch.row_vectors, random.vectors(new.item.vectors, rows)),
        context_vectors=kept(batch.context_vectors, random.vectors(new.context.vectors, rows)),
        history=replace(
            history,
            surfaces=surfaces[history.surfaces],
            types=types[history.types],
            attributes=kept(history.attributes, random.ids(new.history_attributes, events)),
            item_categorical=kept(history.item_categorical, item_ids),
            item_vectors=kept(history.item_vectors, random.vectors(new.item.vectors, events)),
        ),
    )


def _codes(before: Sequence[str], after: Sequence[str]) -> Tensor:
    """The new code of each old code; 0, the unknown one, if the name was removed."""
    codes = [1 + after.index(name) if name in after else 0 for name in before]
    return torch.tensor([0, *codes])
