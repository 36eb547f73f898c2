"""Layers, pooling, merging and target attention of sequences: equations, causality."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from training.model.config import SCALES, EventGroupOptions, SequenceOptions
from training.model.sequence.attention import RotaryTimeEncoding
from training.model.sequence.event_groups import EventGroupEncoder
from training.model.sequence.layers import (
    Gdpa,
    HstuLayer,
    PersonalizedFFN,
    TransformerLayer,
    gdpa_kind,
)
from training.model.sequence.pooling import (
    HierarchicalSeedPooling,
    PmaPooling,
    SumKronLinear,
    most_recent_events,
)
from training.model.sequence.pyramid import EncodedEvents, EventMerging, merge_older_events
from training.model.sequence.summaries import MaskNet, SequenceSummary
from training.model.sequence.target_attention import ActivationUnitAttention, candidate_offsets
from training.ops.attention import AttentionKind, reference
from training.ops.attention.reference import ELEMENTWISE_ACTIVATIONS
from training.ops.ragged import query_key_pairs, segment_ids

WIDTH, HEADS, ROW, USERS = 8, 2, 6, 3
LENGTHS = (5, 0, 1, 12)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def offsets_of(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def history(width: int = WIDTH, lengths: tuple[int, ...] = LENGTHS) -> EncodedEvents:
    n = sum(lengths)
    ages = torch.cat([torch.arange(k, 0, -1) * 1000 for k in lengths])
    return EncodedEvents(torch.randn(n, width), offsets_of(lengths), ages)


LAYERS: dict[str, Callable[[int | None], torch.nn.Module]] = {
    "transformer": lambda window: TransformerLayer(WIDTH, HEADS, window, 2 * WIDTH),
    "hstu": lambda window: HstuLayer(WIDTH, HEADS, window, 64),
}


@pytest.mark.parametrize(("kind", "window"), list(product(LAYERS, (None, 4))))
def test_an_event_attends_to_itself_and_earlier_events_of_its_request(
    kind: str, window: int | None
) -> None:
    layer, h = LAYERS[kind](window), history()
    angles = RotaryTimeEncoding(WIDTH // HEADS)(h.offsets, h.ages)
    out = layer(h.events, h.offsets, angles)
    request = segment_ids(h.offsets)
    for position in range(len(h.events)):
        events = h.events.clone()
        events[position] += 1.0
        changed = (layer(events, h.offsets, angles) - out).abs().amax(1) > 1e-6
        may_change = (request == request[position]) & (torch.arange(len(request)) >= position)
        assert changed[position] and not changed[~may_change].any()


def test_a_personalized_ffn_is_a_matrix_for_each_request() -> None:
    h, rows = history(), torch.randn(len(LENGTHS), USERS, WIDTH)
    layer = PersonalizedFFN(USERS, WIDTH)
    out = layer(h.events, h.offsets, rows)
    for r, (start, stop) in enumerate(pairwise(h.offsets.tolist())):
        matrix = rows[r].T @ layer.values
        torch.testing.assert_close(out[start:stop], h.events[start:stop] @ matrix * WIDTH**-0.5)


@pytest.mark.parametrize("window", [None, 4])
def test_hstu_weights_are_a_mean_over_the_events_that_an_event_can_see(window: int | None) -> None:
    """With scores of 1 and no activation, the weights of a full window, or history, sum to 1."""
    max_length = 9
    kind = HstuLayer(WIDTH, HEADS, window, max_length).attention_kind
    ones, offsets = torch.ones(max_length, 1, 1), torch.tensor([0, max_length])
    linear = replace(kind, activation="identity")
    assert reference(ones, ones, ones, offsets, offsets, linear, window).max().item() == (
        pytest.approx(1)
    )


def gdpa_options() -> list[SequenceOptions]:
    fields = SequenceOptions.model_fields
    activations = get_args(fields["gdpa_activation"].annotation)
    scales = get_args(fields["gdpa_scale"].annotation)
    return [
        SequenceOptions(gdpa_activation=activation, gdpa_scale=scale)
        for activation, scale in product(activations, scales)
    ]


@pytest.mark.parametrize("options", gdpa_options(), ids=repr)
def test_gdpa_is_a_personalized_two_layer_ffn(options: SequenceOptions) -> None:
    """act(S A(X)) C(X) in each head: keys are the columns of A, values the rows of C.

    The length scale divides scores before the activation, or weights after it.
    """
    h, rows, length, head = history(), torch.randn(len(LENGTHS), USERS, WIDTH), 7, WIDTH // HEADS
    layer = Gdpa(USERS, WIDTH, HEADS, 5, gdpa_kind(options, length))
    out, keys, values = layer(h.events, h.offsets, rows), layer.keys(rows), layer.values(rows)
    act = ELEMENTWISE_ACTIVATIONS[options.gdpa_activation]
    for r, (start, stop) in enumerate(pairwise(h.offsets.tolist())):
        for first in range(0, WIDTH, head):
            part = slice(first, first + head)
            scores = h.events[start:stop, part] @ keys[r, :, part].T
            if options.gdpa_scale == "scores":
                weights = act(scores / length)
            else:
                weights = act(scores / head**0.5) / length
            torch.testing.assert_close(out[start:stop, part], weights @ values[r, :, part])


def test_generated_keys_and_values_have_full_rank() -> None:
    """Linear combinations of the rows alone would have rank 3, the number of rows."""
    layer = Gdpa(USERS, WIDTH, HEADS, 2 * WIDTH, AttentionKind("gelu"))
    rows = torch.randn(len(LENGTHS), USERS, WIDTH)
    for weights in (layer.keys(rows), layer.values(rows)):
        assert torch.linalg.matrix_rank(weights, rtol=1e-4).tolist() == [WIDTH] * len(LENGTHS)


def test_a_sum_of_kronecker_products_is_one_linear_map() -> None:
    layer, pooled = SumKronLinear(7, 2, WIDTH), torch.randn(3, 7, WIDTH)
    terms = [
        torch.kron(z.T.contiguous(), w.T.contiguous())
        for z, w in zip(layer.z.unbind(), layer.w.unbind(), strict=True)
    ]
    matrix = torch.stack(terms).sum(0)
    torch.testing.assert_close(layer(pooled).flatten(1), pooled.flatten(1) @ matrix.T)


@given(st.integers(0, 50), st.floats(1.0, 100.0))
def test_rotary_products_depend_on_distances_alone(shift: int, factor: float) -> None:
    """Not on the number of events before both, nor on a common factor of (1 + age / minute)."""
    rotary, q, k = RotaryTimeEncoding(16), torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    ages = torch.tensor([40_000.0, 300.0])

    def product_of(before: int, ages: Tensor) -> Tensor:
        all_ages = torch.cat((torch.full((before,), 1e6), ages))
        angles = rotary(torch.tensor([0, before + 2]), all_ages)
        rotated = angles(torch.cat((torch.zeros(before, 1, 16), q, k)))
        product: Tensor = (rotated[-2] * rotated[-1]).sum()
        return product

    scaled = (1 + ages / 60) * factor * 60 - 60
    torch.testing.assert_close(product_of(shift, scaled), product_of(0, ages), rtol=1e-3, atol=1e-3)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 8))
def test_merging_keeps_recent_events_and_starts_as_the_mean_of_older_ones(
    lengths: list[int], stride: int, keep_recent: int
) -> None:
    h = history(4, tuple(lengths))
    slots = merge_older_events(h.offsets, stride, keep_recent)
    merged = EventMerging(4, 2, stride)(h.events, slots)
    mean_ages = slots.mean(h.ages.float())
    bounds = zip(pairwise(h.offsets.tolist()), pairwise(slots.offsets.tolist()), strict=True)
    for (start, stop), (first_slot, last_slot) in bounds:
        first_recent = max(start, stop - keep_recent)
        parts = list(torch.arange(first_recent, stop).flip(0).split(1))
        parts += torch.arange(start, first_recent).flip(0).split(stride)
        parts = [part for part in parts if len(part)]
        assert last_slot - first_slot == len(parts)
        for slot, part in zip(reversed(range(first_slot, last_slot)), parts, strict=True):
            torch.testing.assert_close(merged[slot], h.events[part].mean(0))
            torch.testing.assert_close(mean_ages[slot], h.ages[part].float().mean())


def test_merging_learns_which_events_of_a_slot_count() -> None:
    h, stride, recent = history(4, (9,)), 3, 3
    slots = merge_older_events(h.offsets, stride, recent)
    merging = EventMerging(4, 2, stride)
    merging(h.events, slots)[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in merging.parameters())
    merging.rank_score.data[1, 0] = 100.0  # head 0 reads the middle event of each slot
    merged = merging(h.events, slots)
    torch.testing.assert_close(merged[:2, :2], h.events[[1, 4], :2])
    torch.testing.assert_close(merged[:2, 2:], h.events[:6, 2:].view(2, 3, 2).mean(1))
    assert torch.equal(merged[2:], h.events[6:])
    merging.score.weight.data[1] = torch.tensor([0.0, 0.0, 100.0, 0.0])
    best = torch.stack([part[part[:, 2].argmax()] for part in h.events[:6].split(3)])
    torch.testing.assert_close(merging(h.events, slots)[:2, 2:], best[:, 2:])


def test_most_recent_events_are_newest_first_and_padded_with_zeros() -> None:
    h = history()
    last = most_recent_events(h.events, h.offsets, 3)
    for r, (start, stop) in enumerate(pairwise(h.offsets.tolist())):
        newest = h.events[start:stop].flip(0)[:3]
        assert torch.equal(last[r, : len(newest)], newest) and not last[r, len(newest) :].any()


@pytest.mark.parametrize(
    "pool", [PmaPooling(WIDTH, HEADS, 3), HierarchicalSeedPooling(WIDTH, HEADS, 3, 2)]
)
def test_pooling_treats_a_sequence_as_a_set(pool: torch.nn.Module) -> None:
    h = history()
    rows = pool(h.events, h.offsets)
    assert rows.shape == (len(LENGTHS), 3, WIDTH)
    starts = h.offsets[:-1].tolist()
    order = torch.cat([start + torch.randperm(n) for start, n in zip(starts, LENGTHS, strict=True)])
    torch.testing.assert_close(pool(h.events[order], h.offsets), rows)
    torch.testing.assert_close(pool(h.events[:5], torch.tensor([0, 5])), rows[:1])


def test_hierarchical_seeds_are_normalized() -> None:
    """Their scale, which grows in training, does not sharpen the attention."""
    pool, h = HierarchicalSeedPooling(WIDTH, HEADS, 3, 2), history()
    rows = pool(h.events, h.offsets)
    pool.seeds.data.mul_(100)
    torch.testing.assert_close(pool(h.events, h.offsets), rows, rtol=1e-3, atol=1e-4)
    pool.seeds.data.copy_(torch.randn_like(pool.seeds))
    assert (pool(h.events, h.offsets) - rows).abs().max() > 1e-2


def test_a_sequence_summary_is_gated_by_itself() -> None:
    summary, h = SequenceSummary(PmaPooling(WIDTH, HEADS, 2), 3, WIDTH, ROW), history()
    pooled = summary.pooling(h.events, h.offsets)
    rows = summary.out(torch.cat((pooled, most_recent_events(h.events, h.offsets, 3)), 1))
    gated = rows * torch.sigmoid(summary.gate.linear(rows))
    torch.testing.assert_close(summary(h), gated)


def test_masknet_weights_each_attribute_in_the_context_of_all() -> None:
    module, attributes = MaskNet(3, WIDTH), torch.randn(5, 3 * WIDTH)
    masked = attributes * module.mask(attributes)
    torch.testing.assert_close(module(attributes), module.combine(masked))
    module.get_parameter("mask.2.weight").data.zero_()  # no longer depends on the attributes
    ignores_first = torch.cat((torch.zeros(WIDTH), torch.ones(2 * WIDTH)))
    module.get_parameter("mask.2.bias").data.copy_(ignores_first)
    other = torch.cat((torch.randn(5, WIDTH), attributes[:, WIDTH:]), 1)
    torch.testing.assert_close(module(other), module(attributes))


def test_the_activation_unit_is_an_mlp_of_both_their_difference_and_their_product() -> None:
    """DIN's a([q ; k ; q - k ; q * k]): weights of q - k are absorbed by those of q and k."""
    unit, h = ActivationUnitAttention(WIDTH, 5), history()
    request = torch.tensor([0, 0, 1, 2, 3, 3])
    candidates, difference = torch.randn(6, WIDTH), torch.randn(5, WIDTH)
    q, k = unit.candidate.weight - difference, unit.event.weight + difference
    first_layer = torch.cat((q, k, difference, unit.product.weight), 1)
    paired = query_key_pairs(candidate_offsets(request, h.offsets), h.offsets)
    out = unit(candidates, h.events, paired)
    for row, candidate in enumerate(candidates):
        events = h.events[h.offsets[request[row]] : h.offsets[request[row] + 1]]
        query = candidate.expand_as(events)
        pairs = torch.cat((query, events, query - events, query * events), 1)
        weights = unit.unit(pairs @ first_layer.T + unit.candidate.bias)
        torch.testing.assert_close(out[row], (weights * events).sum(0))
    twice, offsets = h.events[:5].repeat(2, 1), torch.tensor([0, 10])
    doubled = unit(candidates[:1], twice, query_key_pairs(torch.tensor([0, 1]), offsets))
    torch.testing.assert_close(doubled, 2 * out[:1])


@pytest.mark.parametrize("heads", [1, 2])
def test_the_hidden_width_of_the_activation_unit_does_not_depend_on_the_heads(heads: int) -> None:
    options = SequenceOptions(target_attention="activation_unit")
    config = SCALES["small"].model_copy(update={"sequence": options, "heads": heads})
    encoder = EventGroupEncoder(config, EventGroupOptions(events=()), 1, ROW, [ROW])
    unit = encoder.target_attention
    assert isinstance(unit, ActivationUnitAttention) and unit.event.out_features == 36
