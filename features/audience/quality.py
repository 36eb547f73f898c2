"""How good labels of data providers are, and what to buy by them to reach a target.

A labels, K classes, n combinations of labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etl.array_types import Float64
from etl.errors import UserError
from etl.spec.sections import UNKNOWN_LABEL
from features.audience.additive import AdditiveModel


def normalized_information(matrix: Float64, label_shares: Float64) -> float:
    """I(label; class) / H(class) of P(class | label) (A, K) and shares of labels (A).

    0 where labels say nothing, 1 where they determine the class.
    """
    shares = label_shares / label_shares.sum()
    marginal = shares @ matrix
    entropy = _entropy(marginal)
    conditional = float(shares @ np.array([_entropy(row) for row in matrix]))
    return (entropy - conditional) / entropy if entropy else 0.0


def _entropy(probabilities: Float64) -> float:
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


@dataclass(frozen=True)
class Purchase:
    """What to buy of a provider: its labels, the best first, and the in-target rate of them.

    `impressions` is how many are reached, `low` and `high` the 95 % interval of the rate.
    """

    provider: str
    labels: tuple[str, ...]
    impressions: float
    rate: float
    low: float
    high: float


@dataclass(frozen=True)
class Supply:
    """What can be bought: impressions and users (n) by combination of labels.

    A user counts once for each day and campaign. Labels of fewer than `min_count` users are not
    bought: their rates are noise, or tell the class of single users.
    """

    impressions: Float64
    users: Float64
    min_count: int


def rank_purchases(
    model: AdditiveModel, supply: Supply, target: Sequence[int], wanted: float
) -> list[Purchase]:
    """What to buy of each provider to reach `wanted` impressions, the best provider first.

    Providers with fewer impressions are bought completely. `target` has the columns of its classes.

    Raises:
        UserError: No provider has a label to buy.
    """
    purchases = [
        purchase
        for position in range(len(model.audits.providers))
        if (purchase := _purchase_of(model, position, supply, target, wanted))
    ]
    if not purchases:
        raise UserError(
            "the audience is empty: no known label of any provider has impressions, or as many "
            f"users as min_count ({supply.min_count})"
        )
    is_short = [purchase.impressions < wanted * (1 - 1e-9) for purchase in purchases]
    order = sorted(range(len(purchases)), key=lambda i: (is_short[i], -purchases[i].rate))
    return [purchases[i] for i in order]


def _purchase_of(
    model: AdditiveModel, position: int, supply: Supply, target: Sequence[int], wanted: float
) -> Purchase | None:
    """What to buy of a provider; None if it has no label to buy."""
    names = model.audits.label_names[position]
    one_hot = model.audits.one_hot_labels(position)
    by_label = one_hot.T * supply.impressions  # (A, n)
    is_known = np.array([name != UNKNOWN_LABEL for name in names])
    can_be_bought = is_known & (one_hot.T @ supply.users >= supply.min_count)
    available = by_label.sum(1) * can_be_bought
    if not available.sum() > 0:
        return None
    weights = by_label / np.maximum(by_label.sum(1, keepdims=True), 1e-12)
    rates = model.in_target_rates(weights, target).value
    bought = labels_to_buy(rates, available, wanted)
    total = model.in_target_rates((bought / bought.sum())[None] @ weights, target)
    order = [a for a in np.argsort(-rates, kind="stable") if bought[a] > 0]
    return Purchase(
        model.audits.providers[position],
        tuple(names[a] for a in order),
        float(bought.sum()),
        *(float(value[0]) for value in (total.value, total.low, total.high)),
    )


def labels_to_buy(rates: Float64, available: Float64, wanted: float) -> Float64:
    """Impressions (A) to buy by label for the highest in-target rate at a wanted number.

    Labels are bought in the order of their rates (A); the last one in part.
    """
    bought, left = np.zeros(len(rates)), wanted
    for label in np.argsort(-rates, kind="stable"):
        bought[label] = min(left, available[label])
        left -= bought[label]
    return bought
