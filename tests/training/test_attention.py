"""Every implementation of ragged attention gives the outputs and gradients of the reference."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.data.matching import match_by_attribute
from training.ops.attention import (
    AttentionKind,
    attention,
    cpu_padded,
    cpu_tiled,
    dispatch,
    reference,
)
from training.ops.attention.reference import Activation
from training.ops.ragged import query_key_pairs

sequence_lengths = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=6
)


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


kinds = st.builds(
    AttentionKind,
    st.sampled_from(get_args(Activation)),
    causal=st.booleans(),
    score_scale=st.sampled_from([None, 1.0, 0.3]),
    weight_scale=st.sampled_from([1.0, 0.1]),
)


def gradients(out: Tensor, weight: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True)


def assert_same_outputs_and_gradients(
    fast: Callable[[], Tensor], slow: Callable[[], Tensor], *inputs: Tensor
) -> None:
    actual, expected = fast(), slow()
    torch.testing.assert_close(actual, expected)
    if expected.requires_grad and len(expected):
        weight = torch.randn_like(expected)
        actual_grads = gradients(actual, weight, inputs)
        expected_grads = gradients(expected, weight, inputs)
        torch.testing.assert_close(actual_grads, expected_grads)


def random_rows(rows: int) -> Tensor:
    return torch.randn(rows, 2, 4, dtype=torch.float64, requires_grad=True)


@settings(max_examples=80)
@given(sequence_lengths, kinds, st.integers(1, 4), st.integers(0, 99))
def test_tiled_attention_equals_the_reference(
    sizes: list[tuple[int, int]], kind: AttentionKind, block: int, seed: int
) -> None:
    torch.manual_seed(seed)
    sizes = [(b, b) for _, b in sizes] if kind.causal else sizes
    q_offsets, kv_offsets = offsets([a for a, _ in sizes]), offsets([b for _, b in sizes])
    q, k, v = (
        random_rows(int(q_offsets[-1])),
        random_rows(int(kv_offsets[-1])),
        random_rows(int(kv_offsets[-1])),
    )
    assert_same_outputs_and_gradients(
        lambda: cpu_tiled.attention(q, k, v, q_offsets, kv_offsets, kind, block_size=block),
        lambda: reference(q, k, v, q_offsets, kv_offsets, kind),
        q, k, v,
    )  # fmt: skip


@settings(max_examples=80)
@given(
    sequence_lengths, kinds.filter(lambda kind: not kind.causal), st.integers(1, 4), st.randoms()
)
def test_tiled_attention_with_limits_equals_the_reference(
    sizes: list[tuple[int, int]], kind: AttentionKind, block: int, random: Random
) -> None:
    torch.manual_seed(0)
    q_offsets, kv_offsets = offsets([a for a, _ in sizes]), offsets([b for _, b in sizes])
    q, k, v = (
        random_rows(int(q_offsets[-1])),
        random_rows(int(kv_offsets[-1])),
        random_rows(int(kv_offsets[-1])),
    )
    limits = torch.tensor(
        [random.randint(0, keys) for queries, keys in sizes for _ in range(queries)],
        dtype=torch.long,
    )
    assert_same_outputs_and_gradients(
        lambda: cpu_tiled.attention(q, k, v, q_offsets, kv_offsets, kind, limits, block),
        lambda: reference(q, k, v, q_offsets, kv_offsets, kind, limits=limits),
        q, k, v,
    )  # fmt: skip


@settings(max_examples=80)
@given(
    sequence_lengths,
    kinds.filter(lambda kind: not kind.causal),
    st.booleans(),
    st.booleans(),
    st.randoms(),
)
def test_padded_attention_equals_the_reference(
    sizes: list[tuple[int, int]],
    kind: AttentionKind,
    has_limits: bool,
    keys_are_values: bool,
    random: Random,
) -> None:
    """Also if keys are the values, and for any groups of sequences."""
    torch.manual_seed(0)
    q_offsets, kv_offsets = offsets([a for a, _ in sizes]), offsets([b for _, b in sizes])
    q, k = random_rows(int(q_offsets[-1])), random_rows(int(kv_offsets[-1]))
    v = k if keys_are_values else random_rows(int(kv_offsets[-1]))
    limits = torch.tensor(
        [random.randint(0, keys + 1) for queries, keys in sizes for _ in range(queries)],
        dtype=torch.long,
    )
    limits_or_none = limits if has_limits else None
    queries, keys = (np.array(counts, np.int64) for counts in zip(*sizes, strict=True))
    groups = cpu_padded.group_sequences(queries, keys)
    if random.random() < 0.5:
        groups = [group[i : i + 1] for group in groups for i in range(len(group))]
    assert_same_outputs_and_gradients(
        lambda: cpu_padded.attention(
            q, k, v, q_offsets.numpy(), kv_offsets.numpy(), groups, kind, limits_or_none
        ),
        lambda: reference(q, k, v, q_offsets, kv_offsets, kind, limits=limits_or_none),
        *((q, k) if keys_are_values else (q, k, v)),
    )


@settings(max_examples=60)
@given(sequence_lengths, st.integers(0, 99))
def test_segment_attention_equals_the_reference(sizes: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    q_offsets, kv_offsets = offsets([a for a, _ in sizes]), offsets([b for _, b in sizes])
    q, k, v = (
        random_rows(int(q_offsets[-1])),
        random_rows(int(kv_offsets[-1])),
        random_rows(int(kv_offsets[-1])),
    )
    assert_same_outputs_and_gradients(
        lambda: dispatch.segment_attention(q, k, v, query_key_pairs(q_offsets, kv_offsets)),
        lambda: reference(q, k, v, q_offsets, kv_offsets),
        q, k, v,
    )  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 9),
    kinds.filter(lambda kind: kind.causal),
)
def test_windowed_attention_equals_the_reference(
    sizes: list[int], window: int, kind: AttentionKind
) -> None:
    torch.manual_seed(0)
    sequence_offsets = offsets(sizes)
    q, k, v = (random_rows(int(sequence_offsets[-1])) for _ in range(3))
    assert_same_outputs_and_gradients(
        lambda: attention(q, k, v, sequence_offsets, sequence_offsets, kind, window),
        lambda: reference(q, k, v, sequence_offsets, sequence_offsets, kind, window),
        q, k, v,
    )  # fmt: skip


@pytest.mark.parametrize("window", [48, 65, 130])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_wide_windows_are_tiles_of_several_blocks(window: int, activation: Activation) -> None:
    torch.manual_seed(0)
    sequence_offsets = offsets([150, 0, 3, 70])
    q, k, v = (random_rows(223) for _ in range(3))
    kind = AttentionKind(activation, causal=True, weight_scale=0.1)
    assert_same_outputs_and_gradients(
        lambda: attention(q, k, v, sequence_offsets, sequence_offsets, kind, window),
        lambda: reference(q, k, v, sequence_offsets, sequence_offsets, kind, window),
        q, k, v,
    )  # fmt: skip


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 20))
def test_a_window_moves_with_its_query(length: int, window: int, older: int) -> None:
    """Each query sees itself and `window` earlier keys, wherever its history begins."""
    torch.manual_seed(0)
    ones, count = torch.ones(length, 1, 1), AttentionKind("identity", causal=True, score_scale=1.0)
    longer, shorter = offsets([older + length]), offsets([length])
    visible = attention(ones, ones, ones, shorter, shorter, count, window).flatten()
    assert visible.tolist() == [min(t, window) + 1 for t in range(length)]
    q, k, v = (random_rows(older + length) for _ in range(3))
    kind = AttentionKind(causal=True)
    with_older = attention(q, k, v, longer, longer, kind, window)
    without = attention(q[older:], k[older:], v[older:], shorter, shorter, kind, window)
    torch.testing.assert_close(with_older[older + window :], without[window:])


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=8)),
        min_size=1,
        max_size=4,
    )
)
def test_a_candidate_matches_the_events_of_its_request_with_the_same_value(
    requests: list[tuple[list[int], list[int]]],
) -> None:
    candidate_values = torch.tensor([c for values, _ in requests for c in values], dtype=torch.long)
    event_values = torch.tensor([e for _, values in requests for e in values], dtype=torch.long)
    request_index = torch.tensor(
        [r for r, (values, _) in enumerate(requests) for _ in values], dtype=torch.long
    )
    event_offsets = offsets([len(values) for _, values in requests])
    if not len(candidate_values):
        return
    matches = match_by_attribute(candidate_values, event_values, request_index, event_offsets)
    assert sorted(matches.candidates.tolist()) == list(range(len(candidate_values)))

    matching_events = {}
    candidate_spans = pairwise(matches.q_offsets.tolist())
    event_spans = pairwise(matches.kv_offsets.tolist())
    for group, (candidates, events) in enumerate(zip(candidate_spans, event_spans, strict=True)):
        for candidate in matches.candidates[slice(*candidates)].tolist():
            matching_events[candidate] = matches.events[slice(*events)].tolist()
            assert matches.candidate_group[candidate] == group
    for candidate, value in enumerate(candidate_values.tolist()):
        request = int(request_index[candidate])
        events_of_request = range(int(event_offsets[request]), int(event_offsets[request + 1]))
        expected = [e for e in events_of_request if value != 0 and event_values[e] == value]
        assert matching_events[candidate] == expected
