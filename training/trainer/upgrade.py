"""A trained GEM under a changed spec: carried over by name, with equal predictions at the start."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, cast

import torch
from torch import Tensor

from etl.errors import UserError
from etl.spec.attributes import Attributes
from etl.tables import atomic_io
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, list_matching
from features.schema import ITEM_TABLE, FeatureSchema, feature_schema
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.synthetic import BatchShape, random_batch, with_features_of
from training.distributed.sharding import local_shards
from training.model.alignment import without_columns
from training.model.carry_over import CarryOver
from training.model.embeddings import UNKNOWN_VALUE_ROW
from training.model.gem import Gem
from training.teacher.compressor import compressor_version
from training.trainer import checkpoint
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.spec_changes import changed_columns, feature_changes
from training.trainer.state import Manifest, TrainState, build_train_state
from training.trainer.step import GemModel

TOLERANCE = 1e-6  # of probabilities
CHECK_SHAPE = BatchShape(requests=8, rows_per_request=4, events_per_request=40, items=2000)
NUMBER_KINDS = ("carried", "added", "dropped")


@dataclass(frozen=True)
class UpgradeReport:
    """What an upgrade of a GEM carried over.

    Attributes:
        manifest: The manifest of the new checkpoint.
        added: Features that the spec has and the GEM did not read, by kind.
        dropped: Features that the GEM read and the spec no longer has, by kind.
        numbers: Numbers of weights and tables that were carried over, added and dropped.
        difference: Largest difference of the predictions for the same random requests; None if the
            spec has none of the objectives that the GEM predicts.
    """

    manifest: Manifest
    added: dict[str, list[str]]
    dropped: dict[str, list[str]]
    numbers: Counter[str]
    difference: float | None

    @property
    def is_equal(self) -> bool:
        """Whether predictions are equal; they are not where the spec dropped what GEM read."""
        return self.difference is not None and self.difference <= TOLERANCE

    def __str__(self) -> str:
        """Lines for the terminal."""
        counts = ", ".join(f"{self.numbers[kind]:,} {kind}" for kind in NUMBER_KINDS)
        lines = [f"GEM until {self.manifest.trained_until}: {counts} numbers of weights and tables"]
        for title, features in (("added", self.added), ("dropped", self.dropped)):
            named = [f"{kind} {', '.join(names)}" for kind, names in features.items() if names]
            lines.append(f"{title}: {'; '.join(named) or 'nothing'}")
        equality = "no common objective"
        if self.difference is not None:
            equality = "equal" if self.is_equal else f"up to {self.difference:.1g} apart"
        lines.append(f"predictions for requests of the old spec: {equality}")
        return "\n".join(lines)


def upgrade_teacher(lake: Lake, item_table_rows: int | None = None) -> list[UpgradeReport]:
    """Replace the latest GEM of a lake by the same model for the lake's spec.

    Further GEMs of a teacher of several seeds are replaced like the first one, all of the latest
    day that all of them have learned. Once all are written, other checkpoints are removed, because
    the spec cannot read them.

    Args:
        lake: The lake, with the new spec.
        item_table_rows: Rows of the larger item table; None keeps them.

    Raises:
        UserError: There is no GEM, no day that all GEMs of the teacher have learned, the item table
            would shrink, or the spec lacks the sequence that the GEM reads.
    """
    found = latest_checkpoints(lake)
    reports = [_upgrade_checkpoint(lake, *each, item_table_rows) for each in found]
    for path, _ in found:
        for other in list_matching(path.parent, "[0-9]*"):
            if other != path:
                atomic_io.remove_folder(other)
    return reports


def _upgrade_checkpoint(
    lake: Lake, path: StoragePath, old: Manifest, item_table_rows: int | None
) -> UpgradeReport:
    new = upgraded_manifest(lake, old, item_table_rows or old.training.item_table_rows)
    old_state = build_train_state(old)
    checkpoint.load_checkpoint(path, old_state)
    new_state, numbers = carry_over(old_state, new)
    is_comparable = set(old.features.objectives) & set(new.features.objectives)
    difference = prediction_difference(old_state, new_state) if is_comparable else None
    checkpointer = AsyncCheckpointer()
    checkpointer.save(path, new_state)
    checkpointer.wait()
    added, dropped = feature_changes(old, new)
    return UpgradeReport(new_state.manifest, added, dropped, numbers, difference)


def latest_checkpoints(lake: Lake) -> list[tuple[StoragePath, Manifest]]:
    """The complete checkpoints, of any spec, of the latest day that all GEMs of a teacher have.

    Raises UserError if there is none.
    """
    first = _complete_checkpoints(lake, 0)
    if not first:
        raise UserError(f"{lake.root} has no trained GEM to upgrade; run `gemline train gem`")
    seeds = first[max(first)][1].training.teacher.seeds
    members = [first, *(_complete_checkpoints(lake, member) for member in range(1, seeds))]
    common = set.intersection(*map(set, members))
    if not common:
        raise UserError(
            f"the {seeds} GEMs of the teacher in {lake.root} have no day that all of them have "
            "learned: run `gemline train gem` with the spec before the upgrade until all have "
            f"learned the same day, or {checkpoint.START_OVER}"
        )
    return [complete[max(common)] for complete in members]


def _complete_checkpoints(lake: Lake, member: int) -> dict[date, tuple[StoragePath, Manifest]]:
    """The complete checkpoints of a GEM of the teacher, of any spec, by the last day learned."""
    found = checkpoint.list_checkpoints(lake.root, None, member)
    return {m.trained_until: (path, m) for path, m in found if m.complete}


def upgraded_manifest(lake: Lake, old: Manifest, item_table_rows: int) -> Manifest:
    """The manifest of the same model under the spec of a lake."""
    spec, training = lake.spec, old.training
    if item_table_rows < training.item_table_rows:
        raise UserError(
            f"--item-table-rows {item_table_rows}: the item table has {training.item_table_rows} "
            "rows and cannot shrink; items that are no longer read make room by themselves"
        )
    assert training.sequence is not None
    if training.sequence not in spec.sequences:
        raise UserError(
            f"GEM until {old.trained_until} reads the sequence {training.sequence}, which spec "
            f"{spec.name} does not have: keep its name, or {checkpoint.START_OVER}"
        )
    features = feature_schema(spec)
    return old.model_copy(
        update={
            "spec_hash": spec.hash,
            "upgraded_from": tuple(sorted({*old.upgraded_from, old.spec_hash} - {spec.hash})),
            "features": features,
            "attributes": spec.attributes,
            "event_types": spec.sequences[training.sequence].events or (),
            "base_rates": {n: r for n, r in old.base_rates.items() if n in features.objectives},
            "records_base_rates": old.records_base_rates or bool(old.base_rates),
            "training": _training_of(training, features, item_table_rows),
            "spec_max_length": old.spec_max_length or training.max_length,
            "compressor_version": compressor_version(old),
            "unfitted_numbers": _unfitted_numbers(old, features, spec.attributes),
        }
    )


def _unfitted_numbers(
    old: Manifest, features: FeatureSchema, attributes: Attributes
) -> tuple[str, ...]:
    """Numbers whose encodings have no edges yet: the next day of training gives them some."""
    changed = changed_columns(old.attributes, attributes)
    fitted = set(old.features.all_numeric_columns) - changed - set(old.unfitted_numbers)
    return tuple(name for name in features.all_numeric_columns if name not in fitted)


def _training_of(
    training: TrainConfig, features: FeatureSchema, item_table_rows: int
) -> TrainConfig:
    """The configuration without objectives that no longer exist."""

    def existing(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in features.objectives}

    names = {*features.objectives, *features.auxiliary_objectives}
    weights = {name: w for name, w in training.objective_weights.items() if name in names}
    parents = existing(training.model.esmm_parents)
    parents = {child: parent for child, parent in parents.items() if parent in features.objectives}
    return training.model_copy(
        update={
            "item_table_rows": item_table_rows,
            "objective_weights": weights,
            "negative_sampling_rate": existing(training.negative_sampling_rate),
            "model": training.model.model_copy(update={"esmm_parents": parents}),
        }
    )


def carry_over(old: TrainState, manifest: Manifest) -> tuple[TrainState, Counter[str]]:
    """A model of a manifest with all that it shares with a trained one; and counts of numbers.

    Weights, their average, the optimizers' state, and rows of tables are carried over. What is new
    starts as in a new model, except that new inputs have weights of zero.
    """
    changed = changed_columns(old.manifest.attributes, manifest.attributes)
    layout = without_columns(old.model.core.layout, changed)
    new = build_train_state(manifest.model_copy(update={"layout": layout}))
    new.manifest = manifest.model_copy(update={"layout": new.model.core.layout})
    same = CarryOver(old.model.core, new.model.core, changed)
    before, after = old.state_dict(), new.state_dict()
    carried = {
        "dense": same.tensors(before["dense"], after["dense"]),
        "ema": same.without_counts().tensors(before["ema"], after["ema"], "module."),
        "optimizer": _carry_optimizer(same, before["optimizer"], after["optimizer"]),
        "item_rows": _larger(before["item_rows"], after["item_rows"]),
    }
    new.load_state_dict(after | carried)
    _carry_tables(old, new, changed, same.numbers)
    return new, same.numbers


SECOND_MOMENT = "exp_avg_sq"  # of AdamW
OptimizerState = dict[str, dict[str, Tensor]]  # by parameter, then by name of the state


def _carry_optimizer(same: CarryOver, old: OptimizerState, new: OptimizerState) -> OptimizerState:
    """The state of the dense optimizer; that of new positions is zero, except second moments.

    A parameter without any position of the old one has the state of a new parameter.
    """
    carried = {parameter: dict(state) for parameter, state in new.items()}
    names = sorted({name for state in new.values() for name in state})
    for name in names:
        states = _of_name(old, name), _of_name(new, name)
        for parameter, values in same.of_optimizer().tensors(*states).items():
            carried[parameter][name] = values
    moments = _of_name(old, SECOND_MOMENT), _of_name(new, SECOND_MOMENT)
    for parameter, is_carried in same.carried(*moments).items():
        if is_carried.any():
            _fill_second_moment(carried[parameter], ~is_carried)
        else:
            carried[parameter] = dict(new[parameter])
    return carried


def _of_name(states: OptimizerState, name: str) -> dict[str, Tensor]:
    return {parameter: state[name] for parameter, state in states.items() if name in state}


def _fill_second_moment(state: dict[str, Tensor], is_new: Tensor) -> None:
    """Start the second moments of new positions at the mean of the others.

    All positions of a parameter have one count of steps: from zero, and after a long training, the
    first steps of a position would be several times the learning rate.
    """
    moments = state[SECOND_MOMENT]
    state[SECOND_MOMENT] = torch.where(is_new, moments[~is_new].mean(), moments)


def _larger(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of a table that has got more rows: first those of the old rows."""
    return {name: torch.cat((old[name], values[len(old[name]) :])) for name, values in new.items()}


