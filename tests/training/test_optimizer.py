"""Muon and AdamW as one optimizer of the dense weights."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from benchmarks.harness import SIMULATOR_SPEC
from etl.spec import load_spec
from features.schema import feature_schema
from training.config import TrainConfig
from training.model.config import GemOptions, SequenceOptions
from training.model.gem import Gem
from training.trainer.optimizer import MuonAdamW, dense_optimizer, hidden_matrices

RANKMIXER = GemOptions(interaction="rankmixer")
MUON = TrainConfig(scale="tiny", dense_optimizer="muon", weight_decay=0.0, model=RANKMIXER)


@pytest.fixture(scope="module")
def gem() -> Gem:
    torch.manual_seed(0)
    return Gem(feature_schema(load_spec(SIMULATOR_SPEC)), MUON.gem_config)


def with_gradients(gem: Gem, seed: int) -> Gem:
    generator = torch.Generator().manual_seed(seed)
    for weight in gem.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    return gem


def test_matrices_of_hidden_layers_take_orthogonal_steps_and_others_those_of_adamw(
    gem: Gem,
) -> None:
    """Singular values of a step are about 0.2 sqrt(max(m, n)) times the rate, whatever g is."""
    gem = with_gradients(deepcopy(gem), 1)
    before = {name: weight.detach().clone() for name, weight in gem.named_parameters()}
    matrices = {id(weight) for weight in hidden_matrices(gem)}
    dense_optimizer(gem, MUON).step()
    counts = [0, 0]
    for name, weight in gem.named_parameters():
        step = (before[name] - weight.detach()) / MUON.dense_lr
        is_matrix = id(weight) in matrices
        counts[is_matrix] += 1
        if is_matrix:
            values = torch.linalg.svdvals(step) / (0.2 * max(step.shape) ** 0.5)
            assert values.max() < 1.3 and values.median() > 0.6, name  # tiny ones grow 485-fold
        else:  # the first step of Adam
            torch.testing.assert_close(step.abs(), torch.ones_like(step), rtol=0.05, atol=0.05)
    assert min(counts) > 5


def test_no_embedding_head_or_stack_of_matrices_is_trained_by_muon(gem: Gem) -> None:
    matrices = {id(weight) for weight in hidden_matrices(gem)}
    names = {name for name, weight in gem.named_parameters() if id(weight) in matrices}
    assert all(gem.get_parameter(name).dim() == 2 for name in names)
    excluded = ("heads.", "gate.", "trunk.0.", "surface.", "candidate_numeric.", "interaction.")
    assert not [name for name in names if name.startswith(excluded)], "token nets are stacks"
    wukong = Gem(gem.features, TrainConfig(scale="tiny").gem_config)
    ids = {id(weight) for weight in hidden_matrices(wukong)}
    assert id(wukong.get_parameter("interaction.first.layers.0.row_linear.weight")) in ids


def test_gates_are_trained_by_adamw(gem: Gem) -> None:
    """Those of summaries in the sequence layers, and of the streams of FinalMLP."""
    model = GemOptions(interaction="finalmlp", sequence=SequenceOptions(flow="int"))
    gated = Gem(gem.features, TrainConfig(scale="tiny", model=model).gem_config)
    ids = {id(weight) for weight in hidden_matrices(gated)}
    names = {name: id(weight) in ids for name, weight in gated.named_parameters()}
    gates = [name for name in names if "gate" in name.split(".")[:-1]]
    parts = ("gate.", "history.encoder.", "interaction.")
    assert all(any(name.startswith(part) for name in gates) for part in parts)
    assert not any(names[name] for name in gates)
    assert any(names[name] for name in names if name.startswith("interaction."))


def test_the_step_of_muon_does_not_depend_on_the_size_of_gradients(gem: Gem) -> None:
    weights = []
    for scale in (1.0, 1000.0):
        scaled = with_gradients(deepcopy(gem), 2)
        for weight in scaled.parameters():
            assert weight.grad is not None
            weight.grad *= scale
        dense_optimizer(scaled, MUON).step()
        weights.append([weight.detach() for weight in hidden_matrices(scaled)])
    for first, second in zip(*weights, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=2e-2 * MUON.dense_lr)


def test_the_state_of_both_parts_is_saved_and_restored(gem: Gem) -> None:
    """After loading, the next step is the same; rates are those of the parameter groups."""

    def step(model: Gem, optimizer: torch.optim.Optimizer, seed: int) -> None:
        with_gradients(model, seed)
        optimizer.step()
        optimizer.zero_grad()

    first = deepcopy(gem)
    optimizer = dense_optimizer(first, MUON)
    step(first, optimizer, 3)
    state: dict[str, Any] = deepcopy(get_optimizer_state_dict(first, optimizer))
    kinds = {name for values in state["state"].values() for name in values}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    second = deepcopy(first)
    restored = dense_optimizer(second, MUON)
    settings = get_optimizer_state_dict(second, restored)
    set_optimizer_state_dict(second, restored, {**settings, "state": state["state"]})
    assert isinstance(restored, MuonAdamW)
    for model, used in ((first, optimizer), (second, restored)):
        for group in used.param_groups:
            group["lr"] = 0.5 * MUON.dense_lr
        step(model, used, 4)
    assert equal(first, second)
    for group in restored.param_groups:
        group["lr"] = 0.0
    step(second, restored, 5)
    assert equal(first, second)


def equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
