"""Learning from files: Adam, the rate lowered on a plateau, stopped early (BARS, 2205.09626)."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm

from etl.spec.base import Strict
from training.loop.average import averaged

Inputs = tuple[Any, ...]


class Learner(nn.Module):
    """A model of one logit, that knows which of its weights are of single values."""

    @property
    def embeddings(self) -> Sequence[Tensor]:
        """The weights of single values, which memorise."""
        raise NotImplementedError


class Examples(Protocol):
    """Rows that a model learns from or is scored on, in batches of its own making."""

    def shuffled(self, generator: torch.Generator) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels (B) of all rows once, in the order that a generator gives."""
        ...

    def in_order(self) -> Iterator[tuple[Inputs, Tensor]]:
        """The same in one order, always."""
        ...


class FitConfig(Strict):
    """How a file is learned. `penalty` is the L2 weight of all embeddings, in every step."""

    rate: float = 1e-3
    penalty: float = 1e-2
    lowered: int = 2
    epochs: int = 100


@dataclass(frozen=True)
class Scored:
    """AUC and logloss (nats) of predictions."""

    auc: float
    logloss: float

    @property
    def worth(self) -> float:
        """What models are chosen by: both, as either alone can be had at the other's cost."""
        return self.auc - self.logloss


def fit(model: Learner, train: Examples, valid: Examples, config: FitConfig, seed: int) -> Scored:
    """Train until the rate was lowered so often in vain; leaves the best weights in the model.

    Those are averages over the last steps, which say with less noise when to stop.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = _optimizer(model, config)
    average = averaged(model)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    plateau = ReduceLROnPlateau(optimizer, "max", factor=0.1, patience=0, threshold=1e-6)
    best, weights, vain = None, None, 0
    for _ in (bar := tqdm(range(config.epochs), unit="epoch", leave=False)):
        _epoch(model, train, optimizer, generator)
        found = scored(*predict(average, valid))
        plateau.step(found.worth)
        if best is None or found.worth > best.worth:
            best, weights, vain = found, copy.deepcopy(average.module.state_dict()), 0
        else:
            vain += 1
        bar.set_postfix(auc=f"{best.auc:.4f}", logloss=f"{best.logloss:.4f}")
        if vain > config.lowered:
            break
    assert best is not None and weights is not None
    model.load_state_dict(weights)
    return best


def _optimizer(model: Learner, config: FitConfig) -> torch.optim.Adam:
    held = {id(p) for p in model.embeddings}
    groups: list[dict[str, Any]] = [
        {"params": list(model.embeddings), "weight_decay": config.penalty},
        {"params": [p for p in model.parameters() if id(p) not in held]},
    ]
    return torch.optim.Adam(groups, lr=config.rate, fused=True)


def _epoch(
    model: Learner,
    examples: Examples,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    model.train()
    for inputs, labels in examples.shuffled(generator):
        loss = F.binary_cross_entropy_with_logits(model(*inputs), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def predict(
    model: nn.Module, examples: Examples
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Probabilities and labels (B), in order."""
    model.eval()
    parts = [(model(*inputs).sigmoid(), labels) for inputs, labels in examples.in_order()]
    predicted, labels = (torch.cat(part).double().numpy() for part in zip(*parts, strict=True))
    return predicted, labels


def scored(predicted: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]) -> Scored:
    """AUC and logloss of probabilities (B)."""
    return Scored(float(roc_auc_score(labels, predicted)), float(log_loss(labels, predicted)))
