"""Training of binary classifiers on files, with Adam and early stopping (BARS, 2205.09626).

The learning rate is lowered when the validation score stops improving. The L2 penalty of embeddings
is selected on the validation rows: small tables are memorized in a few epochs, large ones hardly
at all, so no single penalty fits both.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm

from etl.array_types import Float64
from etl.spec.base import StrictModel
from training.trainer.average import EmaModel

Inputs = tuple[Any, ...]
MEMBERS = 2  # of the models of `bench tabular` and `bench sequence`


class BinaryClassifier(nn.Module):
    """A model with one logit, and the embedding weights that are regularized more."""

    @property
    def embeddings(self) -> Sequence[Tensor]:
        """Weights of single feature values, which memorize."""
        raise NotImplementedError

    def loss(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """Binary cross-entropy of a batch with labels (B)."""
        return F.binary_cross_entropy_with_logits(self(*inputs), labels)


class Ensemble(BinaryClassifier):
    """Models that differ in their initial weights and are trained at once, each on its own loss.

    The logit is the mean of theirs: their errors differ, and one mean loss would train them to
    correct each other instead (2410.24210).
    """

    def __init__(self, make_member: Callable[[], BinaryClassifier], members: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(make_member() for _ in range(members))

    @property
    def embeddings(self) -> Sequence[Tensor]:
        """Weights of single feature values of all members."""
        return [weight for member in self._models() for weight in member.embeddings]

    def forward(self, *inputs: Any) -> Tensor:
        """The mean logit of the members (B)."""
        return torch.stack([member(*inputs) for member in self.members]).mean(0)

    def loss(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """The sum of the members' losses."""
        return torch.stack([member.loss(inputs, labels) for member in self._models()]).sum()

    def _models(self) -> list[BinaryClassifier]:
        return [member for member in self.members if isinstance(member, BinaryClassifier)]


class ExampleSource(Protocol):
    """Rows to train on or to score, in batches."""

    def shuffled(self, generator: torch.Generator) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels (B) of all rows once, in a random order of the generator."""
        ...

    def in_order(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels (B) of all rows once, always in the same order."""
        ...


class FitConfig(StrictModel):
    """Hyperparameters. `embedding_l2` is the weight decay of all embeddings, in every step."""

    learning_rate: float = 1e-3
    embedding_l2: float = 1e-2
    max_lr_reductions: int = 2
    epochs: int = 100


@dataclass(frozen=True)
class BinaryMetrics:
    """AUC and logloss (nats) of predictions."""

    auc: float
    logloss: float

    @property
    def selection_score(self) -> float:
        """The model selection score: AUC and logloss together."""
        return self.auc - self.logloss


def fit(
    model: BinaryClassifier,
    train: ExampleSource,
    valid: ExampleSource,
    config: FitConfig,
    seed: int,
) -> BinaryMetrics:
    """Train until `max_lr_reductions` do not improve it, then load the best weights.

    Weights are evaluated as exponential moving averages over steps, which are less noisy.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = _optimizer(model, config)
    ema = EmaModel(model)
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
    scheduler = ReduceLROnPlateau(optimizer, "max", factor=0.1, patience=0, threshold=1e-6)
    best, best_weights, epochs_without_gain = None, None, 0
    progress = tqdm(range(config.epochs), unit="epoch", leave=False)
    for _ in progress:
        _train_epoch(model, train, optimizer, generator)
        metrics = binary_metrics(*predict(ema, valid))
        scheduler.step(metrics.selection_score)
        if best is None or metrics.selection_score > best.selection_score:
            best, epochs_without_gain = metrics, 0
            best_weights = copy.deepcopy(ema.module.state_dict())
        else:
            epochs_without_gain += 1
        progress.set_postfix(auc=f"{best.auc:.4f}", logloss=f"{best.logloss:.4f}")
        if epochs_without_gain > config.max_lr_reductions:
            break
    assert best is not None and best_weights is not None
    model.load_state_dict(best_weights)
    return best


def _optimizer(model: BinaryClassifier, config: FitConfig) -> torch.optim.Adam:
    embedding_ids = {id(p) for p in model.embeddings}
    groups: list[dict[str, Any]] = [
        {"params": list(model.embeddings), "weight_decay": config.embedding_l2},
        {"params": [p for p in model.parameters() if id(p) not in embedding_ids]},
    ]
    return torch.optim.Adam(groups, lr=config.learning_rate, fused=True)


def _train_epoch(
    model: BinaryClassifier,
    examples: ExampleSource,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    model.train()
    for inputs, labels in examples.shuffled(generator):
        loss = model.loss(inputs, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def predict(model: nn.Module, examples: ExampleSource) -> tuple[Float64, Float64]:
    """Probabilities and labels (B) of all rows, in order."""
    model.eval()
    batches = [(model(*inputs).sigmoid(), labels) for inputs, labels in examples.in_order()]
    predicted, labels = (torch.cat(parts).double().numpy() for parts in zip(*batches, strict=True))
    return predicted, labels


def binary_metrics(predicted: Float64, labels: Float64) -> BinaryMetrics:
    """AUC and logloss of probabilities (B) against labels (B)."""
    return BinaryMetrics(
        float(roc_auc_score(labels, predicted)), float(log_loss(labels, predicted))
    )


EMBEDDING_L2_GRID = (1e-3, 1e-2, 1e-1, 5e-1)


@dataclass(frozen=True)
class TrainingTask:
    """A model architecture, the rows to train on and the rows that decide when to stop."""

    make_model: Callable[[], BinaryClassifier]
    train: ExampleSource
    valid: ExampleSource

    def fit(self, config: FitConfig, seed: int) -> tuple[BinaryClassifier, BinaryMetrics]:
        """A trained model, and the metrics of its best epoch on the validation rows."""
        torch.manual_seed(seed)
        model = self.make_model()
        return model, fit(model, self.train, self.valid, config, seed)


def select_embedding_l2(
    task: TrainingTask, candidates: Sequence[float] = EMBEDDING_L2_GRID
) -> FitConfig:
    """The configuration with the best penalty on the validation rows; the least of equal ones."""
    scores = {}
    for penalty in sorted(candidates):
        _, metrics = task.fit(FitConfig(embedding_l2=penalty), seed=0)
        scores[penalty] = metrics.selection_score
    return FitConfig(embedding_l2=max(scores, key=lambda penalty: scores[penalty]))