@torch.no_grad()
def _carry_tables(
    old: TrainState, new: TrainState, changed: frozenset[str], numbers: Counter[str]
) -> None:
    """Copy rows, their optimizer state and their last access; tables are of one process.

    New rows of a vocabulary start as the row of unknown values, which their values read until now.
    """
    before, after = _local_tables(old), _local_tables(new)
    for name, (weight, accumulator) in after.items():
        days = new.last_access.last_days[name]
        if name not in before or name in changed:
            numbers["added"] += weight.numel()
            continue
        old_weight, old_accumulator = before[name]
        rows = len(old_weight)
        weight[:rows] = old_weight
        if name != ITEM_TABLE:
            weight[rows:] = weight[UNKNOWN_VALUE_ROW]
        accumulator[:rows] = old_accumulator
        days[:rows] = old.last_access.last_days[name]
        numbers["carried"] += old_weight.numel()
        numbers["added"] += weight.numel() - old_weight.numel()
    gone = [weight for name, (weight, _) in before.items() if name not in after or name in changed]
    numbers["dropped"] += sum(weight.numel() for weight in gone)


def _local_tables(state: TrainState) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights (N, d) and the optimizer state (N) of each table of this process."""
    optimizer = state.tables.fused_optimizer.state_dict()["state"]
    tables = {}
    for key, weight in state.tables.state_dict().items():
        ((_, rows),) = local_shards(weight)
        (values,) = optimizer[key].values()
        ((_, accumulator),) = local_shards(values)
        tables[key.split(".")[-2]] = rows, accumulator
    return tables


@torch.no_grad()
def prediction_difference(old: TrainState, new: TrainState, seed: int = 0) -> float:
    """Largest difference of the probabilities of two models for the same random requests.

    The new model gets random values of the features that the old one does not read. Both the
    trained weights and their average are compared, on the objectives that both have, of which
    there must be one.
    """
    before, after = old.manifest, new.manifest
    changed = changed_columns(before.attributes, after.attributes)
    batch = random_batch(before.features, CHECK_SHAPE, seed)
    batches = batch, with_features_of(batch, before.features, after.features, changed, seed)
    objectives = [name for name in before.features.objectives if name in after.features.objectives]
    differences = [0.0]
    for averaged in (False, True):
        first, second = (
            _probabilities(state, batch, objectives, averaged)
            for state, batch in zip((old, new), batches, strict=True)
        )
        differences.append(float((first - second).abs().max()))
    return max(differences)


def _probabilities(
    state: TrainState, batch: Batch, objectives: Sequence[str], averaged: bool
) -> Tensor:
    """Probabilities (B, O) of some objectives, without a record of the look-ups."""
    core = cast("Gem", state.ema.module if averaged else state.model.core)
    was_training = core.training
    model = GemModel(core, core.eval(), state.tables, state.item_rows, state.model.user_rows)
    logits = model(batch).logits
    core.train(was_training)
    columns = [state.manifest.features.objectives.index(name) for name in objectives]
    return torch.sigmoid(logits[:, columns])
