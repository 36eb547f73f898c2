"""Draws from logits: yes or no, one of several, or several in order.

A draw from a softmax is the largest of logit + Gumbel noise; the descending order of these sums
is a draw of all, one after another without return.
"""

import numpy as np

from etl.sources.simulator.columns import Bools, Floats, Ints


def sigmoid(logit: Floats) -> Floats:
    """Probability of a logit."""
    return 1 / (1 + np.exp(-logit))


def draw_yes(logit: Floats, rng: np.random.Generator) -> Bools:
    """(n,) events that happen with the probability of their logit."""
    return rng.random(len(logit)) < sigmoid(logit)


def draw_one(logits: Floats, rng: np.random.Generator) -> Ints:
    """(n,) columns drawn from the softmax of each row of (n, k) logits."""
    return np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)


def draw_in_order(logits: Floats, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Every column of each row of (n, k) logits, drawn one after another without return.

    Returns the (n, k) columns in the order drawn and the probability with which each was drawn
    among those still there: its weight over the weight that it and the later ones share.
    """
    order = np.argsort(-(logits + rng.gumbel(size=logits.shape)), axis=1)
    weight = np.exp(np.take_along_axis(logits, order, axis=1))
    remaining = np.cumsum(weight[:, ::-1], axis=1)[:, ::-1]
    return order, weight / remaining


def draw_from_shares(shares: Floats, rng: np.random.Generator) -> Ints:
    """(n,) columns drawn with the probabilities in each row of (n, k)."""
    ladder = np.cumsum(shares, axis=1)
    return np.sum(rng.random((len(shares), 1)) * ladder[:, -1:] > ladder[:, :-1], axis=1)
