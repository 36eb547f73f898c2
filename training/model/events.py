"""Events as tokens. N events, d width of a table, W width of a token."""

import torch
from torch import Tensor, nn

from training.data.batch import History

DWELLS = 128
AGES = 160
STEPS_PER_E_FOLD = 10  # a step of age is a tenth of ln: 10 %


def age_bucket(seconds: Tensor) -> Tensor:
    """Logarithmic bucket of an age in seconds: equal ratios, 10 % each, the last is 100 days."""
    steps = torch.log(seconds.clamp(min=1).float()) * STEPS_PER_E_FOLD
    return steps.long().clamp(max=AGES - 1)


class EventTokens(nn.Module):
    """What happened, to which item, where, for how long and how long ago: (N, W)."""

    def __init__(
        self, tables: int, table_width: int, vectors: int, surfaces: int, types: int, width: int
    ) -> None:
        super().__init__()
        self.surface = nn.Embedding(surfaces + 1, width)
        self.action = nn.Embedding(types + 1, width)
        self.dwell = nn.Embedding(DWELLS, width)
        self.age = nn.Embedding(AGES, width)
        self.item = nn.Linear(tables * table_width + vectors, width)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU())
        self.norm = nn.LayerNorm(width)

    def forward(self, history: History, vectors: dict[str, Tensor], at: Tensor) -> Tensor:
        """The events at some positions (P) as tokens (P, W); `vectors` (P, d) are their items'."""
        item = item_input(vectors, {name: v[at] for name, v in history.item_vectors.items()})
        happened = (history.types, history.surfaces, history.dwells, history.ages)
        return self.tokens(self.item(item), *(column[at] for column in happened))

    def tokens(
        self, item: Tensor, types: Tensor, surfaces: Tensor, dwells: Tensor, ages: Tensor
    ) -> Tensor:
        """Projected items (…, W), and what happened to them and when (…), as tokens (…, W)."""
        token = item + self.action(types)
        token = token + self.surface(surfaces) + self.dwell(dwells)
        token = token + self.age(age_bucket(ages))
        return self.norm(token + self.mix(token))


def item_input(vectors: dict[str, Tensor], given: dict[str, Tensor]) -> Tensor:
    """Table vectors and given vectors of items, side by side (n, tables * d + vectors)."""
    return torch.cat([*(vectors[name] for name in sorted(vectors)), *given.values()], 1)
