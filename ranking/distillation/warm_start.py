"""Initialization of a student with modules of GEM."""

from collections.abc import Collection, Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from etl.errors import UserError
from features.schema import ITEM_TABLE
from ranking.student.config import DistillationConfig, SharedModule
from ranking.student.trained import TrainedStudent
from training.distributed.sharding import local_shards
from training.trainer.state import TrainState

# Prefixes of the names of parameters in the state of a training.
SHARED_PREFIXES: Mapping[SharedModule, str] = {
    "tables": "tables.",
    "events": "student.event_tokenizer.",
    "recency": "student.recency.",
}


@torch.no_grad()
def copy_gem_modules(student: TrainedStudent, gem: TrainState, config: DistillationConfig) -> None:
    """Copy the shared modules of GEM into a student, and freeze them where configured.

    Without `shared_modules` all are copied, or none if the student's modules are not like GEM's.
    The student records whose modules it has.

    Raises:
        UserError: Modules are named, and the student's are not like GEM's.
    """
    names: tuple[SharedModule, ...] = get_args(SharedModule)
    if config.shared_modules is not None:
        names = config.shared_modules
    mismatch = size_mismatch(student, gem)
    if mismatch and config.shared_modules:
        raise UserError(mismatch)
    if mismatch or not names:
        return
    student.shared_gem = gem.manifest.fm_version
    model, core = student.student, gem.model.core
    if "tables" in names:
        _copy_tables(student, gem)
    modules: dict[str, tuple[nn.Module, nn.Module]] = {
        "events": (model.event_tokenizer, core.history.event_tokenizer),
        "recency": (model.recency, core.history.recency),
    }
    for name, (target, source) in modules.items():
        if name in names:
            target.load_state_dict(_without_event_attributes(source))
    _freeze(student, names, config)


def _without_event_attributes(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module of GEM, without attributes of events, which students do not read."""
    state: dict[str, Tensor] = module.state_dict()
    return {key: weight for key, weight in state.items() if not key.startswith("attributes.")}


def freeze_as_before(
    student: TrainedStudent, trained: Collection[str], config: DistillationConfig
) -> None:
    """Freeze the shared modules of a student whose training is continued, where configured.

    Args:
        student: The student.
        trained: Names of the parameters that were trained so far, with the module's prefix. Where
            no modules are named, those without any were copied and frozen.
        config: How the student learns from GEM.
    """
    names = config.shared_modules
    if names is None:
        copied = SHARED_PREFIXES.items()
        names = tuple(n for n, prefix in copied if not any(p.startswith(prefix) for p in trained))
    _freeze(student, names, config)


def _freeze(
    student: TrainedStudent, names: Collection[SharedModule], config: DistillationConfig
) -> None:
    model = student.student
    modules: dict[SharedModule, nn.Module] = {
        "tables": student.tables,
        "events": model.event_tokenizer,
        "recency": model.recency,
    }
    for name in names:
        modules[name].requires_grad_(not config.freeze_shared)


def size_mismatch(student: TrainedStudent, gem: TrainState) -> str | None:
    """The reason why a student cannot share modules of a GEM; None if it can."""
    gem_config, config = gem.manifest.training.gem_config, student.student.config
    for name in ("embedding_dim", "event_width", "user_hash_buckets"):
        ours, theirs = getattr(config, name), getattr(gem_config, name)
        if ours != theirs:
            return f"a student with {name} {ours} cannot share modules of a GEM with {theirs}"
    if gem_config.sequence.masknet:
        return "a student cannot share modules of a GEM whose events are made by MaskNet"
    if not gem_config.linear_biases:
        return "a student cannot share modules of a GEM without biases"
    return None


def _copy_tables(student: TrainedStudent, gem: TrainState) -> None:
    """Copy rows by id; GEM assigns rows to items, the student has the row of the item's index."""
    for key, weight in student.tables.state_dict().items():
        name = key.split(".")[-2]
        ids = torch.arange(len(weight))
        rows = gem.model.item_rows(ids) if name == ITEM_TABLE else ids
        vectors = {name: _gem_table(gem, name)[rows]}
        weight.copy_(gem.model.core.narrow_embeddings(vectors)[name])


def _gem_table(gem: TrainState, name: str) -> Tensor:
    state = gem.tables.state_dict()
    (weight,) = (value for key, value in state.items() if key.split(".")[-2] == name)
    ((_, rows),) = local_shards(weight)
    return rows
