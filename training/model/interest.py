"""How near a candidate lies to what its user has dealt with, by type of event.

B candidates, N events of R requests, T event types, V width of the given vector, d row width.
"""

import torch
from torch import Tensor, nn

from training.data.batch import Batch, History
from training.model.events import AGES, DWELLS, age_bucket
from training.ops.ragged import group_of_each

PRIOR = 3.0  # as many events of a vector of zeros: few events tell little


class Interest(nn.Module):
    """Products of a candidate's given vector with the mean one of each type of its user's events.

    Softmax attention says which past items are like the candidate, not how much the user likes
    such items: its weights always sum to one (DIN keeps the sum for that, 1706.06978, section
    4.3). A weighted mean over the whole history says it, at the cost of one pass over its vectors.
    """

    def __init__(self, vector: str, given: int, types: int, width: int) -> None:
        super().__init__()
        self.vector = vector
        self.types = types + 1
        self.dwell = nn.Parameter(torch.zeros(DWELLS))
        self.age = nn.Parameter(torch.zeros(AGES))
        self.project = nn.Linear(given, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Rows (B, T, d), and the sums of their products (B, T)."""
        means = self.project(self.means(batch.history))[batch.request]
        products = self.project(batch.row_vectors[self.vector])[:, None] * means
        return self.out(products), products.sum(2)

    def means(self, history: History) -> Tensor:
        """Mean vectors (R, T, V) by type of event; dwell and age of an event give its weight."""
        seen, requests = history.item_vectors[self.vector], len(history.offsets) - 1
        cell = group_of_each(history.offsets) * self.types + history.types
        weight = torch.exp(self.dwell[history.dwells] + self.age[age_bucket(history.ages)])
        weighed = torch.cat((seen * weight[:, None], weight[:, None]), 1)
        sums = weighed.new_zeros(requests * self.types, weighed.shape[1])
        sums = sums.index_add(0, cell, weighed)
        means = sums[:, :-1] / (sums[:, -1:] + PRIOR)
        return means.view(requests, self.types, -1)[:, 1:]
