"""Auxiliary objectives: GEM learns them beside the objectives, and nothing else sees them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.system.warm_start import SHAPE, SpecChange, changed_spec, manifest_of, trained_gem
from etl.spec import DataSpec
from etl.tables import model_schemas, schemas
from features.schema import FeatureSchema, feature_schema
from training.config import TrainConfig
from training.data.batch import Batch, InputStatistics
from training.data.synthetic import random_batch
from training.distributed.process_group import process_group
from training.model.config import GemOptions
from training.model.gem import Gem
from training.trainer.spec_changes import feature_changes
from training.trainer.state import TrainState, build_train_state
from training.trainer.step import Loss, train_step
from training.trainer.upgrade import TOLERANCE, carry_over, prediction_difference

AUXILIARY = {
    "quick_click": {"event": "ad_click", "window": "5m"},
    "view_time": {"event": "ad_view", "window": "1h", "target": "dwell"},
}
NAMES = ("quick_click", "view_time")


def with_auxiliary(spec: dict[str, Any]) -> None:
    spec["auxiliary_objectives"] = AUXILIARY


def without_auxiliary(spec: dict[str, Any]) -> None:
    spec.pop("auxiliary_objectives", None)


def features_of(change: SpecChange) -> FeatureSchema:
    return feature_schema(changed_spec(change))


def training_of(weight: float, **options: Any) -> TrainConfig:
    model = GemOptions(auxiliary_weight=weight)
    return TrainConfig(scale="tiny", item_table_rows=256, model=model, **options)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with process_group():
        yield


@pytest.fixture(scope="module")
def trained(group: None) -> TrainState:
    return trained_gem(manifest_of(changed_spec(with_auxiliary), training_of(0.3)))


def loss_and_gradients(
    gem: TrainState, batch: Batch, config: TrainConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a batch, and the gradients of the dense weights."""
    core = gem.model.core
    core.train()
    torch.manual_seed(0)
    core.zero_grad(set_to_none=True)
    total = Loss.from_config(config, gem.manifest.features)(gem.model(batch), batch, len(batch))
    total.backward()
    return float(total), {n: w.grad for n, w in core.named_parameters() if w.grad is not None}


def test_the_loss_is_cross_entropy_of_events_and_huber_of_dwells(trained: TrainState) -> None:
    features = trained.manifest.features
    config = training_of(0.3, objective_weights={"view_time": 2.0})
    batch = random_batch(features, SHAPE, 5)
    mask = torch.rand(batch.extra_mask.shape) < 0.6
    batch = replace(batch, extra_mask=mask, label_mask=torch.zeros_like(batch.label_mask))
    trained.model.core.eval()
    output = trained.model(batch)
    expected = 0.0
    for row, column in mask.nonzero().tolist():
        y, x = float(batch.extra_labels[row, column]), float(output.auxiliary[row, column])
        if NAMES[column] == "view_time":
            error = abs(x - y)
            expected += 2.0 * (error - 0.5 if error > 1 else error**2 / 2)
        else:
            p = 1 / (1 + 2.718281828459045**-x)
            expected -= float(torch.tensor(p if y else 1 - p).log())
    loss = Loss.from_config(config, features)(output, batch, 10)
    assert float(loss) == pytest.approx(0.3 * expected / 10, rel=1e-4)
    assert (batch.extra_labels[:, 1] > 1).any(), "dwells are not only 0 and 1"


def test_auxiliary_labels_train_the_layers_that_all_objectives_share(trained: TrainState) -> None:
    batch = random_batch(trained.manifest.features, SHAPE, 5)
    batch = replace(batch, label_mask=torch.zeros_like(batch.label_mask))
    _, gradients = loss_and_gradients(trained, batch, training_of(0.3))
    for name in ("trunk.0.weight", "embedding.weight", "surface.weight"):
        assert gradients[name].any(), name
    tower = gradients["heads.weight"].flatten(1).any(1)
    assert tower.tolist() == [False, False, False, True, True]
    _, gradients = loss_and_gradients(trained, batch.without_labels(), training_of(0.3))
    assert not any(gradient.any() for gradient in gradients.values())


def test_with_a_weight_of_zero_training_is_that_of_a_spec_without_them(group: None) -> None:
    states = []
    for change in (with_auxiliary, without_auxiliary):
        manifest = manifest_of(changed_spec(change), training_of(0.0))
        states.append(trained_gem(manifest))
    first, second = (state.state_dict() for state in states)
    assert first["dense"].keys() == second["dense"].keys()
    for part in ("dense", "ema", "item_rows"):
        for name, values in first[part].items():
            assert torch.equal(values, second[part][name]), name


