"""A trained GEM under a changed spec: equal predictions at first, and what is new is trained."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.system.warm_start import (
    SHAPE,
    SPEC_CHANGES,
    SpecChange,
    add_attributes,
    add_history_attributes,
    changed_spec,
    manifest_of,
    reverse_names,
    trained_gem,
)
from etl.errors import UserError
from etl.spec import load_spec
from features.schema import feature_schema
from training.config import TrainConfig
from training.data.synthetic import random_batch
from training.distributed.process_group import process_group
from training.distributed.sharding import local_shards
from training.model.alignment import RowAlignment, without_columns
from training.model.carry_over import CarryOver
from training.model.config import GemOptions, SequenceOptions
from training.model.feature_axes import feature_axes
from training.model.gem import Gem
from training.trainer.spec_changes import feature_changes
from training.trainer.state import TrainState
from training.trainer.step import Loss, train_step
from training.trainer.upgrade import (
    TOLERANCE,
    carry_over,
    prediction_difference,
)

MODELS: dict[str, GemOptions] = {
    "default": GemOptions(),
    "dcnv2 beside wukong": GemOptions(
        parallel_interaction="dcnv2", cross_layer_rows=4, user_hash_buckets=0
    ),
    "rankmixer, PLE": GemOptions(interaction="rankmixer", experts="ple", num_experts=2),
    "hyformer alone, MMoE": GemOptions(
        interaction="hyformer", parallel_interaction=None, experts="mmoe"
    ),
    "context, narrow and shared rows": GemOptions(
        low_cardinality_threshold=40,
        embedding_width_factor=2.0,
        value_loss_weight=0.1,
        sequence=SequenceOptions(flow="int", cls_tokens=1),
    ),
    "context of candidates": GemOptions(sequence=SequenceOptions(flow="int", context="candidate")),
}


def training_of(name: str) -> TrainConfig:
    return TrainConfig(scale="tiny", item_table_rows=256, model=MODELS[name])


def gem_of(name: str) -> TrainState:
    return trained_gem(manifest_of(load_spec(SIMULATOR_SPEC), training_of(name)))


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with process_group():
        yield


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest, group: None) -> TrainState:
    return gem_of(request.param)


@pytest.fixture(scope="module")
def default(group: None) -> TrainState:
    return gem_of("default")


def upgrade(state: TrainState, *changes: SpecChange) -> TrainState:
    return carry_over(state, manifest_of(changed_spec(*changes), state.manifest.training))[0]


def table(state: TrainState, name: str) -> torch.Tensor:
    weight = state.tables.state_dict()[f"collection.embeddings.{name}.weight"]
    ((_, rows),) = local_shards(weight)
    return rows


def train_one_step(state: TrainState) -> None:
    features = state.manifest.features
    batch = random_batch(features, SHAPE, 7)
    loss = Loss.from_config(state.manifest.training, features)
    state.model.core.train()
    train_step(state.model, batch, len(batch), state.optimizer, loss)


def test_predictions_are_equal_after_all_changes_of_the_spec(trained: TrainState) -> None:
    changed = upgrade(trained, *SPEC_CHANGES.values())
    assert prediction_difference(trained, changed) <= TOLERANCE
    again = upgrade(changed, *SPEC_CHANGES.values())
    assert prediction_difference(changed, again) <= TOLERANCE


def add_second_attributes(spec: dict[str, Any]) -> None:
    """Attributes whose rows precede and follow those of `add_attributes`."""
    item, context = (spec["attributes"][group] for group in ("item", "context"))
    color, slot = ({"type": "categorical", "size": size} for size in (40, 30))
    spec["attributes"] |= {"item": {"color": color, **item}, "context": {**context, "slot": slot}}
    spec["attributes"]["item"]["sound"] = {"type": "vector", "width": 3}


def drop_brand(spec: dict[str, Any]) -> None:
    """One of several rows that were added before."""
    del spec["attributes"]["item"]["brand"]


def test_predictions_are_equal_after_each_of_several_upgrades(trained: TrainState) -> None:
    first = upgrade(trained, add_attributes)
    train_one_step(first)
    second = upgrade(first, add_attributes, add_second_attributes)
    assert prediction_difference(first, second) <= TOLERANCE
    old = second.model.core.candidate_alignment
    nn.init.normal_(old.get_parameter("weight"))
    third = upgrade(second, add_attributes, add_second_attributes, drop_brand)
    new = third.model.core.candidate_alignment
    kept = [old.added_names.index(name) for name in new.added_names]
    assert len(old.added_names) == len(kept) + 1
    assert torch.equal(old.get_parameter("weight")[:, kept], new.get_parameter("weight"))


@pytest.mark.parametrize("name", SPEC_CHANGES)
def test_predictions_are_equal_after_a_change_of_the_spec(default: TrainState, name: str) -> None:
    changed = upgrade(default, SPEC_CHANGES[name])
    assert prediction_difference(default, changed) <= TOLERANCE
    added, dropped = feature_changes(default.manifest, changed.manifest)
    assert any(added.values()) == (name != "order of names") and not any(dropped.values())


def test_the_difference_is_that_of_trained_weights(default: TrainState) -> None:
    """Of two models with other weights it is large, also if only their averages differ."""
    other = upgrade(default)
    assert prediction_difference(default, other) <= TOLERANCE
    with torch.no_grad():
        for weight in other.ema.module.parameters():
            weight.mul_(1.1)
    assert prediction_difference(default, other) > 1e-4


def test_new_features_are_trained_from_the_first_step(trained: TrainState) -> None:
    """Weights of zero have gradients: after a step, new values change predictions."""
    changed = upgrade(trained, add_attributes)
    alignment = changed.model.core.row_alignment.weight
    assert alignment is not None and not alignment.any()
    before = table(changed, "item_brand").clone()
    train_one_step(changed)
    assert (alignment != 0).all(0).all()
    train_one_step(changed)
    assert not torch.equal(before, table(changed, "item_brand"))


def test_attributes_of_events_in_histories_are_trained_from_the_first_step(
    trained: TrainState,
) -> None:
    """Their embeddings start from zero, and of the values in a batch they change."""
    changed = upgrade(trained, add_history_attributes)
    tokenizer = changed.model.core.history.event_tokenizer
    weights = [e.weight for e in tokenizer.attributes.values() if isinstance(e, nn.Embedding)]
    assert [len(weight) for weight in weights] == [4, 256]
    assert not any(weight.any() for weight in weights)
    train_one_step(changed)
    assert all(weight.any() for weight in weights)


def test_the_complete_state_is_carried_over(default: TrainState) -> None:
    """Both models take the same next step if the spec is the same."""
    same = upgrade(default)
    again = upgrade(default)
    for state in (same, again):
        torch.manual_seed(0)
        train_one_step(state)
    assert prediction_difference(same, again) == 0
    before, after = default.state_dict(), upgrade(default, add_attributes).state_dict()
    assert before["ema"]["n_averaged"] == after["ema"]["n_averaged"] > 0
    for name, values in before["item_rows"].items():
        assert torch.equal(values, after["item_rows"][name])
    moments, carried = before["optimizer"], after["optimizer"]
    assert carried["heads.weight"]["step"] == moments["heads.weight"]["step"] > 0
    key = "history.event_tokenizer.item_projection.weight"
    old, new = moments[key]["exp_avg"], carried[key]["exp_avg"]
    assert old.any() and new.shape[1] > old.shape[1]
    assert new.ne(0).sum() == old.ne(0).sum(), "new positions have no moments"
    for name, days in before["last_access"].items():
        assert torch.equal(days, after["last_access"][name])
    (sums,) = before["tables_optimizer"]["collection.embeddings.item.weight"].values()
    (kept,) = after["tables_optimizer"]["collection.embeddings.item.weight"].values()
    assert torch.equal(sums.to_local().local_shards()[0], kept.to_local().local_shards()[0])


def test_a_removed_feature_that_returns_is_a_new_one(default: TrainState) -> None:
    def without_country(spec: dict[str, Any]) -> None:
        del spec["attributes"]["user"]["country"]

    without = upgrade(default, without_country)
    added, dropped = feature_changes(default.manifest, without.manifest)
    assert dropped["attribute"] == ["user_country"] and not any(added.values())
    assert prediction_difference(default, without) > TOLERANCE
    returned = upgrade(without)
    assert prediction_difference(without, returned) <= TOLERANCE
    assert not torch.equal(table(default, "user_country"), table(returned, "user_country"))
    assert "user_country" in returned.model.core.row_alignment.added_names


def test_a_spec_without_features_of_users_is_trained_and_may_get_some(default: TrainState) -> None:
    def without_users(spec: dict[str, Any]) -> None:
        spec["attributes"]["user"] = {}

    training = default.manifest.training
    without = trained_gem(manifest_of(changed_spec(without_users), training))
    row = without.model.core.any_user
    assert row is not None and row.any(), "it is trained"
    full = carry_over(without, manifest_of(load_spec(SIMULATOR_SPEC), training))[0]
    assert prediction_difference(without, full) <= TOLERANCE
    assert "user_country" in full.model.core.row_alignment.added_names
    assert default.model.core.any_user is None


def test_an_attribute_that_is_read_differently_is_a_new_one(default: TrainState) -> None:
    def other_hashes(spec: dict[str, Any]) -> None:
        spec["attributes"]["item"]["category"]["size"] = 200
        spec["attributes"]["user"]["signup_days"]["transform"] = "none"

    changed = upgrade(default, other_hashes)
    added, dropped = feature_changes(default.manifest, changed.manifest)
    assert added["attribute"] == dropped["attribute"]
    assert set(added["attribute"]) == {"item_category", "user_signup_days"}
    core = changed.model.core
    assert not core.user_numeric.linear.any() and not core.user_numeric.piecewise.any()
    assert "candidate|item_category" in core.row_alignment.added_names
    key = "history.recency.0.age_embedding.weight"
    before, after = (state.model.core.get_parameter(key) for state in (default, changed))
    assert not torch.equal(before, after)


def test_new_values_of_a_vocabulary_start_as_the_unknown_value(default: TrainState) -> None:
    def longer(spec: dict[str, Any]) -> None:
        spec["attributes"]["item"]["goal"]["vocabulary"].append("installs")

    def other_order(spec: dict[str, Any]) -> None:
        spec["attributes"]["item"]["goal"]["vocabulary"].reverse()

    before, after = table(default, "item_goal"), table(upgrade(default, longer), "item_goal")
    assert torch.equal(after[:-1], before) and torch.equal(after[-1], before[1])
    reordered = upgrade(default, other_order)
    assert feature_changes(default.manifest, reordered.manifest)[0]["attribute"] == ["item_goal"]


def test_new_values_of_an_event_attribute_start_as_the_unknown_value(default: TrainState) -> None:
    def longer(spec: dict[str, Any]) -> None:
        spec["attributes"]["event"]["coupon"]["vocabulary"].append("clearance")

    before = upgrade(default, add_history_attributes)
    train_one_step(before)
    after = upgrade(before, add_history_attributes, longer)
    assert prediction_difference(before, after) <= TOLERANCE
    old, new = (
        state.model.core.get_parameter("history.event_tokenizer.attributes.attr_coupon.weight")
        for state in (before, after)
    )
    assert torch.equal(new[:-1], old) and torch.equal(new[-1], old[1]) and old[1].any()


def test_a_larger_item_table_keeps_its_rows(default: TrainState) -> None:
    training = default.manifest.training
    larger = training.model_copy(update={"item_table_rows": 2 * training.item_table_rows})
    grown, _ = carry_over(default, manifest_of(load_spec(SIMULATOR_SPEC), larger))
    assert prediction_difference(default, grown) == 0
    rows = training.item_table_rows
    items = torch.arange(600)
    assert torch.equal(default.item_rows(items), grown.item_rows(items))
    nothing = torch.zeros(0, dtype=torch.int64)
    grown.item_rows.update(items, grown.last_access.last_days["item"], nothing, 0)
    assert grown.item_rows(items).max() > rows


@pytest.mark.parametrize("options", MODELS)
def test_every_parameter_that_depends_on_the_features_has_named_axes(options: str) -> None:
    """Parameters of a model and its upgrades differ in shape only along axes that are named."""
    config = training_of(options).gem_config
    changes = [change for change in SPEC_CHANGES.values() if change is not reverse_names]
    models = [Gem(feature_schema(load_spec(SIMULATOR_SPEC)), config)]
    for upgraded in (changes, [*changes, add_second_attributes]):
        features = feature_schema(changed_spec(*upgraded))
        models.append(Gem(features, config, models[-1].layout))
    shapes = [{name: values.shape for name, values in gem.state_dict().items()} for gem in models]
    for gem, shape in zip(models, shapes, strict=True):
        for key, axes in feature_axes(gem).items():
            if key in shape:
                named = [len(axis.names) if axis else None for axis in axes]
                sizes = zip(named, shape[key], strict=True)
                assert all(count in (None, size) for count, size in sizes), key
                assert all(len(set(a.names)) == len(a.names) for a in axes if a), key
    for gem, (before, after) in zip(models[1:], pairwise(shapes), strict=True):
        differing = {key for key in before.keys() & after.keys() if before[key] != after[key]}
        assert len(differing) > 5 and differing <= feature_axes(gem).keys()


def test_models_of_other_widths_are_refused(default: TrainState) -> None:
    core = default.model.core
    for name in ("embedding_dim", "mlp_width", "rank"):
        config = default.manifest.training.gem_config
        wider = config.model_copy(update={name: 2 * getattr(config, name)})
        other = Gem(core.features, wider)
        with pytest.raises(UserError, match="other widths cannot, because LayerNorm"):
            CarryOver(core, other).tensors(core.state_dict(), other.state_dict())


def test_an_alignment_keeps_rows_by_name_and_starts_without_new_ones() -> None:
    names, trained = ("a", "new", "c", "b"), ("a", "b", "gone", "c")
    alignment, x = RowAlignment(names, trained), torch.randn(4, 5, 3)
    expected = torch.stack((x[0], x[3], torch.zeros(5, 3), x[2]))
    assert torch.equal(alignment(x), expected)
    assert alignment.trained_names == ("a", "b", "", "c") and alignment.added_names == ("new",)
    nn.init.constant_(alignment.get_parameter("weight"), 2.0)
    torch.testing.assert_close(alignment(x)[3], x[2] + 2 * x[1])
    same = RowAlignment(trained, trained)
    assert same(x) is x and not list(same.parameters())
    assert without_columns({"user": ("a", "x|b", "c")}, ["b"]) == {"user": ("a", "", "c")}
