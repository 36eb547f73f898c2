"""Models of domains: students of several surfaces, which teach the rankers of these surfaces.

The model of a domain learns from GEM like a ranker, on the examples of all its surfaces: GEM ->
domain model -> ranker. A ranker may start from its weights, and learn what it predicted of each
training example before it learned the example. It starts with no modules of GEM, which has learned
the labels of these examples (`DomainTrainConfig`).
"""

import logging
from collections.abc import Collection
from datetime import date
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from etl.errors import UserError
from etl.spec.units import DaySplit
from etl.tables import atomic_io
from etl.tables.atomic_io import download
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, list_matching, resolve_uri
from ranking.student.trained import TrainedStudent
from training.data.reader import ExampleReader
from training.evaluation.predictions import Predictions
from training.teacher.predictions import TeacherPredictions

RESIZABLE_LAYERS = (
    "student.user_layer.",
    "student.candidate_layer.",
    "student.hidden.",
    "student.head.",
    "student.value_head.",
)
ModelMetadata = dict[str, str]
log = logging.getLogger(__name__)


class DomainModel(NamedTuple):
    """The weights of a domain's model by name, and the GEMs whose predictions it learned.

    `compressor_version` is that of the teacher embeddings that it read; None if not recorded.
    """

    weights: dict[str, Tensor]
    teacher_versions: frozenset[str]
    compressor_version: str | None = None


def domain_model_path(lake: Lake, name: str, day: date) -> StoragePath:
    """The file of a domain's model that was trained until a day."""
    return resolve_uri(lake.root, "models", "domains", name, f"{day}.safetensors")


def domain_predictions_path(lake: Lake, name: str, day: date) -> StoragePath:
    """The file of what a domain's model predicted of its training examples."""
    return domain_model_path(lake, name, day).with_suffix(".parquet")


def save_domain_model(
    reader: ExampleReader, name: str, day: date, model: TrainedStudent
) -> StoragePath:
    """Write the weights of a domain's model, its lineage and what it reads; returns the file."""
    path = domain_model_path(reader.lake, name, day)
    lineage = {
        "teacher_versions": ", ".join(sorted(model.teacher_versions)),
        "compressor_version": model.input_builder.teacher_embeddings.compressor_version or "",
    }
    with atomic_io.replace_file(path) as temporary:
        save_file(_state_dict(model), temporary, _model_metadata(reader, name) | lineage)
    return path


def load_domain_model(reader: ExampleReader, day: date) -> DomainModel:
    """The model of the domain of a reader's surface, trained until exactly a day.

    It names no GEM if it was saved by a version that did not record lineage.

    Raises:
        UserError: The surface has no domain, the domain no such model, the file is damaged, or the
            model reads other inputs than the reader gives.
    """
    (surface,) = reader.surfaces
    name = _domain_of(reader.lake, surface)
    path = domain_model_path(reader.lake, name, day)
    _require_model(path, name, day)
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
    teachers = metadata.get("teacher_versions", "").split(", ")
    compressor = metadata.get("compressor_version") or None
    return DomainModel(weights, frozenset(teachers) - {""}, compressor)


@torch.no_grad()
def load_domain_weights(student: TrainedStudent, domain: DomainModel) -> None:
    """Copy a domain's weights into a student; the layers of the MLP only where shapes are equal.

    The student takes over the GEMs whose predictions were learned.

    Raises:
        UserError: Any other weight has another shape, or the domain's model has learned teacher
            embeddings of another compressor.
    """
    read = student.input_builder.teacher_embeddings.compressor_version
    if read and domain.compressor_version not in {None, read}:
        raise UserError(
            "the domain's model was trained with teacher embeddings of compressor "
            f"{domain.compressor_version}, now they are of {read}: run `gemline rank train-domain` "
            "again"
        )
    for name, weight in _state_dict(student).items():
        domain_weight = domain.weights.get(name)
        if domain_weight is not None and domain_weight.shape == weight.shape:
            weight.copy_(domain_weight)
        elif not name.startswith(RESIZABLE_LAYERS):
            raise UserError(
                f"{name} has another shape in the domain's model: train both with the same "
                "embedding_dim, event_width and user_hash_buckets"
            )
    student.teacher_versions = domain.teacher_versions


def load_domain_predictions(lake: Lake, surface: str, split: DaySplit) -> TeacherPredictions:
    """What the model of a surface's domain predicted of each training example before it learned it.

    Raises:
        UserError: The surface has no domain, or the domain no model of the same training days and
            objectives.
    """
    name, day = _domain_of(lake, surface), split.train_last
    path = domain_predictions_path(lake, name, day)
    _require_model(path, name, day)
    predictions = Predictions.read(path, split)
    if predictions.objectives != tuple(lake.spec.objectives):
        raise UserError(
            f"{path} has predictions of {', '.join(predictions.objectives)}, now objectives are "
            f"{', '.join(lake.spec.objectives)}: run `gemline rank train-domain` again"
        )
    return TeacherPredictions.of_model(predictions, _teacher_version(name, day))


def load_learned_predictions(
    lake: Lake, surface: str, teacher_versions: Collection[str]
) -> TeacherPredictions:
    """What the model of a surface's domain predicted, of the versions that a ranker learned.

    A refit learns them for the ranker's training examples, of which slow labels become final later;
    the model has predicted no later examples. Without rows, and with a warning, if they are gone.
    """
    name = lake.spec.domain_of(surface)
    if name is not None:
        folder = resolve_uri(lake.root, "models", "domains", name)
        for path in list_matching(folder, "*.parquet"):
            version = _teacher_version(name, date.fromisoformat(path.stem))
            if version in teacher_versions:
                return TeacherPredictions.of_model(Predictions.read(path), version)
    log.warning(
        "the predictions of the domain's model that the ranker of %s has learned are gone: its "
        "refit learns labels alone",
        surface,
    )
    return TeacherPredictions.none(lake, sorted(teacher_versions))


def _teacher_version(name: str, day: date) -> str:
    """The version of a domain's model among those that a ranker has learned."""
    return f"{name}-{day:%Y%m%d}"


def _domain_of(lake: Lake, surface: str) -> str:
    name = lake.spec.domain_of(surface)
    if name is None:
        raise UserError(
            f"surface {surface} is in no domain: add it to one in `domains` of the spec"
        )
    return name


def _require_model(path: StoragePath, name: str, day: date) -> None:
    if not path.is_file():
        raise UserError(
            f"no model of domain {name} was trained until {day}: run `gemline rank train-domain` "
            "first"
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
