import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.model.matching import match
from training.ops.attention import attention, pairs, reference

lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=6)


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


@settings(max_examples=60)
@given(lengths, st.integers(0, 99))
def test_fast_paths_are_the_reference(sizes: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    q_offsets, kv_offsets = offsets([a for a, _ in sizes]), offsets([b for _, b in sizes])
    q = torch.randn(int(q_offsets[-1]), 2, 4, requires_grad=True)
    k, v = (torch.randn(int(kv_offsets[-1]), 2, 4, requires_grad=True) for _ in range(2))
    expected = reference(q, k, v, q_offsets, kv_offsets)
    weight = torch.randn_like(expected)
    wanted = ()
    if expected.requires_grad:
        wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v), allow_unused=True)
    for fast in (attention, pairs.attention):
        out = fast(q, k, v, q_offsets, kv_offsets)
        if not expected.requires_grad:
            assert len(out) == 0 or out.eq(0).all()
            continue
        torch.testing.assert_close(out, expected)
        got = torch.autograd.grad((out * weight).sum(), (q, k, v), allow_unused=True)
        for a, b in zip(got, wanted, strict=True):
            if a is not None and b is not None:
                torch.testing.assert_close(a, b)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 9))
def test_windows_are_the_reference(sizes: list[int], window: int) -> None:
    torch.manual_seed(0)
    cuts = offsets(sizes)
    q, k, v = (torch.randn(int(cuts[-1]), 2, 4) for _ in range(3))
    torch.testing.assert_close(
        attention(q, k, v, cuts, cuts, window), reference(q, k, v, cuts, cuts, window)
    )


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
