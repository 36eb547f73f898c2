"""Losses and heads: the ESMM chain, outcome values, negative sampling, weights, next items."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from features.schema import FeatureSchema
from training.config import TrainConfig
from training.data.batch import Batch, NegativeSampling
from training.data.input_statistics import SAMPLE_ROWS, mean_labels
from training.model.config import GemOptions, SequenceOptions
from training.model.gem import GemOutput
from training.model.heads import (
    FREQUENCY_BUCKETS,
    EsmmChain,
    FollowedEvents,
    ItemFrequency,
    NextActionLoss,
    ZilnDistribution,
    ZilnValueHead,
    joint_logit,
    sample_followed_events,
    sampled_softmax_loss,
)
from training.model.sequence.pyramid import EncodedEvents
from training.trainer.step import Loss

NAMES = ("view", "click", "conversion")
logits = st.floats(-200, 200)


@given(logits, logits)
def test_the_joint_logit_is_that_of_the_product_of_probabilities(a: float, b: float) -> None:
    pair = torch.tensor([a, b], dtype=torch.float64)
    joint = joint_logit(pair[0], pair[1])
    assert joint <= min(a, b) + 1e-9
    product = torch.sigmoid(pair).prod()
    assert torch.sigmoid(joint) == pytest.approx(float(product), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(
    "parents", [*itertools.permutations([("conversion", "click"), ("click", "view")])]
)
def test_a_chain_multiplies_conditional_probabilities(parents: tuple[tuple[str, str], ...]) -> None:
    x = torch.randn(5, 3)
    probabilities = torch.sigmoid(EsmmChain(NAMES, dict(parents))(x))
    torch.testing.assert_close(probabilities, torch.sigmoid(x).cumprod(1))
    assert torch.equal(EsmmChain(NAMES, {})(x), x)


@pytest.mark.parametrize("rate", [0.0, 1e-4, 1e-3, 1e-2, 1.0])
def test_a_base_rate_is_that_of_the_sample(rate: float) -> None:
    """Within a tenth also where the sample has two outcomes; finite with none or only outcomes."""
    rows = SAMPLE_ROWS
    labels = (np.arange(rows) < round(rate * rows)).astype(np.float32)[:, None]
    mean = mean_labels([(labels, np.ones((rows, 1), bool))])
    start = torch.logit(mean)
    assert start.isfinite() and start.sigmoid().item() == pytest.approx(rate, rel=0.1, abs=1e-5)


def test_a_chain_starts_from_the_rates_of_its_objectives() -> None:
    rates = torch.tensor([0.2, 0.05, 0.001])
    for parents in ({}, {"conversion": "click"}, {"conversion": "click", "click": "view"}):
        chain = EsmmChain(NAMES, parents)
        predicted = torch.sigmoid(chain(chain.initial_logits(rates)[None]))[0]
        torch.testing.assert_close(predicted, rates)
    initial = chain.initial_logits(torch.tensor([0.2, 0.3, torch.nan]))
    assert initial[:2].isfinite().all() and initial[2].isnan()


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (
            {"buy": "click"},
            "--model.esmm-parents names buy; objectives are view, click, conversion",
        ),
        ({"click": "view", "view": "click"}, "--model.esmm-parents has a cycle: click after view"),
        ({"click": "click"}, "--model.esmm-parents has a cycle: click"),
    ],
)
def test_parents_that_are_unknown_or_cyclic_are_refused(
    parents: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        EsmmChain(NAMES, parents)


def test_the_expected_value_is_the_mean_of_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    ziln = ZilnDistribution(torch.tensor([[0.3, -1.0]]), torch.tensor([[0.5, 0.9]]))
    logit = torch.tensor([[-1.0, 0.5]])
    n = 400_000
    occurs = torch.rand(n, 2, generator=generator) < torch.sigmoid(logit)
    log_values = ziln.log_mean + ziln.log_std * torch.randn(n, 2, generator=generator)
    mean = (occurs * log_values.exp()).mean(0)
    torch.testing.assert_close(ziln.expected_value(logit)[0], mean, rtol=0.02, atol=0)


def test_the_value_head_learns_the_distribution_of_positive_values() -> None:
    """Its minimum is the mean and the standard deviation of ln(value); zeros cost nothing."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    values = torch.tensor(
        np.where(rng.random((4000, 1)) < 0.3, rng.lognormal(1, 0.7, (4000, 1)), 0)
    )
    head = ZilnValueHead(1, 1).double()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        distribution = head(torch.ones(4000, 1).double())
        distribution.negative_log_likelihood(values).mean().backward()
        optimizer.step()
    learned = head(torch.ones(1, 1).double())
    log_values = values[values > 0].log()
    assert learned.log_mean.item() == pytest.approx(log_values.mean().item(), abs=0.01)
    assert learned.log_std.item() == pytest.approx(log_values.std().item(), abs=0.01)
    assert learned.negative_log_likelihood(torch.zeros(1, 1)).item() == 0


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1))
@settings(max_examples=20)
def test_negative_sampling_keeps_all_positives_and_a_share_of_the_negatives(
    seed: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    labels = (rng.random((5000, 2)) < 0.2).astype(np.float32)
    label_mask = rng.random((5000, 2)) < 0.7
    sampling = NegativeSampling((share, 1.0), 3)
    sampled = sampling(labels, label_mask, 7)
    assert (sampled == sampling(labels, label_mask, 7)).all() and not (sampled & ~label_mask).any()
    assert (sampled[:, 1] == label_mask[:, 1]).all()
    assert (sampled[labels > 0] == label_mask[labels > 0]).all()
    negative = label_mask[:, 0] & (labels[:, 0] == 0)
    assert sampled[negative, 0].mean() == pytest.approx(share, abs=0.06)


def batch_of(labels: torch.Tensor, label_mask: torch.Tensor) -> Batch:
    """A batch with only the fields that losses read."""
    fields = SimpleNamespace(
        labels=labels, label_mask=label_mask, outcome_values=torch.zeros_like(labels)
    )
    return cast("Batch", fields)


def output_of(logits: torch.Tensor, next_action_loss: torch.Tensor | None = None) -> GemOutput:
    return GemOutput(
        logits=logits,
        auxiliary=logits[:, :0],
        hidden=logits,
        value_distribution=None,
        next_action_loss=next_action_loss,
    )


def loss_of(config: TrainConfig) -> Loss:
    """The loss of a spec with the objectives NAMES, and an auxiliary one."""
    features = SimpleNamespace(objectives=NAMES, auxiliary_objectives={"share": "event"})
    model = config.model.model_copy(update={"auxiliary_weight": 0.0})
    without = config.model_copy(update={"model": model})
    return Loss.from_config(without, cast("FeatureSchema", features))


def best_constants(
    config: TrainConfig, labels: torch.Tensor, label_mask: torch.Tensor
) -> torch.Tensor:
    """The constant probability of each objective that minimizes the loss."""
    loss, bias = loss_of(config), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([bias], max_iter=100)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = loss(output_of(bias.expand_as(labels)), batch_of(labels, label_mask), len(labels))
        total.backward()
        return total

    optimizer.step(cast("Callable[[], float]", closure))
    return torch.sigmoid(bias.detach())


def test_probabilities_learned_from_sampled_negatives_are_those_of_all_rows() -> None:
    labels = (torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    rates = {"click": 0.2, "conversion": 0.05}
    sampling = NegativeSampling((1.0, 0.2, 0.05), 0)
    sampled = torch.from_numpy(sampling(labels.numpy(), np.ones(labels.shape, bool)))
    corrected = best_constants(TrainConfig(negative_sampling_rate=rates), labels, sampled)
    torch.testing.assert_close(corrected, labels.mean(0), rtol=0.02, atol=0)
    uncorrected = best_constants(TrainConfig(), labels, sampled)
    assert uncorrected[2] > 3 * corrected[2]


def test_an_objective_weight_scales_the_loss_of_that_objective_alone() -> None:
    labels, label_mask = torch.tensor([[1.0, 0.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool)
    output = output_of(torch.randn(1, 3))
    plain = loss_of(TrainConfig())
    weighted = loss_of(TrainConfig(objective_weights={"click": 3.0}))
    batch = batch_of(labels, label_mask)
    click_alone = batch_of(labels, torch.tensor([[False, True, False]]))
    torch.testing.assert_close(
        weighted(output, batch, 1), plain(output, batch, 1) + 2 * plain(output, click_alone, 1)
    )


def test_losses_are_divided_by_a_power_of_the_entropy_of_the_base_rate() -> None:
    """Then constant predictions of the base rates cost equally much with a power of 1."""
    rates = {"click": 0.5, "view": 0.2, "conversion": 0.01}
    p = torch.tensor([rates[name] for name in NAMES])
    features = SimpleNamespace(objectives=NAMES, auxiliary_objectives={})
    for power in (0.0, 0.5, 1.0):
        loss = Loss.from_config(
            TrainConfig(entropy_power=power), cast("FeatureSchema", features), rates
        )
        entropy = -(p * p.log() + (1 - p) * (1 - p).log())
        costs = loss.objective_weights * entropy
        torch.testing.assert_close(costs / costs.max(), (entropy / entropy.max()) ** (1 - power))
        assert loss.objective_weights[NAMES.index("click")] == 1
    without_rates = loss_of(TrainConfig())
    assert without_rates.objective_weights.eq(1).all()


def test_a_repeated_batch_without_labels_trains_nothing() -> None:
    sequence = SequenceOptions(next_action_weight=0.5)
    loss = loss_of(TrainConfig(model=GemOptions(sequence=sequence)))
    logits, next_action = torch.randn(4, 3, requires_grad=True), torch.ones((), requires_grad=True)
    labels = torch.ones(4, 3)
    for has_labels, gradient in ((True, 0.5), (False, 0.0)):
        batch = batch_of(labels, torch.full((4, 3), has_labels))
        total = loss(output_of(logits, next_action), batch, 4)
        grads = torch.autograd.grad(total, (logits, next_action))
        assert grads[0].any() == has_labels and grads[1] == gradient


def test_weights_and_sampling_rates_of_unknown_objectives_are_refused() -> None:
    with pytest.raises(UserError, match="--objective-weights names buy; objectives are view"):
        loss_of(TrainConfig(objective_weights={"buy": 1.0, "share": 1.0}))
    for name in ("buy", "share"):  # negatives of auxiliary objectives are not sampled
        with pytest.raises(UserError, match=f"--negative-sampling-rate names {name}"):
            loss_of(TrainConfig(negative_sampling_rate={name: 0.5}))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 30))
def test_followed_events_are_sampled_from_all_but_the_last_of_each_request(
    lengths: list[int], max_samples: int
) -> None:
    offsets = [0, *itertools.accumulate(lengths)]
    last = {stop - 1 for start, stop in itertools.pairwise(offsets) if stop > start}
    followed = set(range(offsets[-1])) - last
    chosen = sample_followed_events(torch.tensor(offsets), offsets[-1], max_samples)
    sample = chosen.positions[chosen.exist].tolist()
    assert len(set(sample)) == len(sample) == min(max_samples, len(followed))
    assert set(sample) <= followed


def test_the_next_item_is_scored_against_different_items_of_other_events() -> None:
    torch.manual_seed(0)
    module = NextActionLoss(4, 6)
    offsets = torch.tensor([0, 3, 3, 5])
    encoded_offsets = torch.tensor([0, 4, 5, 8])  # with CLS tokens
    encoded = EncodedEvents(torch.randn(8, 6), encoded_offsets, torch.ones(8))
    positions, next_items = torch.tensor([3, 0, 1]), torch.tensor([9, 5, 9])
    vectors = torch.randn(3, 4)[[0, 1, 0]]
    scores = module.query_projection(encoded.events[[5, 0, 1]]) @ vectors.T / 2
    # Of two other events, 4 / 3 are expected to be of item 9, and 2 / 3 of item 5.
    nine, five = math.log(4 / 3), math.log(2 / 3)
    negatives = [
        [scores[0, 1] - five],
        [scores[1, 0] - nine, scores[1, 2] - nine],
        [scores[2, 1] - five],
    ]
    losses = [
        torch.logsumexp(torch.stack([scores[i, i], *others]), 0) - scores[i, i]
        for i, others in enumerate(negatives)
    ]
    sample = FollowedEvents(positions, torch.ones(3, dtype=torch.bool))
    loss = module(encoded, sample, offsets, next_items, vectors)
    torch.testing.assert_close(loss, torch.stack(losses).mean())


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2**31))
def test_samples_that_do_not_exist_change_nothing(exist: list[bool], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, is_sample = len(exist), torch.tensor(exist)
    scores = torch.randn(count, count, generator=generator)
    items = torch.randint(0, 5, (count,), generator=generator)
    share = torch.rand(count, generator=generator) + 0.01
    loss = sampled_softmax_loss(scores, items, share, is_sample)
    kept = scores[is_sample][:, is_sample]
    every = torch.ones(len(kept), dtype=torch.bool)
    expected = sampled_softmax_loss(kept, items[is_sample], share[is_sample], every)
    torch.testing.assert_close(loss, expected if len(kept) else torch.tensor(0.0))


def test_scores_learned_from_sampled_negatives_are_those_of_a_softmax_over_all_items() -> None:
    """Items are drawn by popularity; without logQ correction all scores would become equal."""
    generator = torch.Generator().manual_seed(0)
    popularity = torch.tensor([0.6, 0.25, 0.1, 0.05])
    frequency = ItemFrequency()
    score, every = torch.zeros(4, requires_grad=True), torch.ones(64, dtype=torch.bool)
    optimizer = torch.optim.Adam([score], lr=0.02)
    for _ in range(600):
        items = torch.multinomial(popularity, 64, replacement=True, generator=generator)
        shares = frequency(items, every)
        loss = sampled_softmax_loss(score[items].expand(64, 64), items, shares, every)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    torch.testing.assert_close(score.detach().softmax(0), popularity, atol=0.03, rtol=0.1)


def test_item_frequencies_are_shares_that_follow_the_recent_batches() -> None:
    frequency, every = ItemFrequency(), torch.ones(4, dtype=torch.bool)
    first = frequency(torch.tensor([1, 1, 7, 7 + FREQUENCY_BUCKETS]), every)
    torch.testing.assert_close(first, torch.full((4,), 0.5))
    for items in [[5, 5, 5, 5]] * 2000 + [[2, 2, 2, 3]] * 4000:
        share = frequency(torch.tensor(items), every)
    torch.testing.assert_close(share[[0, 3]], torch.tensor([0.75, 0.25]), atol=0.02, rtol=0)
