"""Statistics of the inputs of the first training day, from which a new model is initialized.

n sampled rows, F numeric features of a row, U of a user, O objectives, A auxiliary objectives.
"""

from collections.abc import Sequence
from datetime import date

import numpy as np
import torch
from torch import Tensor

from etl.array_types import Bools, Float32
from training.data.batch import InputStatistics
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader

SAMPLE_ROWS = 20_000
PRIOR_ROWS, PRIOR_RATE = 20.0, 0.1  # keep the base rate of an objective without outcomes off zero


def input_statistics(
    reader: ExampleReader, day: date, label_window: LabelWindow
) -> InputStatistics | None:
    """Statistics of some users on a day; None if none of their labels is in the window.

    The users of a bucket are a random sample.
    """
    row_numeric, user_numeric, partitions = [], [], []
    buckets = range(reader.lake.spec.buckets)
    for _, partition in reader.partitions([day], buckets, label_window):
        counts = np.diff(partition.request_offsets)
        version = reader.items.versions_at(partition.item_index, np.repeat(partition.as_of, counts))
        row_numeric.append(np.concatenate((reader.items.numeric[version], partition.numeric), 1))
        user_numeric.append(partition.user_numeric)
        partitions.append(partition)
        if sum(map(len, row_numeric)) >= SAMPLE_ROWS:
            break
    if not row_numeric:
        return None
    return InputStatistics(
        row_numeric=torch.from_numpy(np.concatenate(row_numeric)),
        user_numeric=torch.from_numpy(np.concatenate(user_numeric)),
        base_rates=_mean_labels([(p.labels, p.label_mask) for p in partitions]),
        auxiliary_means=_mean_labels([(p.auxiliary_labels, p.auxiliary_mask) for p in partitions]),
    )


def _mean_labels(parts: Sequence[tuple[Float32, Bools]]) -> Tensor:
    """The mean (O) of labels (n, O) where their mask (n, O) is true, shrunk to the prior rate."""
    labels, mask = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    totals = (labels * mask).sum(0) + PRIOR_ROWS * PRIOR_RATE
    return torch.from_numpy(totals / (mask.sum(0) + PRIOR_ROWS)).float()
