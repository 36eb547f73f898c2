"""The student's inputs as tensors, and what its two programs tell each other.

R requests, L events, K impressions of before, T event types, P paces, W event width, H hidden
width, M attributes compared.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from features.inputs import ITEM
from ranking.inputs import Ids
from training.model.lookup import Tables


class State(NamedTuple):
    """What a request tells its candidates: computed once for all of them."""

    keys: Tensor
    values: Tensor
    there: Tensor
    liked: Tensor
    seen_alike: Tensor
    fading: Tensor
    told: Tensor
    before_keys: Tensor
    before_values: Tensor
    before_seen_alike: Tensor
    before_there: Tensor


class Gather:
    """Rows of embedding tables side by side; in training some items are made unknown."""

    def __init__(self, tables: Tables, dropout: float = 0.0) -> None:
        self.tables, self.dropout = tables, dropout

    def __call__(self, ids: Ids, given: np.ndarray) -> Tensor:
        """Vectors (…, tables * d), and `given` ones (…, V) behind them."""
        rows = {name: torch.from_numpy(index) for name, index in ids.items()}
        if self.dropout and ITEM in rows:
            kept = torch.rand(rows[ITEM].shape) >= self.dropout
            rows[ITEM] = rows[ITEM] * kept
        found = self.tables(rows)
        return torch.cat([*(found[name] for name in sorted(found)), torch.from_numpy(given)], -1)
