"""Gradient-boosted trees of a teacher: trained for each day on recent days, kept as text files.

B impressions, O objectives.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import lightgbm
import numpy as np
from pydantic import ValidationError

from etl.array_types import Float64
from etl.errors import UserError
from etl.signature import SignatureError, sign, verify_signature
from etl.spec.base import StrictModel
from etl.spec.units import DayRange
from etl.tables import atomic_io
from etl.tables.atomic_io import download
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, list_matching, read_text_if_exists, resolve_uri
from training.baseline import (
    BaselineConfig,
    TabularDataset,
    feature_names_of,
    fit_boosters,
    read_tabular,
)
from training.config import TrainConfig
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.trainer.checkpoint import sha256_of

MANIFEST, SIGNATURE = "trees.json", "trees.json.sig"
log = logging.getLogger(__name__)


class TreesManifest(StrictModel):
    """What a day's trees were trained on, and the SHA-256 of each objective's file."""

    spec_hash: str
    feature_names: tuple[str, ...]
    surfaces: tuple[str, ...]
    days: DayRange
    table_versions: dict[str, int]
    file_hashes: dict[str, str] = {}


@dataclass(frozen=True)
class Trees:
    """The trees of each objective that had enough positive labels."""

    boosters: Mapping[str, lightgbm.Booster]

    def logits(self, dataset: TabularDataset, objectives: tuple[str, ...]) -> Float64:
        """Logits (B, O); NaN for objectives without trees."""
        columns = np.full((len(dataset.surface), len(objectives)), np.nan)
        for column, name in enumerate(objectives):
            if name in self.boosters:
                columns[:, column] = self.boosters[name].predict(dataset.features, raw_score=True)
        return columns


def trees_path(lake: str, day: date) -> StoragePath:
    """The folder of the trees that were trained until a day."""
    return resolve_uri(lake, "models", "gem", "trees", f"{day}")


def trees_reader(lake: Lake, config: TrainConfig) -> ExampleReader:
    """A reader of the inputs of trees, which read no history."""
    return ExampleReader.latest(lake, config.sequence, 0, config.surfaces)


def train_trees(lake: Lake, day: date, config: TrainConfig) -> None:
    """Train on the labels of recent days that are final at the end of a day, unless it is done.

    Without final labels, as on the first day where all labels are slow, there are no trees.
    """
    reader = trees_reader(lake, config)
    oldest = day - timedelta(days=config.teacher.blend_days - 1)
    days = [d for d in reader.days() if oldest <= d <= day] or [day]
    window = LabelWindow(0, lake.spec.day_end(day))
    manifest = TreesManifest(
        spec_hash=lake.spec.hash,
        feature_names=feature_names_of(reader),
        surfaces=config.surfaces,
        days=(days[0], days[-1]),
        table_versions=dict(reader.table_versions),
    )
    folder = trees_path(lake.root, day)
    if _holds_trees(folder, manifest):
        log.info("%s holds these trees already", folder)
        return
    train = read_tabular(reader, days, window)
    boosters = fit_boosters(train, lake.spec.objectives, BaselineConfig()) if train else {}
    _publish(folder, manifest, boosters)


def _holds_trees(folder: StoragePath, manifest: TreesManifest) -> bool:
    """Whether a folder has trees of a manifest without hashes, intact and with a valid signature.

    Each later day adds versions to the tables; like a GEM, trees of earlier days are kept.
    """
    try:
        existing = _read_manifest(folder)
        if existing:
            _intact_files(folder, existing)
    except (ValidationError, SignatureError, _ChangedTreesError) as error:
        log.warning("%s: %s; the trees are trained again", folder, error)
        return False
    may_differ = {"file_hashes": {}, "table_versions": manifest.table_versions}
    return existing is not None and existing.model_copy(update=may_differ) == manifest


class _ChangedTreesError(Exception):
    """A file of trees is missing, or is not the one that was saved."""


def _intact_files(folder: StoragePath, manifest: TreesManifest) -> dict[str, Path]:
    """The local file of each objective's trees; raises _ChangedTreesError if one was changed."""
    files = {}
    for name, expected in manifest.file_hashes.items():
        path = folder / f"{name}.txt"
        if not path.is_file() or sha256_of(file := download(path)) != expected:
            raise _ChangedTreesError(f"{path} is not the file that was saved")
        files[name] = file
    return files


def _publish(
    folder: StoragePath, manifest: TreesManifest, boosters: Mapping[str, lightgbm.Booster]
) -> None:
    """Write a text file for each objective, then the manifest that names their contents."""
    hashes = {}
    for name, booster in boosters.items():
        with atomic_io.replace_file(folder / f"{name}.txt") as temporary:
            booster.save_model(str(temporary))
            hashes[name] = sha256_of(temporary)
    text = manifest.model_copy(update={"file_hashes": hashes}).model_dump_json(indent=1)
    signature = sign(text.encode())
    if signature:
        atomic_io.write_text(folder / SIGNATURE, signature)
    atomic_io.write_text(folder / MANIFEST, text)


def is_waiting_for_trees(lake: Lake, day: date, upgraded_from: Collection[str]) -> bool:
    """Whether an upgrade carried GEM over, but not the trees of a day: the next day has new ones.

    `upgraded_from` are the specs before, by the manifest of GEM. Trees of any other spec are not
    of this lake.
    """
    try:
        manifest = _read_manifest(trees_path(lake.root, day))
    except (ValidationError, SignatureError):
        return False
    return bool(upgraded_from) and (manifest is None or manifest.spec_hash in upgraded_from)


def load_trees(lake: Lake, day: date, feature_names: tuple[str, ...]) -> Trees:
    """The trees that were trained until a day.

    Raises UserError if they are missing, were changed, or read other features than the spec has, as
    those of a wrong lake do, or those before an upgrade by an earlier version of Gemline.
    """
    folder = trees_path(lake.root, day)
    advice = "run `gemline train gem` for that day again"
    try:
        manifest = _read_manifest(folder)
    except (ValidationError, SignatureError) as error:
        raise UserError(f"{folder / MANIFEST} cannot be used ({error}): {advice}") from None
    if manifest is None:
        raise UserError(f"the teacher's trees until {day} are missing: {advice}")
    if (manifest.spec_hash, manifest.feature_names) != (lake.spec.hash, feature_names):
        raise UserError(
            f"the teacher's trees until {day} read other features than now: check --spec and "
            "--lake, or run `gemline train gem` for the next day, and score the days after it"
        )
    try:
        files = _intact_files(folder, manifest)
    except _ChangedTreesError as error:
        raise UserError(f"{error}: {advice}") from None
    return Trees({name: lightgbm.Booster(model_file=str(file)) for name, file in files.items()})


def _read_manifest(folder: StoragePath) -> TreesManifest | None:
    text = read_text_if_exists(folder / MANIFEST)
    if text is None:
        return None
    verify_signature(text.encode(), read_text_if_exists(folder / SIGNATURE), folder / MANIFEST)
    return TreesManifest.model_validate_json(text)


def remove_old_trees(lake: str, oldest_kept: date) -> None:
    """Remove the trees that were trained until an earlier day."""
    for folder in list_matching(resolve_uri(lake, "models", "gem", "trees"), "[0-9]*"):
        if folder.name < f"{oldest_kept}":
            atomic_io.remove_folder(folder)
