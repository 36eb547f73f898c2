"""Sequence modules: equations of the papers, causality, and the direction of information."""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from training.model.config import EventGroupOptions, Flow, GemConfig, SequenceOptions
from training.model.sequence.attention import RotaryTimeEncoding
from training.model.sequence.interformer import (
    InterFormer,
    InterFormerOutput,
    append_tokens,
    event_groups_of,
)
from training.model.sequence.layers import Gdpa, HstuLayer, PersonalizedFFN, TransformerLayer
from training.model.sequence.pooling import (
    HierarchicalSeedPooling,
    PmaPooling,
    SumKronLinear,
    most_recent_events,
)
from training.model.sequence.pyramid import EncodedEvents, pool_older_events
from training.ops.ragged import segment_ids

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


def test_gdpa_is_a_personalized_two_layer_ffn() -> None:
    """act(S A(X)) C(X) in each head: keys are the columns of A, values the rows of C."""
    h, rows = history(), torch.randn(len(LENGTHS), USERS, WIDTH)
    layer = Gdpa(USERS, WIDTH, HEADS, hidden=5)
    out = layer(h.events, h.offsets, rows)
    keys, values = layer.generate_keys_values(rows)
    head = WIDTH // HEADS
    for r, (start, stop) in enumerate(pairwise(h.offsets.tolist())):
        for first in range(0, WIDTH, head):
            part = slice(first, first + head)
            a, c = keys[r, :, part].T * head**-0.5, values[r, :, part]
            hidden = F.gelu(h.events[start:stop, part] @ a)
            torch.testing.assert_close(out[start:stop, part], hidden @ c * 5**-0.5)


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
def test_pooling_older_events_keeps_recent_ones_and_averages_the_others(
    lengths: list[int], stride: int, keep_recent: int
) -> None:
    h = history(3, tuple(lengths))
    pooled = pool_older_events(h.offsets, stride, keep_recent)
    slots = pooled.mean_pool(h.events)
    bounds = zip(pairwise(h.offsets.tolist()), pairwise(pooled.offsets.tolist()), strict=True)
    for (start, stop), (first_slot, last_slot) in bounds:
        first_recent = max(start, stop - keep_recent)
        newest_first = list(h.events[first_recent:stop].flip(0))
        older = h.events[start:first_recent].flip(0)
        newest_first += [part.mean(0) for part in older.split(stride) if len(part)]
        assert last_slot - first_slot == len(newest_first)
        for slot, expected in zip(slots[first_slot:last_slot].flip(0), newest_first, strict=True):
            torch.testing.assert_close(slot, expected)


def test_most_recent_events_are_newest_first_and_padded_with_zeros() -> None:
    h = history()
    last = most_recent_events(h.events, h.offsets, 3)
    for r, (start, stop) in enumerate(pairwise(h.offsets.tolist())):
        newest = h.events[start:stop].flip(0)[:3]
        assert torch.equal(last[r, : len(newest)], newest) and not last[r, len(newest) :].any()


def test_tokens_are_appended_to_each_sequence() -> None:
    h, tokens = history(), torch.randn(2, WIDTH)
    longer = append_tokens(h, tokens)
    assert longer.offsets.diff().tolist() == [n + 2 for n in LENGTHS]
    bounds = zip(pairwise(h.offsets.tolist()), pairwise(longer.offsets.tolist()), strict=True)
    for (start, stop), (first, last) in bounds:
        assert torch.equal(longer.events[first:last], torch.cat((h.events[start:stop], tokens)))
        assert torch.equal(longer.ages[first : last - 2], h.ages[start:stop])


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


def config(layers: int = 2, **options: object) -> GemConfig:
    return GemConfig(
        embedding_dim=ROW,
        event_width=WIDTH,
        heads=HEADS,
        event_layers=layers,
        mlp_width=16,
        rank=2,
        window=4,
        encoded_events=16,
        sequence=SequenceOptions.model_validate(options),
    )


