"""Laws of the sequence side: blocks against their equations, who may see whom, what flows where."""

from itertools import pairwise, product
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from training.model.config import FamilyOptions, Flow, GemConfig, SequenceOptions
from training.model.sequence.family import append, families_of
from training.model.sequence.interformer import InterFormer
from training.model.sequence.layers import HstuLayer, TransformerLayer
from training.model.sequence.level import Encoded
from training.model.sequence.personalised import Gdpa, PersonalisedFFN
from training.model.sequence.rotary import RotaryTime
from training.model.sequence.shorten import shorten
from training.model.sequence.summary import Pooled, SeedPooling, SumKronLinear, newest
from training.ops.ragged import group_of_each

WIDTH, HEADS, ROW, USERS = 8, 2, 6, 3
LENGTHS = (5, 0, 1, 12)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def cuts(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def history(width: int = WIDTH, lengths: tuple[int, ...] = LENGTHS) -> Encoded:
    n = sum(lengths)
    ages = torch.cat([torch.arange(k, 0, -1) * 1000 for k in lengths])
    return Encoded(torch.randn(n, width), cuts(lengths), ages)


LAYERS = {
    "transformer": lambda window: TransformerLayer(WIDTH, HEADS, window, 2 * WIDTH),
    "hstu": lambda window: HstuLayer(WIDTH, HEADS, window, 64),
}


@pytest.mark.parametrize(("kind", "window"), list(product(LAYERS, (None, 4))))
def test_an_event_sees_its_own_past_alone(kind: str, window: int | None) -> None:
    layer, h = LAYERS[kind](window), history()
    turn = RotaryTime(WIDTH // HEADS)(h.offsets, h.ages)
    out = layer(h.events, h.offsets, turn)
    for at in range(len(h.events)):
        changed = h.events.clone()
        changed[at] += 1.0
        moved = (layer(changed, h.offsets, turn) - out).abs().amax(1) > 1e-6
        group = group_of_each(h.offsets)
        allowed = (group == group[at]) & (torch.arange(len(group)) >= at)
        assert moved[at] and not moved[~allowed].any()


def test_a_personalised_ffn_is_one_matrix_a_request() -> None:
    h, rows = history(), torch.randn(len(LENGTHS), USERS, WIDTH)
    layer = PersonalisedFFN(USERS, WIDTH)
    out = layer(h.events, h.offsets, rows)
    for r, (start, stop) in enumerate(pairwise(h.offsets.tolist())):
        matrix = rows[r].T @ layer.values
        torch.testing.assert_close(out[start:stop], h.events[start:stop] @ matrix * WIDTH**-0.5)


def test_gdpa_is_a_personalised_two_layer_ffn() -> None:
    """act(S A(X)) C(X), head by head, with keys as the columns of A and values as the rows of C."""
    h, rows = history(), torch.randn(len(LENGTHS), USERS, WIDTH)
    layer = Gdpa(USERS, WIDTH, HEADS, hidden=5)
    out = layer(h.events, h.offsets, rows)
    keys, values = layer.generated(rows)
    head = WIDTH // HEADS
    for r, (start, stop) in enumerate(pairwise(h.offsets.tolist())):
        for first in range(0, WIDTH, head):
            part = slice(first, first + head)
            a, c = keys[r, :, part].T * head**-0.5, values[r, :, part]
            hidden = F.gelu(h.events[start:stop, part] @ a)
            torch.testing.assert_close(out[start:stop, part], hidden @ c * 5**-0.5)


def test_a_sum_of_kronecker_products_is_one_linear_map() -> None:
    layer, pooled = SumKronLinear(7, 2, WIDTH), torch.randn(3, 7, WIDTH)
    whole = sum(torch.kron(z.T.contiguous(), w.T.contiguous()) for z, w in zip(layer.z, layer.w))  # noqa: B905
    assert isinstance(whole, Tensor)
    torch.testing.assert_close(layer(pooled).flatten(1), pooled.flatten(1) @ whole.T)


@given(st.integers(0, 50), st.floats(1.0, 100.0))
def test_turned_products_depend_on_distance_alone(places: int, factor: float) -> None:
    """Not on how many events lie before both, nor on a factor of both ages (in 1 + minutes)."""
    rotary, q, k = RotaryTime(16), torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    ages = torch.tensor([40_000.0, 300.0])

    def product_of(before: int, ages: Tensor) -> Tensor:
        filled = torch.cat((torch.full((before,), 1e6), ages))
        turn = rotary(torch.tensor([0, before + 2]), filled)
        both = turn(torch.cat((torch.zeros(before, 1, 16), q, k)))
        return (both[-2] * both[-1]).sum()

    scaled = (1 + ages / 60) * factor * 60 - 60
    torch.testing.assert_close(
        product_of(places, scaled), product_of(0, ages), rtol=1e-3, atol=1e-3
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 8))
def test_shortening_leaves_what_is_new_and_means_what_is_old(
    lengths: list[int], factor: int, keep: int
) -> None:
    h = history(3, tuple(lengths))
    shorter = shorten(h.offsets, factor, keep)
    means = shorter.mean(h.events)
    bounds = zip(pairwise(h.offsets.tolist()), pairwise(shorter.offsets.tolist()), strict=True)
    for (start, stop), (begin, end) in bounds:
        wanted = list(reversed(h.events[max(start, stop - keep) : stop].unbind()))
        old = h.events[start : max(start, stop - keep)].flip(0)
        wanted += [part.mean(0) for part in old.split(factor) if len(part)]
        assert end - begin == len(wanted)
        for got, mean in zip(means[begin:end].flip(0), wanted, strict=True):
            torch.testing.assert_close(got, mean)


def test_the_newest_events_and_rows_behind_them() -> None:
    h, rows = history(), torch.randn(2, WIDTH)
    last = newest(h.events, h.offsets, 3)
    longer = append(h, rows)
    assert longer.offsets.diff().tolist() == [n + 2 for n in LENGTHS]
    for r, (start, stop) in enumerate(pairwise(h.offsets.tolist())):
        own = h.events[start:stop].flip(0)[:3]
        assert torch.equal(last[r, : len(own)], own) and not last[r, len(own) :].any()
        begin, end = longer.offsets[r : r + 2].tolist()
        assert torch.equal(longer.events[begin:end], torch.cat((h.events[start:stop], rows)))
        assert torch.equal(longer.ages[begin : end - 2], h.ages[start:stop])


@pytest.mark.parametrize("pool", [Pooled(WIDTH, HEADS, 3), SeedPooling(WIDTH, HEADS, 3, 2)])
def test_pooling_reads_a_request_as_a_set(pool: torch.nn.Module) -> None:
    h = history()
    rows = pool(h.events, h.offsets)
    assert rows.shape == (len(LENGTHS), 3, WIDTH)
    order = torch.cat([start + torch.randperm(n) for start, n in zip(h.offsets, LENGTHS)])  # noqa: B905
    torch.testing.assert_close(pool(h.events[order], h.offsets), rows)
    torch.testing.assert_close(pool(h.events[:5], torch.tensor([0, 5])), rows[:1])


def config(layers: int = 2, **options: object) -> GemConfig:
    sizes = {"row_width": ROW, "event_width": WIDTH, "heads": HEADS, "event_layers": layers}
    small = {"mlp": 16, "rank": 2, "window": 4, "encoded_events": 16}
    return GemConfig(**sizes, **small, sequence=SequenceOptions.model_validate(options))


def encoded(model: InterFormer, x: Tensor, h: Encoded) -> tuple[Tensor, Tensor]:
    begun = [family.begin(h.events, h.offsets, h.ages) for family in model.families]
    rows, sequences = model(x, begun)
    return rows, torch.cat([s.events.flatten() for s in sequences])


@pytest.mark.parametrize("flow", get_args(Flow))
def test_a_flow_tells_what_it_says(flow: Flow) -> None:
    """s2n and int: rows hear of events and of each other; n2s and int: events hear of rows."""
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
        summaries = sum(family.rows for family in model.families)
        changed = Encoded(h.events + torch.randn_like(h.events), h.offsets, h.ages)
        mixed = slice(0, model.out_rows - summaries)
        assert not torch.allclose(encoded(model, x, changed)[0][0, mixed], rows[0, mixed])


OPTIONS = [
    {"flow": "int"},
    {"flow": "int", "personal": "pffn", "layer": "hstu", "rotary": True},
    {"flow": "n2s", "pooling": "hsp", "cls_rows": 2},
    {"flow": "int", "skip": True},
    {"flow": "s2n", "shorten": 3, "keep": 2},
    {"flow": "sep", "layer": "hstu", "cls_rows": 1, "rotary": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_requests_are_apart_and_all_of_an_option_learns(options: dict) -> None:
    model, h = InterFormer(USERS, config(4, **options)), history()
    x = torch.randn(len(LENGTHS), USERS, ROW)
    begun = [family.begin(h.events, h.offsets, h.ages) for family in model.families]
    rows, sequences = model(x, begun)
    cls = options.get("cls_rows", 0)
    assert sequences[0].offsets.diff().tolist() == [n + cls for n in LENGTHS]
    alone, _ = encoded(model, x[3:], Encoded(h.events[6:], cuts((12,)), h.ages[6:]))
    torch.testing.assert_close(rows[3:], alone, rtol=1e-4, atol=1e-5)

    family = model.families[0]
    seen = family.seen_by(torch.randn(len(LENGTHS), WIDTH), torch.arange(4), sequences[0])
    ((rows * torch.randn_like(rows)).sum() + seen.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_families_have_sizes_of_their_own() -> None:
    told = {
        "clicks": FamilyOptions(events=("click",), width=16, heads=4, layers=3, window=2),
        "views": FamilyOptions(events=("view",), layers=1),
    }
    small = config(2, flow="int", families=told)
    model = InterFormer(USERS, small)
    assert [len(family.levels) for family in model.families] == [3, 1] and model.depth == 3
    rows, _ = encoded(model, torch.randn(len(LENGTHS), USERS, ROW), history())
    assert rows.shape == (len(LENGTHS), model.out_rows, ROW)
    assert families_of(config()) == [FamilyOptions(events=())]
