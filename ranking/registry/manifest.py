"""The manifest of a ranker's folder: a description, hashes of all files, a signature."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from etl.errors import UserError
from etl.signature import TRUSTED_KEY_VARIABLE, sign, verify_signature
from etl.spec.base import StrictModel
from etl.spec.model import DataSpec
from etl.tables.atomic_io import local_path
from etl.tables.uri import StoragePath, read_text_if_exists
from ranking.registry.calibration_offsets import read_offsets
from ranking.scoring.calibration import PlattScaling
from ranking.scoring.offsets import CalibrationOffsets
from ranking.scoring.segment_calibration import SegmentCalibration, SegmentEvaluation
from ranking.student.config import InputLimits, StudentTrainConfig

LOG_VALUES = "log_values"  # output of the rank program: logarithms of outcome values (R, C, V)
MANIFEST, SIGNATURE = "ranker.json", "ranker.json.sig"
USER_ONNX, RANK_ONNX, TABLES_FILE, TEST_VECTORS_FILE = (
    "user.onnx",
    "rank.onnx",
    "tables.safetensors",
    "vectors.npz",
)
REQUIRED_FILES = (USER_ONNX, RANK_ONNX, TABLES_FILE, TEST_VECTORS_FILE)
COMPILED_FILES = ("user.pt2", "rank.pt2")  # only with `gemline rank train --compiled`
# The graphs of the programs as they were traced, which later versions fill with their weights.
GRAPH_FILES = ("user.graph.onnx", "rank.graph.onnx")
TRAINING_FILE = "training.safetensors"  # read by refits, not by the service
DAY_FILE = "unfinished_day.npz"  # evaluated by the next refit of the day
MODEL_CARD = "model_card.md"  # for readers
NOT_SERVED = (*GRAPH_FILES, TRAINING_FILE, DAY_FILE, MODEL_CARD)
ALL_FILES = (*REQUIRED_FILES, *COMPILED_FILES, *NOT_SERVED)
FileName = Literal[
    "user.onnx",
    "rank.onnx",
    "tables.safetensors",
    "vectors.npz",
    "user.pt2",
    "rank.pt2",
    "user.graph.onnx",
    "rank.graph.onnx",
    "training.safetensors",
    "unfinished_day.npz",
    "model_card.md",
]


class RankerTraining(StrictModel):
    """How and until when a ranker was trained."""

    config: StudentTrainConfig
    """The recipe."""
    first_day: date
    """The first training day."""
    labels_until: int
    """Epoch second until which final labels were learned."""
    newest_labels: dict[str, int]
    """Time (epoch seconds) of the latest impression whose label was learned, by objective."""
    table_versions: dict[str, int] = {}
    """Versions of the tables that were read last."""
    teacher_versions: tuple[str, ...] = ()
    """GEMs whose predictions were learned, also by the model whose weights it started with."""
    shared_gem: str | None = None
    """The GEM whose modules the training started with."""
    compressor_version: str | None = None
    """The compressor of the teacher embeddings that were read; None if there were none, or in
    rankers that were saved before it was recorded."""
    refit_of: str | None = None
    """The version that was promoted, if this one continued its training on newer labels."""
    gate: tuple[str, ...] = ()
    """Reasons of the gate's decision on the version that it judged."""
    gate_segments: tuple[SegmentCalibration, ...] = ()
    """Calibration by segment of that version's predictions of the test days; empty in rankers that
    were saved before it was recorded."""
    evaluation: SegmentEvaluation | None = None
    """Calibration by segment on labels that a refit, and those of its day before it, predicted
    before they learned them."""


class RankerManifest(StrictModel):
    """Describes a ranker; it includes the whole data spec, so a ranker needs no other file.

    `sequence`, `max_length`, `encoded_events`, `teacher_history_length` and `user_hash_buckets`
    define the data of a request that is read. Items from index `num_items` on are unknown.
    `has_calibration_offsets` is False for rankers that were saved before offsets existed.
    `position_effects` are what each position adds to the logits of an objective; None without
    `position_bias` in the spec. `training` is None for rankers that were saved before refits
    existed. `file_hashes` has the SHA-256 of every other file of the folder.
    """

    surface: str
    version: str
    spec: DataSpec
    sequence: str
    max_length: int
    encoded_events: int
    teacher_history_length: int
    num_items: int
    user_hash_buckets: int
    calibration: dict[str, PlattScaling]
    has_calibration_offsets: bool = False
    position_effects: dict[str, tuple[float, ...]] | None = None
    training: RankerTraining | None = None
    build_environment: dict[str, str]
    file_hashes: dict[FileName, str] = {}

    @property
    def input_limits(self) -> InputLimits:
        """How much of a request the ranker reads."""
        return InputLimits.of(self)

    @property
    def compressor_version(self) -> str | None:
        """The compressor of the teacher embeddings that the ranker reads; None if not recorded."""
        return self.training.compressor_version if self.training else None

    def can_read_embeddings_of(self, compressor_version: str | None) -> bool:
        """Whether teacher embeddings of a compressor are those that the ranker was trained with.

        True if one of both compressors is not known.
        """
        return not compressor_version or self.compressor_version in {None, compressor_version}

    def limits_with(self, compressor_version: str | None) -> InputLimits:
        """The input limits where embeddings are of a compressor; those of another are not read."""
        if self.can_read_embeddings_of(compressor_version):
            return self.input_limits
        return replace(self.input_limits, teacher_history_length=0)

    @property
    def labels_until(self) -> int:
        """Epoch second until which final labels were learned; 0 if it was not recorded."""
        return self.training.labels_until if self.training else 0

    def changed_inputs(self, spec: DataSpec) -> list[str]:
        """The keys of what rankers read that differ between a spec and the ranker's own.

        They are those that no table depends on: the hashes of both specs may be equal.
        """

        def inputs(spec: DataSpec) -> dict[str, object]:
            stream = spec.sequences.get(self.sequence)
            return {
                "similarity_attributes": spec.similarity_attributes,
                f"sequences.{self.sequence}.events": stream and (stream.events or "all"),
                "position_bias": spec.position_bias,
            }

        before, now = inputs(self.spec), inputs(spec)
        return [key for key, value in before.items() if value != now[key]]


