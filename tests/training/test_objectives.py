"""Laws of what is learned: funnels, values, thinned negatives, weights, next actions."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from training.config import TrainConfig
from training.data.thinning import Thinning
from training.loop.loss import Loss
from training.model.funnel import Funnel, both
from training.model.gem import Output
from training.model.sequence.level import Encoded
from training.model.sequence.next_action import NextAction, followed
from training.model.value import ValueHead, Worth

NAMES = ("view", "click", "conversion")
logits = st.floats(-200, 200)


@given(logits, logits)
def test_the_funnel_is_a_product_of_probabilities(a: float, b: float) -> None:
    found = both(*torch.tensor([a, b], dtype=torch.float64))
    assert found <= min(a, b) + 1e-9  # what comes after is rarer
    product = torch.sigmoid(torch.tensor([a, b], dtype=torch.float64)).prod()
    assert torch.sigmoid(found) == pytest.approx(float(product), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(
    "order", itertools.permutations([("conversion", "click"), ("click", "view")])
)
def test_a_chain_multiplies_from_its_start(order) -> None:
    x = torch.randn(5, 3)
    p = torch.sigmoid(Funnel(NAMES, dict(order))(x))
    torch.testing.assert_close(p, torch.sigmoid(x).cumprod(1))
    assert torch.equal(Funnel(NAMES, {})(x), x)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"buy": "click"}, "names buy"),
        ({"click": "view", "view": "click"}, "in a circle"),
        ({"click": "click"}, "in a circle"),
    ],
)
def test_a_funnel_that_is_none_is_refused(after: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Funnel(NAMES, after)


def test_the_expected_value_is_the_mean_of_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    worth = Worth(torch.tensor([[0.3, -1.0]]), torch.tensor([[0.5, 0.9]]))
    logit = torch.tensor([[-1.0, 0.5]])
    n = 400_000
    there = torch.rand(n, 2, generator=generator) < torch.sigmoid(logit)
    drawn = worth.mean + worth.deviation * torch.randn(n, 2, generator=generator)
    mean = (there * drawn.exp()).mean(0)
    torch.testing.assert_close(worth.expected(logit)[0], mean, rtol=0.02, atol=0)


def test_values_are_learned_as_they_are_spread() -> None:
    """The best constant is the mean and the deviation of ln(value); what is not told costs none."""
    rng = np.random.default_rng(0)
    values = torch.tensor(
        np.where(rng.random((4000, 1)) < 0.3, rng.lognormal(1, 0.7, (4000, 1)), 0)
    )
    head = ValueHead(1, ("buy",), ("buy",)).double()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        head(torch.ones(4000, 1).double()).loss(values).sum().div(4000).backward()
        optimizer.step()
    found = head(torch.ones(1, 1).double())
    told = values[values > 0].log()
    assert found.mean.item() == pytest.approx(told.mean().item(), abs=0.01)
    assert found.deviation.item() == pytest.approx(told.std().item(), abs=0.01)
    assert found.loss(torch.zeros(1, 1)).item() == 0


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1))
@settings(max_examples=20)
def test_all_positives_and_a_share_of_the_negatives_are_kept(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    labels = (rng.random((5000, 2)) < 0.2).astype(np.float32)
    known = rng.random((5000, 2)) < 0.7
    thin = Thinning((share, 1.0), 3)
    kept = thin(labels, known, 7)
    assert (kept == thin(labels, known, 7)).all() and not (kept & ~known).any()
    assert (kept[:, 1] == known[:, 1]).all()
    assert (kept[labels > 0] == known[labels > 0]).all()
    negative = known[:, 0] & (labels[:, 0] == 0)
    assert kept[negative, 0].mean() == pytest.approx(share, abs=0.06)


def batch_of(labels: torch.Tensor, known: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(labels=labels, known=known, values=torch.zeros_like(labels))


def learned(config: TrainConfig, labels: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The constant probability of each objective that costs least."""
    loss, bias = Loss.of(config, NAMES), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([bias], max_iter=100)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        output = Output(bias.expand_as(labels), labels, labels, None, None)
        cost = loss(output, batch_of(labels, known), len(labels))
        cost.backward()
        return cost

    optimizer.step(closure)
    return torch.sigmoid(bias.detach())


def test_what_is_learned_from_fewer_negatives_is_the_probability_of_all_rows() -> None:
    labels = (torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    shares = {"click": 0.2, "conversion": 0.05}
    thin = Thinning((1.0, 0.2, 0.05), 0)
    known = torch.from_numpy(thin(labels.numpy(), np.ones(labels.shape, bool)))
    found = learned(TrainConfig(negatives=shares), labels, known)
    torch.testing.assert_close(found, labels.mean(0), rtol=0.02, atol=0)
    uncorrected = learned(TrainConfig(), labels, known)
    assert uncorrected[2] > 3 * found[2]


def test_a_weight_is_that_of_an_objective_alone() -> None:
    labels, known = torch.tensor([[1.0, 0.0, 1.0]]), torch.ones(1, 3)
    output = Output(torch.randn(1, 3), labels, labels, None, None)
    one, other = (
        Loss.of(TrainConfig(weights=weights), NAMES)(output, batch_of(labels, known), 1)
        for weights in ({}, {"click": 3.0})
    )
    only = Loss.of(TrainConfig(), NAMES)(
        output, batch_of(labels, torch.tensor([[0.0, 1.0, 0.0]])), 1
    )
    torch.testing.assert_close(other, one + 2 * only)
    with pytest.raises(UserError, match="--weights names buy; objectives are view"):
        Loss.of(TrainConfig(weights={"buy": 1.0}), NAMES)
    with pytest.raises(UserError, match="--negatives names buy"):
        Loss.of(TrainConfig(negatives={"buy": 0.5}), NAMES)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 30))
def test_events_that_are_followed_are_all_but_the_last(lengths: list[int], most: int) -> None:
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    last = {int(stop) - 1 for start, stop in itertools.pairwise(offsets) if stop > start}
    wanted = set(range(int(offsets[-1]))) - last
    found = followed(offsets, most).tolist()
    assert len(set(found)) == len(found) == min(most, len(wanted)) and set(found) <= wanted


def test_next_actions_are_told_from_other_items() -> None:
    """One by one: the item that came next among those that others dealt with next, once each."""
    torch.manual_seed(0)
    guess = NextAction(4, 6)
    offsets = torch.tensor([0, 3, 3, 5])
    behind = torch.tensor([0, 4, 5, 8])  # a learned row behind each request
    encoded = Encoded(torch.randn(8, 6), behind, torch.ones(8))
    at, ids = torch.tensor([3, 0, 1]), torch.tensor([9, 5, 9])
    items = torch.randn(3, 4)[[0, 1, 0]]
    scores = guess.ask(encoded.events[[5, 0, 1]]) @ items.T / 2
    one = torch.logsumexp(scores[0, :2], 0) - scores[0, 0]
    two = torch.logsumexp(scores[1], 0) - scores[1, 1]
    three = torch.logsumexp(scores[2, 1:], 0) - scores[2, 2]
    found = guess(encoded, at, offsets, ids, items)
    torch.testing.assert_close(found, (one + two + three) / 3)
