"""Transfer ratios: a student's share of GEM's gain over labels only, and its ratio to plain's.

U users, D draws of users and seeds, M models, S seeds of a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etl.array_types import Float64, Int64
from training.evaluation.predictions import ConfidenceInterval, Predictions

RESAMPLES = 1000
LABELS_ONLY, PLAIN_DISTILLATION, GEM = "labels only", "plain distillation", "GEM"


@dataclass(frozen=True)
class TransferRatios:
    """NE by objective of each model; shares of GEM's gain, and ratios to plain distillation's gain.

    A ratio is None if the interval of its denominator contains zero. `gains` (D, O) are those of
    each model over labels only, of draws of which the first has each user and each seed once.
    """

    objectives: Sequence[str]
    ne: dict[str, list[float]]
    gains: dict[str, Float64]
    share_of_gem_gain: dict[str, ConfidenceInterval | None]
    ratio_to_plain: dict[str, ConfidenceInterval | None]

    def kept_by_objective(self, name: str) -> dict[str, ConfidenceInterval | None]:
        """A student's share of GEM's gain, by objective."""
        return {
            objective: ratio_interval(self.gains[name][:, i], self.gains[GEM][:, i])
            for i, objective in enumerate(self.objectives)
        }

    def gain_over(self, name: str, other: str) -> ConfidenceInterval:
        """How much lower a student's NE is than another's, mean of objectives."""
        difference = (self.gains[name] - self.gains[other]).mean(1)
        low, high = np.quantile(difference[1:], (0.025, 0.975))
        return ConfidenceInterval(float(difference[0]), float(low), float(high))


def transfer_ratios(
    predictions: Mapping[str, Sequence[Predictions]], gem: Predictions, objectives: Sequence[str]
) -> TransferRatios:
    """Means over seeds; bootstrap intervals over users and seeds.

    Draws of users are the same for all models, those of seeds are of each model. Of S seeds, the
    draws have (S - 1) / S of the variance of seeds.
    """
    models = {**predictions, GEM: [gem]}
    names = list(models)
    users = np.unique(gem.user_hashes)
    num_users = len(users)
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(num_users, np.full(num_users, 1 / num_users), RESAMPLES)
    weights: Float64 = np.concatenate((np.ones((1, num_users)), drawn))
    seed_weights = [draw_seeds(len(seeds), RESAMPLES, rng) for seeds in models.values()]
    by_objective = [
        weighted_ne(models, seed_weights, users, weights, i) for i in range(len(objectives))
    ]
    ne = np.stack(by_objective, 2)
    ne_gain = ne[:, [names.index(LABELS_ONLY)]] - ne
    gains = dict(zip(names, ne_gain.mean(2).T, strict=True))
    students = [name for name in predictions if name != LABELS_ONLY]
    return TransferRatios(
        objectives=objectives,
        gains={name: ne_gain[:, i] for i, name in enumerate(names)},
        ne={name: list(ne[0, i]) for i, name in enumerate(names)},
        share_of_gem_gain={name: ratio_interval(gains[name], gains[GEM]) for name in students},
        ratio_to_plain={
            name: ratio_interval(gains[name], gains[PLAIN_DISTILLATION])
            for name in students
            if name != PLAIN_DISTILLATION
        },
    )


def draw_seeds(seeds: int, draws: int, rng: np.random.Generator) -> Float64:
    """Weights of seeds (1 + draws, S): first each once, then drawn with replacement."""
    drawn = rng.multinomial(seeds, np.full(seeds, 1 / seeds), draws)
    counts: Float64 = np.concatenate((np.ones((1, seeds)), drawn))
    return counts / seeds


def weighted_ne(
    models: Mapping[str, Sequence[Predictions]],
    seed_weights: Sequence[Float64],
    users: Int64,
    weights: Float64,
    column: int,
) -> Float64:
    """NE of an objective (D, M), with weights of users (D, U) and of each model's seeds (D, S)."""
    first = next(iter(models.values()))[0]
    rows = first.label_mask[:, column]
    labels = first.labels[rows, column].astype(np.float64)
    user = np.searchsorted(users, first.user_hashes[rows])

    def weighted_sum(values: Float64) -> Float64:
        return weights @ np.bincount(user, values, len(users))

    count = weighted_sum(np.ones(len(labels)))
    share = weighted_sum(labels) / count
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    columns = []
    for seeds, of_seeds in zip(models.values(), seed_weights, strict=True):
        losses = []
        for p in seeds:
            assert (p.impression_ids == first.impression_ids).all(), "predictions of different rows"
            predicted = np.clip(p.probabilities[rows, column], 1e-12, 1 - 1e-12)
            likelihood = np.where(labels > 0, predicted, 1 - predicted)
            losses.append(weighted_sum(-np.log(likelihood)))
        columns.append((of_seeds * np.stack(losses, 1)).sum(1) / (count * entropy))
    return np.stack(columns, 1)


def ratio_interval(gain: Float64, denominator: Float64) -> ConfidenceInterval | None:
    """The ratio of two gains (D), and its 95 % interval; None if the denominator's contains zero.

    The first draw is the point estimate: all users, once each.
    """
    low, high = np.quantile(denominator[1:], (0.025, 0.975))
    if low <= 0 <= high:
        return None
    ratios = gain / denominator
    low, high = np.quantile(ratios[1:], (0.025, 0.975))
    return ConfidenceInterval(float(ratios[0]), float(low), float(high))
