"""Statistics of the inputs of the first training day, from which a new model is initialized.

n sampled rows, F numeric features of a row, U of a user, O objectives, A auxiliary objectives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

import numpy as np
import torch
from torch import Tensor

from etl.array_types import Bools, Float32
from training.data.batch import InputStatistics
from training.data.label_window import LabelWindow
from training.data.partition import ExamplePartition
from training.data.reader import ExampleReader

SAMPLE_ROWS = 20_000
PRIOR_ROWS, PRIOR_RATE = 1.0, 0.1  # keep the base rate of an objective without outcomes off zero


def input_statistics(
    reader: ExampleReader, day: date, label_window: LabelWindow
) -> InputStatistics | None:
    """Statistics of some users on a day, at most SAMPLE_ROWS numbers of each feature.

    None if the day has no rows. The users of a bucket are a random sample. Inputs are of all their
    rows, since those of slow objectives have no label yet; base rates are of labels in the window.
    """
    row_numeric, user_numeric = [], []
    all_rows = replace(label_window, include_unlabelled=True)
    partitions = list(_sample_partitions(reader, [day], all_rows))
    for partition in partitions:
        counts = np.diff(partition.request_offsets)
        version = reader.items.versions_at(partition.item_index, np.repeat(partition.as_of, counts))
        row_numeric.append(np.concatenate((reader.items.numeric[version], partition.numeric), 1))
        user_numeric.append(partition.user_numeric)
    if not partitions:
        return None
    labelled = list(_sample_partitions(reader, [day], label_window)) or partitions
    return InputStatistics(
        row_numeric=torch.from_numpy(even_sample(np.concatenate(row_numeric))),
        user_numeric=torch.from_numpy(even_sample(np.concatenate(user_numeric))),
        base_rates=_base_rates(labelled),
        auxiliary_means=mean_labels([(p.extra_labels, p.extra_mask) for p in labelled]),
    )


def even_sample(values: Float32) -> Float32:
    """At most SAMPLE_ROWS rows of values (n, F), spread evenly: a bucket may have millions."""
    count = min(len(values), SAMPLE_ROWS)
    return values[np.arange(count) * len(values) // max(count, 1)]


def base_rates(reader: ExampleReader, days: Sequence[date], label_window: LabelWindow) -> Tensor:
    """The rate (O) of each objective, of some users on several days; NaN without final labels."""
    partitions = list(_sample_partitions(reader, days, label_window))
    if not partitions:
        return torch.full((len(reader.lake.spec.objectives),), torch.nan)
    return _base_rates(partitions)


def _sample_partitions(
    reader: ExampleReader, days: Sequence[date], label_window: LabelWindow
) -> Iterator[ExamplePartition]:
    """The first buckets with SAMPLE_ROWS rows or more, complete."""
    rows, buckets = 0, range(reader.lake.spec.buckets)
    for _, partition in reader.partitions(days, buckets, label_window):
        yield partition
        rows += len(partition.item_index)
        if rows >= SAMPLE_ROWS:
            break


def _base_rates(partitions: Sequence[ExamplePartition]) -> Tensor:
    """The rate (O) of each objective; NaN for those without final labels, which take days."""
    rates = mean_labels([(p.labels, p.label_mask) for p in partitions])
    has_labels = np.any([p.label_mask.any(0) for p in partitions], axis=0)
    return torch.where(torch.from_numpy(has_labels), rates, torch.nan)


def mean_labels(parts: Sequence[tuple[Float32, Bools]]) -> Tensor:
    """The mean (O) of labels (n, O) where their mask (n, O) is true, shrunk to the prior rate."""
    labels, mask = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    totals = (labels * mask).sum(0) + PRIOR_ROWS * PRIOR_RATE
    return torch.from_numpy(totals / (mask.sum(0) + PRIOR_ROWS)).float()
