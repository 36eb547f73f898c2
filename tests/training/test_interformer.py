"""InterFormer: the direction of information, depth, causality, rows of candidates, refusals."""

from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from etl.errors import UserError
from tests.training.test_sequence import HEADS, LENGTHS, ROW, USERS, WIDTH, history, offsets_of
from training.model.config import EventGroupOptions, Flow, GemConfig, SequenceOptions
from training.model.sequence.event_groups import append_tokens, event_groups_of
from training.model.sequence.interformer import InterFormer, InterFormerOutput
from training.model.sequence.pyramid import EncodedEvents
from training.ops.ragged import query_key_pairs


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


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


def encode(
    model: InterFormer, x: Tensor, h: EncodedEvents, request: Tensor | None = None
) -> InterFormerOutput:
    tokens = [encoder.project_tokens(h.events, h.offsets, h.ages) for encoder in model.encoders]
    out: InterFormerOutput = model(x, tokens, request)
    return out


def encoded(model: InterFormer, x: Tensor, h: EncodedEvents) -> tuple[Tensor, Tensor]:
    """Rows, and the events of all sequences of full length as one vector."""
    out = encode(model, x, h)
    return out.rows, torch.cat([s.events.flatten() for s in out.full_length])


def perturb(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter))


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


def test_both_sides_of_a_layer_read_the_layer_before() -> None:
    """X' is made of X and S, S' of S and X: neither side waits for the other."""
    model, h = InterFormer(USERS, config(2, flow="int")), history()
    x = torch.randn(len(LENGTHS), USERS, ROW)
    rows, events = encoded(model, x, h)
    mixed = model.out_rows - model.encoders[0].num_rows
    perturb(model.encoders[0].levels[1])
    new_rows, new_events = encoded(model, x, h)
    assert torch.equal(new_rows[:, :mixed], rows[:, :mixed])
    assert not torch.allclose(new_events, events)
    perturb(model.interaction_layers[1])
    newer_rows, newer_events = encoded(model, x, h)
    assert torch.equal(newer_events, new_events)
    assert not torch.allclose(newer_rows[:, :mixed], new_rows[:, :mixed])
    perturb(model.interaction_layers[0])
    assert not torch.allclose(encoded(model, x, h)[1], newer_events)


OPTIONS: list[dict[str, Any]] = [
    {"flow": "int"},
    {"flow": "int", "personalization": "pffn", "layer": "hstu", "rotary": True},
    {"flow": "int", "gdpa_scale": "weights", "target_attention": "activation_unit"},
    {"flow": "n2s", "pooling": "hsp", "cls_tokens": 2},
    {"flow": "int", "computation_skip": True},
    {"flow": "int", "computation_skip": True, "pyramid_stride": 2, "pyramid_keep_recent": 2},
    {"flow": "s2n", "pyramid_stride": 3, "pyramid_keep_recent": 2},
    {"flow": "sep", "layer": "hstu", "cls_tokens": 1, "rotary": True},
]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