def encoded(model: InterFormer, x: Tensor, h: EncodedEvents) -> tuple[Tensor, Tensor]:
    """Request rows, and the events of all sequences as one vector."""
    out = interformer(model, x, h)
    return out.request_rows, torch.cat([s.events.flatten() for s in out.sequences])


def interformer(model: InterFormer, x: Tensor, h: EncodedEvents) -> InterFormerOutput:
    tokens = [encoder.project_tokens(h.events, h.offsets, h.ages) for encoder in model.encoders]
    out: InterFormerOutput = model(x, tokens)
    return out


@pytest.mark.parametrize("flow", get_args(Flow))
def test_information_flows_in_the_configured_direction(flow: Flow) -> None:
    """s2n and int: rows depend on events; n2s and int: events depend on rows."""
    model, h = InterFormer(USERS, config(flow=flow)).eval(), history()
    x, other = torch.randn(2, len(LENGTHS), USERS, ROW)
    rows, events = encoded(model, x, h)
    new_rows, new_events = encoded(model, other, h)
    assert rows.shape == (len(LENGTHS), model.out_rows, ROW)
    assert torch.equal(events, new_events) == (flow not in ("n2s", "int"))
    assert torch.equal(rows, new_rows) == (flow in ("sole", "sep"))
    if flow == "sole":
        assert torch.equal(events, h.events.flatten())
    if flow in ("s2n", "int"):
        summary_rows = sum(encoder.num_rows for encoder in model.encoders)
        changed = EncodedEvents(h.events + torch.randn_like(h.events), h.offsets, h.ages)
        mixed = slice(0, model.out_rows - summary_rows)
        assert not torch.allclose(encoded(model, x, changed)[0][0, mixed], rows[0, mixed])


OPTIONS: list[dict[str, Any]] = [
    {"flow": "int"},
    {"flow": "int", "personalization": "pffn", "layer": "hstu", "rotary": True},
    {"flow": "n2s", "pooling": "hsp", "cls_tokens": 2},
    {"flow": "int", "computation_skip": True},
    {"flow": "s2n", "pyramid_stride": 3, "pyramid_keep_recent": 2},
    {"flow": "sep", "layer": "hstu", "cls_tokens": 1, "rotary": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_requests_are_independent_and_all_parameters_have_gradients(
    options: dict[str, Any],
) -> None:
    model, h = InterFormer(USERS, config(4, **options)), history()
    x = torch.randn(len(LENGTHS), USERS, ROW)
    rows, sequences = interformer(model, x, h)
    cls_tokens = options.get("cls_tokens", 0)
    assert sequences[0].offsets.diff().tolist() == [n + cls_tokens for n in LENGTHS]
    last_request = EncodedEvents(h.events[6:], offsets_of((12,)), h.ages[6:])
    alone, _ = encoded(model, x[3:], last_request)
    torch.testing.assert_close(rows[3:], alone, rtol=1e-4, atol=1e-5)

    attended = model.encoders[0].attend_from_candidates(
        torch.randn(len(LENGTHS), WIDTH), torch.arange(4), sequences[0]
    )
    ((rows * torch.randn_like(rows)).sum() + attended.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_event_groups_have_separate_sizes() -> None:
    groups = {
        "clicks": EventGroupOptions(events=("click",), width=16, heads=4, layers=3, window=2),
        "views": EventGroupOptions(events=("view",), layers=1),
    }
    small = config(2, flow="int", event_groups=groups)
    model = InterFormer(USERS, small)
    assert [len(encoder.levels) for encoder in model.encoders] == [3, 1] and model.depth == 3
    rows, _ = encoded(model, torch.randn(len(LENGTHS), USERS, ROW), history())
    assert rows.shape == (len(LENGTHS), model.out_rows, ROW)
    assert event_groups_of(config()) == [EventGroupOptions(events=())]
