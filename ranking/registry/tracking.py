"""Rankers in MLflow's model registry: model cards, lineage and what the gate decided."""

import json
import logging

from mlflow.exceptions import MlflowException

from etl.errors import UserError
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from ranking.registry.manifest import RankerManifest, read_manifest
from ranking.registry.model_card import model_card
from ranking.registry.ranker import rankers_folder
from ranking.registry.records import read_promotion_record
from training.trainer.tracking import register_model_version, remove_model_versions


def register_ranker(lake: Lake, folder: StoragePath, manifest: RankerManifest) -> None:
    """Register a ranker, with its model card and its lineage, or update them.

    Versions of its surface whose folders were removed are removed, too. A registry that fails is
    reported: the ranker answers all the same.
    """
    try:
        _register_ranker(lake, folder, manifest)
    except MlflowException as error:
        logging.warning("ranker %s is not registered in MLflow: %s", folder.name, error)


def _register_ranker(lake: Lake, folder: StoragePath, manifest: RankerManifest) -> None:
    training = manifest.training
    assert training is not None
    tags = {
        "version": manifest.version,
        "labels_until": str(training.labels_until),
        "refit_of": training.refit_of or "",
        "teacher_versions": ", ".join(training.teacher_versions),
        "shared_gem": training.shared_gem or "",
        "table_versions": json.dumps(training.table_versions),
        "gate": "; ".join(training.gate) or "not evaluated yet",
    }
    name, card = f"{manifest.spec.name}-{manifest.surface}", model_card(manifest)
    register_model_version(lake.root, name, str(folder), card, tags)
    kept = {str(path) for path in folder.parent.iterdir() if path.is_dir()}
    remove_model_versions(lake.root, name, str(folder.parent), kept)


def register_decision(lake: Lake, surface: str) -> None:
    """Register what the gate decided on the latest ranker that it judged, if that still exists."""
    record = read_promotion_record(lake.root, surface)
    if record is None:
        return
    folder = rankers_folder(lake.root, surface) / record.version
    try:
        manifest = read_manifest(folder)
    except UserError:  # removed or damaged, where a refit of it is live
        return
    if manifest.training is None:  # a ranker of an earlier release
        return
    verdict = "promoted" if record.promoted else "not promoted"
    changes = {"gate": (verdict, *record.reasons), "gate_segments": record.segments}
    training = manifest.training.model_copy(update=changes)
    register_ranker(lake, folder, manifest.model_copy(update={"training": training}))
