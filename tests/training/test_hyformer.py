"""HyFormer: tokens of rows and queries of events, decoded and mixed in each layer."""

from typing import cast

import pytest
import torch
import torch.nn.functional as F

from etl.errors import UserError
from training.model.config import GemConfig
from training.model.hyformer import HyFormer, HyFormerLayer, SequenceLevels, mean_of_events
from training.model.sequence.attention import Attention
from training.model.sequence.pyramid import EncodedEvents

ROWS, D = 12, 4
WIDTHS, QUERIES, TOKENS = (8, 6), 2, 8
LENGTHS = ((3, 0, 5), (2, 4, 0))  # events of each request, by event group
REQUEST = torch.tensor([0, 0, 1, 1, 1, 2])
SIZES = GemConfig(
    embedding_dim=D, heads=2, layers=2, mixer_tokens=TOKENS, hyformer_queries=QUERIES,
    interaction="hyformer", parallel_interaction=None,
)  # fmt: skip
LAYERS = 2


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def encoded(lengths: tuple[int, ...], width: int) -> EncodedEvents:
    offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    total = int(offsets[-1])
    return EncodedEvents(torch.randn(total, width), offsets, torch.ones(total))


def sequences(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> SequenceLevels:
    """Random events of all levels."""
    levels = [
        [encoded(of_group, width) for of_group, width in zip(lengths, WIDTHS, strict=True)]
        for _ in range(LAYERS + 1)
    ]
    return SequenceLevels(levels, REQUEST)


def model_of(**options: object) -> HyFormer:
    return HyFormer(ROWS, WIDTHS, SIZES.model_copy(update=options))


def rows() -> torch.Tensor:
    return torch.randn(ROWS, len(REQUEST), D)


def with_other_events(levels: SequenceLevels, level: int, group: int) -> SequenceLevels:
    old = levels.levels[level][group]
    changed = [list(groups) for groups in levels.levels]
    changed[level][group] = EncodedEvents(old.events + 1, old.offsets, old.ages)
    return SequenceLevels(changed, levels.request)


def test_candidates_are_independent_and_all_parameters_have_gradients() -> None:
    model, x, events = model_of(), rows().requires_grad_(), sequences()
    out = model(x, events)
    assert out.shape == (model.out_rows, len(REQUEST), D)
    kept = torch.tensor([1, 3, 5])
    fewer = model(x[:, kept], SequenceLevels(events.levels, REQUEST[kept]))
    torch.testing.assert_close(fewer, out[:, kept], rtol=1e-4, atol=1e-5)
    (out * torch.randn_like(out)).sum().backward()
    for tensor in [*model.parameters(), x]:
        assert tensor.grad is not None and tensor.grad.abs().sum() > 0


def test_each_layer_reads_its_level_of_the_events() -> None:
    """Queries are made of the mean event before the first level, layers decode the others."""
    model, x, events = model_of(), rows(), sequences()
    out = model(x, events)
    for level in range(LAYERS + 1):
        for group, lengths in enumerate(LENGTHS):
            changed = (model(x, with_other_events(events, level, group)) - out).abs().amax((0, 2))
            empty = torch.tensor([lengths[request] == 0 for request in REQUEST])
            assert (changed[~empty] > 1e-5).all() and not changed[empty].any()


def test_without_nets_of_tokens_the_layers_are_a_stack_of_cross_attention() -> None:
    model, x, events = model_of(), rows(), sequences()
    layers = cast("list[HyFormerLayer]", list(model.layers))
    for layer in layers:
        for weight in layer.ffn.down.parameters():
            torch.nn.init.zeros_(weight)
    fields = model.field_tokens(x)
    queries = model.make_queries(fields, events.levels[0], REQUEST)
    for number, layer in enumerate(layers, 1):
        for group, decoder in enumerate(cast("list[Attention]", list(layer.decoders))):
            level, heads = events.levels[number][group], SIZES.heads
            result = torch.zeros_like(queries[group])
            for candidate, request in enumerate(REQUEST.tolist()):
                of_request = slice(*level.offsets[request : request + 2].tolist())
                q = decoder.q(queries[group][:, candidate]).unflatten(1, (heads, -1))
                k, v = (
                    f(level.events[of_request]).unflatten(1, (heads, -1))
                    for f in (decoder.k, decoder.v)
                )
                scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
                attended = torch.einsum("hqk,khd->qhd", scores.softmax(2), v).flatten(1)
                result[:, candidate] = decoder.out(attended)
            queries[group] = result
    expected = model.norm(torch.cat((*queries, fields)))
    actual = model(x, events).view(TOKENS, -1, len(REQUEST), D).transpose(1, 2).flatten(2)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_queries_of_a_group_do_not_see_the_events_of_another_before_tokens_mix() -> None:
    model, x, events = model_of(), rows(), sequences()
    fields = model.field_tokens(x)
    before = model.make_queries(fields, events.levels[0], REQUEST)
    other = with_other_events(events, 0, 1)
    after = model.make_queries(fields, other.levels[0], REQUEST)
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_empty_sequences_have_finite_outputs_and_gradients() -> None:
    model, x = model_of(), rows()
    out = model(x, sequences(((0, 0, 0), (0, 0, 0))))
    out.sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert out.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


def test_the_mean_event_is_that_of_each_sequence() -> None:
    events = encoded((2, 0, 3), 5)
    expected = [events.events[:2].mean(0), torch.zeros(5), events.events[2:].mean(0)]
    torch.testing.assert_close(mean_of_events(events), torch.stack(expected))


def test_a_second_module_reads_the_rows() -> None:
    model, x, events = model_of(parallel_interaction="plain"), rows(), sequences()
    assert torch.equal(model(x, events)[-ROWS:], x)
    assert model.out_rows == model_of().out_rows + ROWS


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(UserError, match=r"must be more than --model\.hyformer-queries 2 times 2"):
        model_of(mixer_tokens=4)
