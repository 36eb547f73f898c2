"""How strongly embeddings are held back, chosen on the validation rows.

Small tables are memorised in a few passes, large ones hardly at all: no one penalty fits both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.model.config import GemConfig
from training.tabular.fit import FitConfig, Scored, fit
from training.tabular.model import Tabular
from training.tabular.table import Rows

PENALTIES = (1e-3, 1e-2, 1e-1, 5e-1)
SIZE = GemConfig(row_width=16, layers=2, fm_rows=16, linear_rows=16, rank=8, mlp=256, dropout=0.2)
STREAMS = (SIZE, SIZE.model_copy(update={"interaction": "two_streams"}))


@dataclass(frozen=True)
class Chosen:
    """A penalty, and the rows to learn."""

    sizes: Sequence[int]
    train: Rows
    valid: Rows
    config: FitConfig

    def learn(self, seed: int) -> Tabular:
        """A model of a seed."""
        return _learn(self, seed)[0]

    def __str__(self) -> str:
        """What was chosen, in words."""
        kinds = ", ".join(stream.interaction for stream in STREAMS)
        return f"{kinds}; penalty {self.config.penalty:g}"


def choose(sizes: Sequence[int], train: Rows, valid: Rows) -> Chosen:
    """The penalty that is best on the validation rows, with a seed of its own."""
    tried = []
    for penalty in PENALTIES:
        candidate = Chosen(sizes, train, valid, FitConfig(penalty=penalty))
        tried.append((_learn(candidate, seed=-1)[1].worth, -penalty, candidate))
    return max(tried, key=lambda t: t[:2])[2]


def _learn(chosen: Chosen, seed: int) -> tuple[Tabular, Scored]:
    torch.manual_seed(seed + 1)
    model = Tabular(chosen.sizes, chosen.train.numbers.shape[1], STREAMS)
    return model, fit(model, chosen.train, chosen.valid, chosen.config, seed + 1)
