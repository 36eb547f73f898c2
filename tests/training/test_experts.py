"""MMoE and PLE: mixtures of experts for each objective, and whose loss trains them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.model.config import SCALES
from training.model.experts import Experts, build_experts
from training.model.heads import ObjectiveTowers

BATCH, OBJECTIVES, HIDDEN, WIDTH = 6, 3, 8, 5


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_with_one_expert_all_objectives_read_the_same_plain_layer() -> None:
    experts, h = Experts(OBJECTIVES, HIDDEN, WIDTH, 1, 0), torch.randn(BATCH, HIDDEN)
    layer = torch.relu(h @ experts.shared_weight[0] + experts.shared_bias[0])
    torch.testing.assert_close(experts(h), layer[:, None].expand(-1, OBJECTIVES, -1))


@given(st.integers(1, 4), st.integers(0, 3), st.floats(0.1, 100))
def test_gates_are_positive_and_sum_to_one(shared: int, specific: int, scale: float) -> None:
    experts = Experts(OBJECTIVES, HIDDEN, WIDTH, shared, specific)
    gates = experts.gates(scale * torch.randn(BATCH, HIDDEN))
    assert gates.shape == (BATCH, OBJECTIVES, shared + specific) and (gates >= 0).all()
    torch.testing.assert_close(gates.sum(2), torch.ones(BATCH, OBJECTIVES))


def test_a_mixture_is_the_sum_of_gated_experts() -> None:
    """Shared experts first, then those of the objective, example by example."""
    experts, h = Experts(OBJECTIVES, HIDDEN, WIDTH, 2, 3), torch.randn(BATCH, HIDDEN)
    mixtures, gates = experts(h), experts.gates(h)
    for objective in range(OBJECTIVES):
        weights = [*experts.shared_weight, *experts.specific_weight[objective]]
        biases = [*experts.shared_bias, *experts.specific_bias[objective]]
        outputs = [torch.relu(h @ w + b) for w, b in zip(weights, biases, strict=True)]
        expected = torch.einsum("bk,kbw->bw", gates[:, objective], torch.stack(outputs))
        torch.testing.assert_close(mixtures[:, objective], expected)


def test_experts_of_an_objective_are_trained_by_its_loss_alone() -> None:
    """Also through the towers; shared experts are trained by every loss."""
    experts = Experts(OBJECTIVES, HIDDEN, WIDTH, 2, 2)
    towers = ObjectiveTowers(2, OBJECTIVES, WIDTH, 4)
    surface = torch.zeros(BATCH, dtype=torch.int64)
    for objective in range(OBJECTIVES):
        experts.zero_grad()
        towers(experts(torch.randn(BATCH, HIDDEN)), surface)[:, objective].sum().backward()
        others = [o for o in range(OBJECTIVES) if o != objective]
        for weight in (experts.specific_weight, experts.specific_bias, experts.gate):
            assert weight.grad is not None
            assert weight.grad[objective].any() and not weight.grad[others].any()
        assert experts.shared_weight.grad is not None
        assert experts.shared_weight.grad.flatten(1).any(1).all()


def test_equal_inputs_of_all_objectives_give_the_same_towers() -> None:
    towers, h = ObjectiveTowers(2, OBJECTIVES, WIDTH, 4), torch.randn(BATCH, WIDTH)
    surface = torch.arange(BATCH) % 3
    repeated = h[:, None].expand(-1, OBJECTIVES, -1)
    torch.testing.assert_close(towers(repeated, surface), towers(h, surface))


@pytest.mark.parametrize(("kind", "specific"), [("mmoe", 0), ("ple", 3)])
def test_only_ple_has_experts_of_each_objective(kind: str, specific: int) -> None:
    config = SCALES["tiny"].model_copy(update={"experts": kind, "num_experts": 3})
    experts = build_experts(OBJECTIVES, config)
    assert experts and (experts.shared, experts.specific) == (3, specific)
    assert build_experts(OBJECTIVES, SCALES["tiny"]) is None