@each_option
def test_requests_are_independent_and_all_parameters_have_gradients(
    options: dict[str, Any],
) -> None:
    model, h = InterFormer(USERS, config(4, **options)), history()
    x = torch.randn(len(LENGTHS), USERS, ROW)
    out = encode(model, x, h)
    cls_tokens = options.get("cls_tokens", 0)
    assert out.full_length[0].offsets.diff().tolist() == [n + cls_tokens for n in LENGTHS]
    last_request = EncodedEvents(h.events[6:], offsets_of((12,)), h.ages[6:])
    alone, _ = encoded(model, x[3:], last_request)
    torch.testing.assert_close(out.rows[3:], alone, rtol=1e-4, atol=1e-5)

    pairs = None
    if options.get("target_attention"):
        pairs = query_key_pairs(torch.arange(5), out.full_length[0].offsets)
    attended = model.encoders[0].attend_from_candidates(
        torch.randn(len(LENGTHS), WIDTH), torch.arange(4), out.full_length[0], pairs
    )
    ((out.rows * torch.randn_like(out.rows)).sum() + attended.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@each_option
def test_an_event_of_a_causal_sequence_does_not_depend_on_later_ones(
    options: dict[str, Any],
) -> None:
    model, h = InterFormer(USERS, config(4, **options)), history()
    x = torch.randn(len(LENGTHS), USERS, ROW)
    events = h.events.clone()
    events[-1] += 1.0
    before = encode(model, x, h)
    after = encode(model, x, EncodedEvents(events, h.offsets, h.ages))
    stop = int(before.causal[0].offsets[-1]) - options.get("cls_tokens", 0) - 1
    torch.testing.assert_close(after.causal[0].events[:stop], before.causal[0].events[:stop])
    changed = (after.full_length[0].events - before.full_length[0].events).abs().amax(1) > 1e-6
    reads_all = options["flow"] == "int" and not options.get("pyramid_stride")
    assert changed[: stop - 1].any() == reads_all  # rows that read all events personalize them


@pytest.mark.parametrize(
    ("options", "last_full_length"),
    [
        ({"flow": "sep"}, 3),
        ({"flow": "int"}, 3),
        ({"flow": "sep", "pyramid_stride": 2, "pyramid_keep_recent": 2}, 0),
        ({"flow": "int", "computation_skip": True, "pyramid_stride": 2}, 1),
    ],
    ids=str,
)
def test_candidates_attend_to_the_last_level_of_full_length(
    options: dict[str, Any], last_full_length: int
) -> None:
    """With skipping it is one that attended: events are shortened after the first attention."""
    model, h = InterFormer(USERS, config(4, **options)), history()
    x = torch.randn(len(LENGTHS), USERS, ROW)
    (encoder,) = model.encoders
    assert any(level.layer for level in encoder.levels[: last_full_length + 1])
    _, events = encoded(model, x, h)
    for level in encoder.levels[last_full_length + 1 :]:
        perturb(level)
    assert torch.equal(encoded(model, x, h)[1], events)
    perturb(encoder.levels[last_full_length])
    assert not torch.allclose(encoded(model, x, h)[1], events)


@pytest.mark.parametrize(
    ("options", "count"),
    [({"flow": "sep"}, 1), ({"flow": "int"}, 5), ({"flow": "int", "computation_skip": True}, 3)],
)
def test_each_summary_is_computed_once(options: dict[str, Any], count: int) -> None:
    """Before each of four levels that reads a new one, and after the last."""
    model, h = InterFormer(USERS, config(4, **options)), history()
    summaries = list(model.encoders[0].summaries.values())
    calls: list[int] = []
    for number, summary in enumerate(summaries):
        summary.register_forward_hook(lambda *_, number=number: calls.append(number))
    encode(model, torch.randn(len(LENGTHS), USERS, ROW), h)
    assert calls == list(range(len(summaries))) and len(calls) == count


def test_cls_tokens_are_made_of_the_rows_and_read_the_events() -> None:
    model, h = InterFormer(USERS, config(flow="sep", cls_tokens=2)), history()
    x, other = torch.randn(2, len(LENGTHS), USERS, ROW)
    first, second = (encode(model, rows, h).full_length[0] for rows in (x, other))
    changed = (first.events - second.events).abs().amax(1) > 1e-6
    is_cls = torch.zeros_like(changed)
    is_cls[(first.offsets[1:, None] - torch.tensor([1, 2])).flatten()] = True
    assert torch.equal(changed, is_cls)
    events = EncodedEvents(torch.randn_like(h.events), h.offsets, h.ages)
    read = encode(model, x, events).full_length[0].events[is_cls].view(len(LENGTHS), -1)
    moved = (read - first.events[is_cls].view(len(LENGTHS), -1)).abs().amax(1) > 1e-6
    assert moved.tolist() == [length > 0 for length in LENGTHS]


def test_tokens_are_appended_to_each_sequence() -> None:
    h, tokens = history(), torch.randn(len(LENGTHS), 2, WIDTH)
    longer = append_tokens(h, tokens)
    assert longer.offsets.diff().tolist() == [n + 2 for n in LENGTHS]
    bounds = zip(pairwise(h.offsets.tolist()), pairwise(longer.offsets.tolist()), strict=True)
    for r, ((start, stop), (first, last)) in enumerate(bounds):
        assert torch.equal(longer.events[first:last], torch.cat((h.events[start:stop], tokens[r])))
        assert torch.equal(longer.ages[first : last - 2], h.ages[start:stop])


@pytest.mark.parametrize(
    "options",
    [
        {"flow": "int"},
        {"flow": "n2s", "personalization": "pffn"},
        {"flow": "s2n"},
        {"flow": "sep", "cls_tokens": 1},
        {"flow": "s2n", "cls_tokens": 1, "pyramid_stride": 2, "pyramid_keep_recent": 2},
    ],
    ids=str,
)
def test_each_candidate_has_the_encoding_of_a_request_of_its_own(options: dict[str, Any]) -> None:
    model, h = InterFormer(USERS, config(**options, context="candidate")), history()
    request = torch.tensor([0, 0, 1, 3, 3, 3])
    x = torch.randn(len(request), USERS, ROW)
    out = encode(model, x, h, request)
    for row, r in enumerate(request.tolist()):
        events = slice(int(h.offsets[r]), int(h.offsets[r + 1]))
        own = EncodedEvents(h.events[events], offsets_of((LENGTHS[r],)), h.ages[events])
        alone = encode(model, x[row : row + 1], own, torch.zeros(1, dtype=torch.long))
        torch.testing.assert_close(out.rows[row], alone.rows[0], rtol=1e-4, atol=1e-5)
        sequence = out.full_length[0]
        number = row if model.options.encodes_each_candidate else r
        first, last = sequence.offsets[number : number + 2].tolist()
        torch.testing.assert_close(
            sequence.events[first:last], alone.full_length[0].events, rtol=1e-4, atol=1e-5
        )
    assert len(out.rows) == len(request) and (out.rows[0] - out.rows[1]).abs().max() > 1e-3
    copies = len(request) if model.options.encodes_each_candidate else len(LENGTHS)
    assert len(out.full_length[0].offsets) == copies + 1


def test_event_groups_have_separate_sizes_and_rows() -> None:
    groups = {
        "clicks": EventGroupOptions(
            events=("click",), width=16, heads=4, layers=3, window=2, pooled_rows=5, recent_rows=1
        ),
        "views": EventGroupOptions(events=("view",), layers=1),
    }
    small = config(2, flow="int", event_groups=groups)
    model, h = InterFormer(USERS, small), history()
    assert [len(encoder.levels) for encoder in model.encoders] == [3, 1] and model.depth == 3
    assert [encoder.num_rows for encoder in model.encoders] == [6, 4]
    x = torch.randn(len(LENGTHS), USERS, ROW)
    before = encode(model, x, h)
    assert before.rows.shape == (len(LENGTHS), model.out_rows, ROW)
    perturb(model.encoders[1].context_summaries)
    after = encode(model, x, h)
    assert not torch.allclose(after.causal[1].events, before.causal[1].events)
    assert torch.equal(after.causal[0].events, before.causal[0].events)
    assert event_groups_of(config()) == {"all": EventGroupOptions(events=())}


def test_numbers_of_layers_and_events_are_those_of_the_group_the_options_and_the_scale() -> None:
    groups = {
        "a": EventGroupOptions(events=("a",), layers=4, max_events=3),
        "b": EventGroupOptions(events=("b",)),
    }
    model = InterFormer(USERS, config(num_layers=2, max_events=8, event_groups=groups))
    assert [(len(e.levels), e.max_events) for e in model.encoders] == [(4, 3), (2, 8)]
    (encoder,) = InterFormer(USERS, config(1)).encoders
    assert (len(encoder.levels), encoder.max_events) == (1, 16)


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (1, {"flow": "int", "computation_skip": True}, "computation-skip needs two"),
        (3, {"flow": "sole", "computation_skip": True}, "group all has 0: set .*num-layers"),
        (1, {"pyramid_stride": 4}, "pyramid-stride 4 merges no events in 1 sequence layers"),
        (
            2,
            {"flow": "int", "computation_skip": True, "pyramid_stride": 4},
            "no events in 2",
        ),
        (2, {"context": "candidate"}, "no effect with the flow sep: set --model.sequence.flow"),
        (
            2,
            {"flow": "int", "context": "candidate", "next_action_weight": 0.1},
            "set --model.sequence.context request",
        ),
    ],
)
def test_options_without_effect_are_refused(
    layers: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        InterFormer(USERS, config(layers, **options))


def test_a_shallow_event_group_is_refused_with_its_name() -> None:
    groups = {"ads": {"events": ["click"], "layers": 1}, "posts": {"events": ["view"]}}
    options = {"flow": "int", "computation_skip": True, "event_groups": groups}
    with pytest.raises(UserError, match="event group ads has 1"):
        InterFormer(USERS, config(3, **options))
