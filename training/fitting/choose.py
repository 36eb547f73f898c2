"""How strongly embeddings are held back, chosen on the validation rows.

Small tables are memorised in a few passes, large ones hardly at all: no one penalty fits both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training.fitting.fit import Examples, FitConfig, Learner, Scored, fit

PENALTIES = (1e-3, 1e-2, 1e-1, 5e-1)


@dataclass(frozen=True)
class Task:
    """What is learned: a fresh model whenever asked, rows to learn from and rows to stop by."""

    make: Callable[[], Learner]
    train: Examples
    valid: Examples

    def learn(self, config: FitConfig, seed: int) -> tuple[Learner, Scored]:
        """A model of a seed, and what its best epoch scored on the validation rows."""
        torch.manual_seed(seed)
        model = self.make()
        return model, fit(model, self.train, self.valid, config, seed)


def choose(task: Task, penalties: Sequence[float] = PENALTIES) -> FitConfig:
    """The penalty that is best on the validation rows."""
    tried = []
    for penalty in penalties:
        config = FitConfig(penalty=penalty)
        tried.append((task.learn(config, seed=0)[1].worth, -penalty, config))
    return max(tried, key=lambda t: t[:2])[2]
