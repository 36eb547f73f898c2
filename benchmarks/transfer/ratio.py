"""What share of GEM's gain a student has, and how much more than by plain distillation.

U users, D draws, M models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.loop.paired import Interval
from training.predictions import Predictions

DRAWS = 1000
LABELS, PLAIN, GEM = "labels only", "plain distillation", "GEM"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ratios:
    """NE by objective of each model; shares of GEM's gain, and those over plain distillation's.

    None where the interval of what is divided by holds zero. `kept` are the predictions.
    """

    ne: dict[str, list[float]]
    of_teacher: dict[str, Interval | None]
    to_plain: dict[str, Interval | None]
    kept: Mapping[str, Sequence[Predictions]]


def ratios(
    found: Mapping[str, Sequence[Predictions]], gem: Predictions, objectives: Sequence[str]
) -> Ratios:
    """Means over seeds; intervals over users drawn with replacement, the same for all models."""
    models = {**found, GEM: [gem]}
    users = np.unique(gem.user)
    drawn = np.random.default_rng(0).multinomial(
        len(users), np.full(len(users), 1 / len(users)), DRAWS
    )
    weights: Floats = np.concatenate((np.ones((1, len(users))), drawn))
    ne = np.stack([nes(models, users, weights, i) for i in range(len(objectives))], 2)
    names = list(models)
    gains = dict(zip(names, (ne[:, [names.index(LABELS)]] - ne).mean(2).T, strict=True))
    shares = {n: over(gains[n], gains[GEM]) for n in found if n != LABELS}
    plain = {n: over(gains[n], gains[PLAIN]) for n in found if n not in (LABELS, PLAIN)}
    points = {name: list(ne[0, n]) for n, name in enumerate(names)}
    return Ratios(points, shares, plain, found)


def nes(
    models: Mapping[str, Sequence[Predictions]], users: npt.NDArray[np.int64], weights: Floats,
    column: int,
) -> Floats:  # fmt: skip
    """NE of an objective (D, M), users weighted (D, U); means over the seeds of each model."""
    first = next(iter(models.values()))[0]
    known = first.known[:, column]
    labels = first.labels[known, column].astype(np.float64)
    user = np.searchsorted(users, first.user[known])

    def by_user(values: Floats) -> Floats:
        return weights @ np.bincount(user, values, len(users))

    rows, positives = by_user(np.ones(len(labels))), by_user(labels)
    share = positives / rows
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    columns = []
    for seeds in models.values():
        losses = []
        for p in seeds:
            assert (p.impressions == first.impressions).all(), "the models saw other rows"
            said = np.clip(p.probability[known, column], 1e-12, 1 - 1e-12)
            losses.append(by_user(-np.log(np.where(labels > 0, said, 1 - said))))
        columns.append(np.mean(losses, 0) / (rows * entropy))
    return np.stack(columns, 1)


def over(gain: Floats, other: Floats) -> Interval | None:
    """A ratio of gains: the first draw is the point; None where the other's interval holds zero."""
    low, high = np.quantile(other[1:], (0.025, 0.975))
    if low <= 0 <= high:
        return None
    found = gain / other
    return Interval(float(found[0]), *(float(x) for x in np.quantile(found[1:], (0.025, 0.975))))
