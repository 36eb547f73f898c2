"""Initialization of a student with modules of GEM, or with the model of its domain.

The model of a domain is a student of several surfaces. It learns from GEM like a ranker, on the
examples of all its surfaces: GEM -> domain model -> ranker.
"""

from datetime import date
from typing import get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from etl.errors import UserError
from etl.tables import atomic_io
from etl.tables.atomic_io import download
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, resolve_uri
from features.schema import ITEM_TABLE
from ranking.student.config import DistillationConfig, SharedModule
from ranking.student.model import TrainedStudent
from training.data.reader import ExampleReader
from training.distributed.sharding import local_shards
from training.trainer.state import TrainState

RESIZABLE_LAYERS = (
    "student.user_layer.",
    "student.candidate_layer.",
    "student.hidden.",
    "student.head.",
)
ModelMetadata = dict[str, str]


@torch.no_grad()
def copy_gem_modules(student: TrainedStudent, gem: TrainState, config: DistillationConfig) -> None:
    """Copy the shared modules of GEM into a student, and freeze them where configured.

    Without `shared_modules` all are copied, or none if the student's sizes are not GEM's.

    Raises:
        UserError: Modules are named, and the student's sizes are not GEM's.
    """
    names: tuple[str, ...] = get_args(SharedModule)
    if config.shared_modules is not None:
        names = config.shared_modules
    mismatch = size_mismatch(student, gem)
    if mismatch and config.shared_modules:
        raise UserError(mismatch)
    if mismatch or not names:
        return
    model, core = student.student, gem.model.core
    if "tables" in names:
        _copy_tables(student, gem)
        student.tables.requires_grad_(not config.freeze_shared)
    modules: dict[str, tuple[nn.Module, nn.Module]] = {
        "events": (model.event_tokenizer, core.history.event_tokenizer),
        "recency": (model.recency, core.history.recency),
    }
    for name, (target, source) in modules.items():
        if name in names:
            target.load_state_dict(source.state_dict())
            target.requires_grad_(not config.freeze_shared)


def size_mismatch(student: TrainedStudent, gem: TrainState) -> str | None:
    """The reason why a student cannot share modules of a GEM; None if it can."""
    gem_config, config = gem.manifest.training.gem_config, student.student.config
    for name in ("embedding_dim", "event_width", "user_hash_buckets"):
        ours, theirs = getattr(config, name), getattr(gem_config, name)
        if ours != theirs:
            return f"a student with {name} {ours} cannot share modules of a GEM with {theirs}"
    if gem_config.sequence.masknet:
        return "a student cannot share modules of a GEM whose events are made by MaskNet"
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


def domain_model_path(lake: Lake, name: str, day: date) -> StoragePath:
    """The file of a domain's model that was trained until a day."""
    return resolve_uri(lake.root, "models", "domains", name, f"{day}.safetensors")


def save_domain_model(
    reader: ExampleReader, name: str, day: date, model: TrainedStudent
) -> StoragePath:
    """Write the weights of a domain's model and what it reads; returns the file."""
    path = domain_model_path(reader.lake, name, day)
    with atomic_io.replace_file(path) as temporary:
        save_file(_state_dict(model), temporary, _model_metadata(reader, name))
    return path


def load_domain_model(reader: ExampleReader, day: date) -> dict[str, Tensor]:
    """The weights of the domain of a reader's surface, trained until exactly a day.

    Raises:
        UserError: The surface has no domain, the domain no such model, the file is damaged, or the
            model reads other inputs than the reader gives.
    """
    (surface,) = reader.surfaces
    name = reader.lake.spec.domain_of(surface)
    if name is None:
        raise UserError(
            f"surface {surface} is in no domain: add it to one in `domains` of the spec"
        )
    path = domain_model_path(reader.lake, name, day)
    if not path.is_file():
        raise UserError(
            f"no model of domain {name} was trained until {day}: run `gemline rank train-domain` "
            "first"
        )
    try:
        with safe_open(download(path), "pt") as stored:
            metadata = stored.metadata() or {}
            weights = {
                key: stored.get_tensor(key)
                for key in stored.keys()  # noqa: SIM118 (not a mapping)
            }
    except SafetensorError:
        raise UserError(f"{path} is damaged: run `gemline rank train-domain` again") from None
    for field, expected in _model_metadata(reader, name).items():
        if metadata.get(field) != expected:
            raise UserError(
                f"{path} was trained with {field} {metadata.get(field)}, now it is {expected}: run "
                "`gemline rank train-domain` again"
            )
    return weights


@torch.no_grad()
def load_domain_weights(student: TrainedStudent, domain_weights: dict[str, Tensor]) -> None:
    """Copy a domain's weights into a student; the layers of the MLP only where shapes are equal.

    Raises:
        UserError: Any other weight has another shape.
    """
    for name, weight in _state_dict(student).items():
        domain_weight = domain_weights.get(name)
        if domain_weight is not None and domain_weight.shape == weight.shape:
            weight.copy_(domain_weight)
        elif not name.startswith(RESIZABLE_LAYERS):
            raise UserError(
                f"{name} has another shape in the domain's model: train both with the same "
                "embedding_dim, event_width and user_hash_buckets"
            )


def _state_dict(model: TrainedStudent) -> dict[str, Tensor]:
    modules = {"student": model.student, "tables": model.tables}
    return {
        f"{prefix}.{key}": weight
        for prefix, module in modules.items()
        for key, weight in module.state_dict().items()
    }


def _model_metadata(reader: ExampleReader, name: str) -> ModelMetadata:
    """What the model of a domain reads; a mismatch with a ranker's inputs is an error."""
    spec = reader.lake.spec
    return {
        "spec": spec.hash,
        "surfaces": ", ".join(spec.domains[name]),
        "similarity_attributes": ", ".join(spec.similarity_attributes),
        "sequence": reader.sequence,
        "events": ", ".join(reader.event_types),
    }
