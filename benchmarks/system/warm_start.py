"""Whether a trained GEM predicts the same after its spec was changed; on random requests."""

from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import torch
import yaml

from benchmarks.harness import SIMULATOR_SPEC, BenchmarkResult
from etl.spec import DataSpec, load_spec
from features.schema import feature_schema
from training.config import TrainConfig
from training.data.synthetic import BatchShape, random_batch
from training.distributed.process_group import process_group
from training.trainer.state import Manifest, TrainState, build_train_state
from training.trainer.step import Loss, train_step
from training.trainer.upgrade import TOLERANCE, carry_over, prediction_difference

SpecChange = Callable[[dict[str, Any]], None]
SHAPE = BatchShape(requests=16, rows_per_request=4, events_per_request=30, items=500)
STEPS, DAY = 3, date(2026, 1, 1)


def add_attributes(spec: dict[str, Any]) -> None:
    """Attributes of all types, and vectors of users and of the context."""
    spec["attributes"]["item"]["brand"] = {"type": "categorical", "size": 50}
    spec["attributes"]["user"]["income"] = {"type": "numeric"}
    spec["attributes"]["item"]["image"] = {"type": "vector", "width": 6}
    spec["attributes"]["user"]["interests"] = {"type": "multi_categorical", "size": 8}
    spec["attributes"]["context"]["query"] = {"type": "text", "size": 16}


def add_history_attributes(spec: dict[str, Any]) -> None:
    """A category and a number of the events in histories."""
    spec["attributes"]["event"] = {
        "coupon": {"type": "categorical", "vocabulary": ["spring", "sale"]},
        "quantity": {"type": "numeric"},
    }
    spec["history"] = {"attributes": ["coupon", "quantity"]}


def add_surface(spec: dict[str, Any]) -> None:
    """A surface that shows ads."""
    spec["surfaces"]["stories"] = {}


def add_objective(spec: dict[str, Any]) -> None:
    """An objective like click, of another window."""
    objectives = spec["objectives"]
    objectives["quick_click"] = {**objectives["click"], "window": "10m"}


def add_auxiliary_objectives(spec: dict[str, Any]) -> None:
    """An outcome and a dwell that GEM also learns."""
    long_view = spec["objectives"]["long_view"]
    spec["auxiliary_objectives"]["quick_view"] = {**long_view, "window": "5m"}
    spec["auxiliary_objectives"]["short_view"] = {
        **spec["auxiliary_objectives"]["view_time"],
        "window": "5m",
    }


def add_counter(spec: dict[str, Any]) -> None:
    """A window of each counter."""
    spec["counters"]["windows"].append("2d")


def add_event_type(spec: dict[str, Any]) -> None:
    """A type of events outside ads."""
    spec["events"]["post_save"] = {}


def add_similarity_attribute(spec: dict[str, Any]) -> None:
    """An attribute of items by which histories are searched."""
    spec["similarity_attributes"].append("format")


def reverse_names(spec: dict[str, Any]) -> None:
    """The same names of attributes and objectives in another order."""
    for group in ("user", "item", "context"):
        spec["attributes"][group] = dict(reversed(spec["attributes"][group].items()))
    spec["objectives"] = dict(reversed(spec["objectives"].items()))


SPEC_CHANGES: Mapping[str, SpecChange] = {
    "attributes": add_attributes,
    "attributes of events in histories": add_history_attributes,
    "surface": add_surface,
    "objective": add_objective,
    "auxiliary objective": add_auxiliary_objectives,
    "counter": add_counter,
    "event type": add_event_type,
    "similarity attribute": add_similarity_attribute,
    "order of names": reverse_names,
}


def changed_spec(*changes: SpecChange) -> DataSpec:
    """The simulator's spec after some changes."""
    content = yaml.safe_load(SIMULATOR_SPEC.read_text())
    for change in changes:
        change(content)
    return DataSpec.model_validate(content)


def manifest_of(spec: DataSpec, training: TrainConfig) -> Manifest:
    """The manifest of a GEM of a spec before its first step."""
    return Manifest(
        spec_hash=spec.hash,
        features=feature_schema(spec),
        attributes=spec.attributes,
        event_types=(),
        training=training,
        num_shards=1,
        table_versions={},
        trained_from=DAY,
        trained_until=DAY,
        complete=False,
        batches=0,
        steps=0,
    )


def trained_gem(manifest: Manifest, seed: int = 0) -> TrainState:
    """A GEM after some steps on random requests; also weights that start at zero have others."""
    state = build_train_state(manifest)
    features, rows = manifest.features, torch.zeros(0, dtype=torch.int64)
    days = state.last_access.last_days["item"]
    state.item_rows.update(torch.arange(SHAPE.items // 2), days, rows, 0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in state.model.core.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    state.model.core.train()
    state.last_access.today = DAY.toordinal()
    loss = Loss.from_config(manifest.training, features)
    for step in range(STEPS):
        batch = random_batch(features, SHAPE, seed + step)
        train_step(state.model, batch, len(batch), state.optimizer, loss)
        state.ema.update_parameters(state.model.core)
    state.all_reduce_counts()
    return state


def warm_start_equal(training: TrainConfig | None = None) -> bool:
    """Whether predictions are equal to 1e-6 after each of the changes, and after all of them."""
    config = training or TrainConfig(scale="tiny", item_table_rows=1024)
    cases = [*([change] for change in SPEC_CHANGES.values()), [*SPEC_CHANGES.values()]]
    with process_group():
        trained = trained_gem(manifest_of(load_spec(SIMULATOR_SPEC), config))
        for changes in cases:
            carried, _ = carry_over(trained, manifest_of(changed_spec(*changes), config))
            if prediction_difference(trained, carried) > TOLERANCE:
                return False
    return True


def measure_spec_changes(result: BenchmarkResult) -> None:
    """`warm_start_equal`."""
    is_equal = warm_start_equal()
    result.figures["warm_start_equal"] = is_equal
    result.rows.append(
        (
            f"a trained GEM after {len(SPEC_CHANGES)} changes of its spec",
            "equal predictions" if is_equal else "other predictions",
            f"{TOLERANCE:g} apart",
            "",
            "equal",
        )
    )