def write_manifest(folder: Path, manifest: RankerManifest) -> None:
    """Write a manifest with the hashes of the folder's files, signed if a key is configured."""
    hashes = sha256_of_files(folder, ALL_FILES)
    text = manifest.model_copy(update={"file_hashes": hashes}).model_dump_json(indent=1)
    (folder / MANIFEST).write_text(text)
    signature = sign(text.encode())
    if signature:
        (folder / SIGNATURE).write_text(signature)


class RankerPackage(NamedTuple):
    """A ranker's manifest, the content of its files by name, and its calibration offsets."""

    manifest: RankerManifest
    file_contents: dict[str, bytes]
    offsets: CalibrationOffsets | None


def read_manifest(folder: StoragePath) -> RankerManifest:
    """The manifest of a ranker's folder; its other files, which it hashes, are not read.

    Raises:
        UserError: There is no ranker, or the manifest is damaged or not signed by the trusted key.
    """
    path = folder / MANIFEST
    text = read_text_if_exists(path)
    if text is None:
        raise UserError(f"{folder} holds no ranker: run `gemline rank train` first")
    verify_signature(text.encode(), read_text_if_exists(folder / SIGNATURE), path)
    try:
        manifest = RankerManifest.model_validate_json(text)
    except ValidationError:
        raise UserError(f"{path} is damaged: run `gemline rank train` again") from None
    if not set(REQUIRED_FILES) <= set(manifest.file_hashes):
        raise UserError(
            f"{path} does not name all files of the ranker: run `gemline rank train` again"
        )
    return manifest


def read_package(uri: StoragePath) -> RankerPackage:
    """Read a ranker's folder into memory: the bytes that are verified are those that are loaded.

    Raises:
        UserError: As `read_manifest` does, or a file is not the one that was saved.
    """
    manifest, folder = read_manifest(uri), local_path(uri)
    contents: dict[str, bytes] = {
        name: _read_verified(folder / name, sha256)
        for name, sha256 in manifest.file_hashes.items()
        if name not in NOT_SERVED
    }
    return RankerPackage(manifest, contents, offsets_of(uri, manifest))


def offsets_of(uri: StoragePath, manifest: RankerManifest) -> CalibrationOffsets | None:
    """The calibration offsets of a ranker; None if it was saved before they existed.

    Raises UserError if they are missing, damaged or not signed by the trusted key.
    """
    return read_offsets(uri, manifest.version) if manifest.has_calibration_offsets else None


def read_if_saved(uri: StoragePath, name: FileName) -> bytes | None:
    """The content of a file of a ranker's folder; None if it was saved without one.

    Raises UserError as `read_manifest` does, or if the content is not what was saved.
    """
    sha256 = read_manifest(uri).file_hashes.get(name)
    return None if sha256 is None else _read_verified(local_path(uri) / name, sha256)


def read_graphs(uri: StoragePath) -> dict[str, bytes]:
    """The traced graphs of a ranker's folder, by name.

    There are none if it was saved before they existed, or cannot be read.
    """
    folder = local_path(uri)
    try:
        hashes = read_manifest(uri).file_hashes
        return {
            name: _read_verified(folder / name, hashes[name])
            for name in GRAPH_FILES
            if name in hashes
        }
    except UserError:
        return {}


def _read_verified(path: Path, expected_sha256: str) -> bytes:
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != expected_sha256:
        raise UserError(f"{path} is not the file that was saved: run `gemline rank train` again")
    return content


def ranker_hash(folder: Path, manifest: RankerManifest) -> str:
    """One hash of a ranker's files and of its manifest."""
    file_hashes = sha256_of_files(folder, ALL_FILES).values()
    return hashlib.sha256("".join([*file_hashes, manifest.model_dump_json()]).encode()).hexdigest()


def sha256_of_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of those of the named files that exist."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in names
        if (folder / name).is_file()
    }


def require_trusted_key() -> None:
    """Raises UserError unless a key is trusted: compiled programs are not run without one."""
    if not os.environ.get(TRUSTED_KEY_VARIABLE):
        raise UserError(
            f"compiled programs are native code: set {TRUSTED_KEY_VARIABLE} to the public key of "
            "those who may sign rankers"
        )
