"""Which users are sampled: probabilities that serve an expected workload of targetings.

The workload is every combination of values of up to three attributes of users. A targeting q of T_q
users is estimated with variance sum_u (1 / pi_u - 1) over its users; the sum of the variances over
T_q, so that no size of segment dominates, is least for a given number of rows if

    pi_u = min(1, lambda * sqrt(sum of 1 / T_q over the targetings q of u) / sqrt(n_u))

where n_u is how many rows user u has. This is the allocation of stratified sampling for bounded
strata (Nguyen et al. 2019, VOILA) without strata: a user belongs to many targetings at once.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from etl.array_types import Float64

MAX_ORDER = 3  # attributes of a targeting in the workload


def workload_combinations(attributes: Sequence[str]) -> list[tuple[str, ...]]:
    """The combinations of attributes in the workload; the first, of none, is everyone."""
    orders = range(min(MAX_ORDER, len(attributes)) + 1)
    return [names for k in orders for names in itertools.combinations(attributes, k)]


def sampling_scale(importance: Float64, rows: Float64, budget: float) -> float:
    """The factor lambda for which min(1, lambda * importance) keeps `budget` rows on average.

    Args:
        importance: The importance (B) of groups of users, positive.
        rows: The rows (B) of each group.
        budget: How many rows to keep; from all of them on, every user is sampled.
    """
    order = np.argsort(-importance)
    importance, rows = importance[order], rows[order]
    if budget >= rows.sum():
        return float(np.inf)
    # With the k most important groups taken completely, the others share the rest of the budget.
    certain_rows = np.concatenate(([0.0], np.cumsum(rows)[:-1]))
    remaining = np.cumsum((importance * rows)[::-1])[::-1]
    scales = (budget - certain_rows) / remaining
    k = int(np.argmax(scales * importance < 1.0))
    return float(scales[k])
