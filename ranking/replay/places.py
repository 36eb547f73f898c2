"""How likely each ad of a request was to stand in each place, given which ads were shown.

The log tells for each slot with which probability its ad was drawn for it, from what the slots
before had left (Plackett and Luce). N requests of K ads each, in the order of their slots.
"""

from itertools import permutations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MOST = 6  # ads of a request: all their orders are gone through
AT_ONCE = 4096  # requests


def place_probabilities(drawn: Floats) -> Floats:
    """From the propensities of slots (N, K) to the chance of each ad in each place (N, K, K).

    All ads of a request stand somewhere, and all places are taken: rows and columns sum to 1.
    """
    assert drawn.shape[1] <= MOST
    parts = np.array_split(drawn, -(-len(drawn) // AT_ONCE) or 1)
    return np.concatenate([_places(part) for part in parts])


def shares(drawn: Floats) -> Floats:
    """The share (N, K) that each ad had of the draw for the first slot."""
    found = np.empty_like(drawn)
    left = np.ones(len(drawn))
    for slot in range(drawn.shape[1]):
        found[:, slot] = drawn[:, slot] * left
        left = left - found[:, slot]
    return found


def _places(drawn: Floats) -> Floats:
    size = drawn.shape[1]
    orders = np.array(list(permutations(range(size))))
    share = shares(drawn)[:, orders]
    left = 1 - np.concatenate((np.zeros((*share.shape[:2], 1)), np.cumsum(share, 2)[..., :-1]), 2)
    chance = np.prod(share / np.maximum(left, 1e-12), 2)
    chance /= chance.sum(1, keepdims=True)
    found = np.empty((len(drawn), size, size))
    for ad in range(size):
        for place in range(size):
            found[:, ad, place] = chance[:, orders[:, place] == ad].sum(1)
    return found
