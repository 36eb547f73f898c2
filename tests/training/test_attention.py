from collections.abc import Callable
from random import Random
from typing import get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.model.matching import match
from training.ops.attention import Kind, attention, blocks, pairs, reference
from training.ops.attention.kinds import Activation

lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=6)


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


kinds = st.builds(
    Kind,
    st.sampled_from(get_args(Activation)),
    causal=st.booleans(),
    inside=st.sampled_from([None, 1.0, 0.3]),
    outside=st.sampled_from([1.0, 0.1]),
)


def gradients(out: Tensor, weight: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True)


def agree(fast: Callable[[], Tensor], slow: Callable[[], Tensor], *inputs: Tensor) -> None:
    """The same output and the same gradients."""
    got, wanted = fast(), slow()
    torch.testing.assert_close(got, wanted)
    if wanted.requires_grad and len(wanted):
        weight = torch.randn_like(wanted)
        for a, b in zip(
            gradients(got, weight, inputs), gradients(wanted, weight, inputs), strict=True
        ):
            torch.testing.assert_close(a, b)


def ragged(rows: int) -> Tensor:
    return torch.randn(rows, 2, 4, dtype=torch.float64, requires_grad=True)


@settings(max_examples=80)
@given(lengths, kinds, st.integers(1, 4), st.integers(0, 99))
def test_rectangles_are_the_reference(
    sizes: list[tuple[int, int]], kind: Kind, block: int, seed: int
) -> None:
    torch.manual_seed(seed)
    sizes = [(b, b) for _, b in sizes] if kind.causal else sizes
    q_offsets, kv_offsets = offsets([a for a, _ in sizes]), offsets([b for _, b in sizes])
    q, k, v = ragged(int(q_offsets[-1])), ragged(int(kv_offsets[-1])), ragged(int(kv_offsets[-1]))
    agree(
        lambda: blocks.attention(q, k, v, q_offsets, kv_offsets, kind, block=block),
        lambda: reference(q, k, v, q_offsets, kv_offsets, kind),
        q, k, v,
    )  # fmt: skip


@settings(max_examples=80)
@given(lengths, kinds.filter(lambda kind: not kind.causal), st.integers(1, 4), st.randoms())
def test_a_query_sees_the_first_keys_up_to_its_limit(
    sizes: list[tuple[int, int]], kind: Kind, block: int, random: Random
) -> None:
    torch.manual_seed(0)
    q_offsets, kv_offsets = offsets([a for a, _ in sizes]), offsets([b for _, b in sizes])
    q, k, v = ragged(int(q_offsets[-1])), ragged(int(kv_offsets[-1])), ragged(int(kv_offsets[-1]))
    limits = torch.tensor(
        [random.randint(0, keys) for queries, keys in sizes for _ in range(queries)],
        dtype=torch.long,
    )
    agree(
        lambda: blocks.attention(q, k, v, q_offsets, kv_offsets, kind, limits, block),
        lambda: reference(q, k, v, q_offsets, kv_offsets, kind, limits=limits),
        q, k, v,
    )  # fmt: skip


@settings(max_examples=60)
@given(lengths, st.integers(0, 99))
def test_pairs_are_the_reference(sizes: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    q_offsets, kv_offsets = offsets([a for a, _ in sizes]), offsets([b for _, b in sizes])
    q, k, v = ragged(int(q_offsets[-1])), ragged(int(kv_offsets[-1])), ragged(int(kv_offsets[-1]))
    agree(
        lambda: pairs.attention(q, k, v, q_offsets, kv_offsets),
        lambda: reference(q, k, v, q_offsets, kv_offsets),
        q, k, v,
    )  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 9),
    kinds.filter(lambda kind: kind.causal),
)
def test_windows_are_the_reference(sizes: list[int], window: int, kind: Kind) -> None:
    torch.manual_seed(0)
    cuts = offsets(sizes)
    q, k, v = (ragged(int(cuts[-1])) for _ in range(3))
    agree(
        lambda: attention(q, k, v, cuts, cuts, kind, window),
        lambda: reference(q, k, v, cuts, cuts, kind, window),
        q, k, v,
    )  # fmt: skip


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=8)),
        min_size=1,
        max_size=4,
    )
)
def test_a_candidate_is_matched_with_like_events_of_its_request(requests: list) -> None:
    own = torch.tensor([c for cs, _ in requests for c in cs], dtype=torch.long)
    seen = torch.tensor([e for _, es in requests for e in es], dtype=torch.long)
    request = torch.tensor([r for r, (cs, _) in enumerate(requests) for _ in cs], dtype=torch.long)
    cuts = offsets([len(es) for _, es in requests])
    if not len(own):
        return
    m = match(own, seen, request, cuts)
    by_candidate, q_offsets, by_event, kv_offsets = (
        m.candidates,
        m.q_offsets,
        m.events,
        m.kv_offsets,
    )
    assert sorted(by_candidate.tolist()) == list(range(len(own)))
    found = {}
    for group in range(len(q_offsets) - 1):
        events = by_event[kv_offsets[group] : kv_offsets[group + 1]].tolist()
        for c in by_candidate[q_offsets[group] : q_offsets[group + 1]].tolist():
            found[c] = events
            assert m.group_of[c] == group
    for c in range(len(own)):
        r = int(request[c])
        inside = range(int(cuts[r]), int(cuts[r + 1]))
        assert found[c] == [e for e in inside if own[c] != 0 and seen[e] == own[c]]
