"""AdamW after an upgrade: what is new takes no larger steps than what is trained."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.system.warm_start import (
    add_attributes,
    add_counter,
    add_history_attributes,
    add_objective,
    changed_spec,
    manifest_of,
    trained_gem,
)
from training.config import TrainConfig
from training.distributed.process_group import process_group
from training.trainer.state import TrainState
from training.trainer.upgrade import carry_over

GRADIENT = 1e-3


def longer_vocabulary(spec: dict[str, Any]) -> None:
    """A further value of an attribute of events."""
    spec["attributes"]["event"]["coupon"]["vocabulary"].append("clearance")


@pytest.fixture
def trained() -> Iterator[TrainState]:
    """A GEM whose events have attributes."""
    training = TrainConfig(scale="tiny", item_table_rows=256)
    with process_group():
        yield trained_gem(manifest_of(changed_spec(add_history_attributes), training))


ADDED = {
    "trunk.0.weight": add_attributes,
    "candidate_numeric.piecewise": add_counter,
    "heads.weight": add_objective,
    "history.event_tokenizer.attributes.attr_coupon.weight": longer_vocabulary,
}


def test_first_steps_of_new_positions_are_at_most_the_learning_rate(trained: TrainState) -> None:
    """Also after a long training, in which moments do not start from zero any more."""
    for weight in trained.model.core.parameters():
        moments = trained.optimizer.state[weight]
        moments["step"].fill_(5000)
        moments["exp_avg"].zero_()
        moments["exp_avg_sq"].fill_(GRADIENT**2)
    spec = changed_spec(add_history_attributes, *ADDED.values())
    state, _ = carry_over(trained, manifest_of(spec, trained.manifest.training))
    lr = state.optimizer.param_groups[0]["lr"]
    weights = dict(state.model.core.named_parameters())
    for _ in range(20):
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        for weight in weights.values():
            weight.grad = torch.full_like(weight, GRADIENT)
        state.optimizer.step()
        steps = {name: (w - before[name]).abs().max() for name, w in weights.items()}
        assert max(steps.values()) < 1.05 * lr, max(steps, key=lambda name: steps[name])
    shapes = {name: weight.shape for name, weight in trained.model.core.named_parameters()}
    assert all(weights[name].shape > shapes[name] for name in ADDED)
