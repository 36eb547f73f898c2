"""Learning a table: Adam, the rate lowered on a plateau, stopped early (BARS, 2205.09626)."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss, roc_auc_score
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm

from etl.spec.base import Strict
from training.tabular.model import Tabular
from training.tabular.table import Rows


class FitConfig(Strict):
    """How a table is learned. `penalty` is the L2 weight of all embeddings, in every step."""

    batch_rows: int = 4096
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


def fit(model: Tabular, train: Rows, valid: Rows, config: FitConfig, seed: int) -> Scored:
    """Train until the rate was lowered so often in vain; leaves the best weights in the model."""
    generator = torch.Generator().manual_seed(seed)
    held = {id(p) for p in model.embeddings}
    others = [p for p in model.parameters() if id(p) not in held]
    groups: list[dict[str, Any]] = [
        {"params": model.embeddings, "weight_decay": config.penalty},
        {"params": others},
    ]
    optimizer = torch.optim.Adam(groups, lr=config.rate, fused=True)
    plateau = ReduceLROnPlateau(optimizer, "max", factor=0.1, patience=0, threshold=1e-6)
    best, weights, vain = None, None, 0
    for _ in (bar := tqdm(range(config.epochs), unit="epoch", leave=False)):
        _epoch(model, train, config.batch_rows, optimizer, generator)
        found = scored(predict(model, valid), valid)
        plateau.step(found.worth)
        if best is None or found.worth > best.worth:
            best, weights, vain = found, copy.deepcopy(model.state_dict()), 0
        else:
            vain += 1
        bar.set_postfix(auc=f"{best.auc:.4f}", logloss=f"{best.logloss:.4f}")
        if vain > config.lowered:
            break
    assert best is not None and weights is not None
    model.load_state_dict(weights)
    return best


def _epoch(
    model: Tabular, rows: Rows, size: int, optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:  # fmt: skip
    model.train()
    for ids, numbers, labels in _batches(
        rows, size, torch.randperm(len(rows), generator=generator)
    ):
        loss = F.binary_cross_entropy_with_logits(model(ids, numbers), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def _batches(rows: Rows, size: int, order: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    held = [torch.from_numpy(part) for part in (rows.ids, rows.numbers, rows.labels)]
    for at in order.split(size):
        yield tuple(part[at] for part in held)


@torch.no_grad()
def predict(model: Tabular, rows: Rows, size: int = 16_384) -> npt.NDArray[np.float64]:
    """Probabilities (B)."""
    model.eval()
    parts = [model(*batch[:2]) for batch in _batches(rows, size, torch.arange(len(rows)))]
    return torch.cat(parts).double().sigmoid().numpy()


def scored(predicted: npt.NDArray[np.float64], rows: Rows) -> Scored:
    """AUC and logloss of probabilities (B)."""
    return Scored(
        float(roc_auc_score(rows.labels, predicted)), float(log_loss(rows.labels, predicted))
    )