def test_predictions_do_not_depend_on_auxiliary_labels_or_outputs(trained: TrainState) -> None:
    batch = random_batch(trained.manifest.features, SHAPE, 5)
    trained.model.core.eval()
    scored = trained.model(batch)
    unread = replace(
        batch,
        extra_labels=batch.extra_labels[:, :0],
        extra_mask=batch.extra_mask[:, :0],
    )
    assert torch.equal(trained.model(unread).logits, scored.logits)
    assert scored.logits.shape[1] == 3 and scored.auxiliary.shape[1] == len(NAMES)


def test_heads_start_at_the_means_of_the_first_day() -> None:
    features = features_of(with_auxiliary)
    gem = Gem(features, training_of(0.3).gem_config)
    rates, means = torch.tensor([0.2, 0.01, 0.3]), torch.tensor([0.004, 1.7])
    numbers = torch.randn(50, len(features.numeric_columns))
    of_users = torch.randn(50, len(features.user.numeric))
    gem.initialize_from(InputStatistics(numbers, of_users, rates, means))
    bias = gem.heads.out_bias.detach()
    torch.testing.assert_close(bias[:4].sigmoid(), torch.cat((rates, means[:1])))
    assert bias[4] == means[1]


def only_dwell(spec: dict[str, Any]) -> None:
    spec["auxiliary_objectives"] = {"view_time": AUXILIARY["view_time"]}


def served(spec: dict[str, Any]) -> None:
    only_dwell(spec)
    spec["objectives"]["quick_click"] = AUXILIARY["quick_click"]


def other_target(spec: dict[str, Any]) -> None:
    spec["auxiliary_objectives"] = AUXILIARY | {
        "view_time": {"event": "ad_view", "window": "1h"},
    }


@pytest.mark.parametrize("change", [without_auxiliary, only_dwell, served, other_target])
def test_predictions_stay_equal_when_auxiliary_objectives_change(
    trained: TrainState, change: Callable[[dict[str, Any]], None]
) -> None:
    changed, _ = carry_over(trained, manifest_of(changed_spec(change), training_of(0.3)))
    assert prediction_difference(trained, changed) <= TOLERANCE
    assert changed.model.core.heads.weight.shape[0] == len(changed.manifest.features.objectives) + (
        len(changed.manifest.features.auxiliary_objectives)
    )
    back, _ = carry_over(changed, manifest_of(changed_spec(with_auxiliary), training_of(0.3)))
    assert prediction_difference(changed, back) <= TOLERANCE


def test_an_auxiliary_objective_that_is_served_keeps_its_head(trained: TrainState) -> None:
    changed, _ = carry_over(trained, manifest_of(changed_spec(served), training_of(0.3)))
    features = changed.manifest.features
    batch = random_batch(features, SHAPE, 5)
    batch = replace(batch, surface=batch.surface.clamp(max=3))
    for state in (trained, changed):
        state.model.core.eval()
    before, after = trained.model(batch), changed.model(batch)
    column = features.objectives.index("quick_click")
    torch.testing.assert_close(after.logits[:, column], before.auxiliary[:, 0])
    torch.testing.assert_close(after.auxiliary[:, 0], before.auxiliary[:, 1])
    added, dropped = feature_changes(trained.manifest, changed.manifest)
    assert added["objective"] == dropped["auxiliary objective"] == ["quick_click"]


def test_a_head_of_another_target_is_a_new_one(trained: TrainState) -> None:
    changed, _ = carry_over(trained, manifest_of(changed_spec(other_target), training_of(0.3)))
    before, after = (state.model.core.heads.weight for state in (trained, changed))
    assert torch.equal(before[3], after[3]) and not torch.equal(before[4], after[4])


@pytest.mark.parametrize(
    "table", [schemas.examples, model_schemas.teacher_predictions, model_schemas.scores]
)
def test_tables_that_rankers_read_or_write_have_no_auxiliary_columns(
    table: Callable[[DataSpec], object],
) -> None:
    assert table(changed_spec(with_auxiliary)) == table(changed_spec(without_auxiliary))


def test_a_step_without_final_auxiliary_labels_leaves_their_towers_without_gradient(
    group: None,
) -> None:
    state = build_train_state(manifest_of(changed_spec(with_auxiliary), training_of(0.3)))
    features = state.manifest.features
    batch = random_batch(features, SHAPE, 5)
    batch = replace(batch, extra_mask=torch.zeros_like(batch.extra_mask))
    state.model.core.train()
    loss = Loss.from_config(state.manifest.training, features)
    train_step(state.model, batch, len(batch), state.optimizer, loss)
    gradient = state.model.core.heads.weight.grad
    assert gradient is not None and gradient.flatten(1).any(1).tolist() == [True] * 3 + [False] * 2
