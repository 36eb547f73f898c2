"""A ranker: two programs, tables and calibrations, loaded and run without torch.

R requests, C candidates, O objectives. The end of the file has the pointers to a surface's rankers
in a lake: the latest trained one, and the live one.
"""

import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
from safetensors.numpy import load as from_bytes

from etl.array_types import Float64
from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.tables.pointer import VersionPointer
from etl.tables.uri import StoragePath, resolve_uri
from features.schema import ITEM_TABLE, FeatureSchema, feature_schema
from ranking.inputs.arrays import (
    CANDIDATE_PREFIX,
    CandidateFeatures,
    CategoricalIds,
    InputLookup,
    RequestFeatures,
    named_arrays,
)
from ranking.inputs.segments import SegmentValues, segment_columns, segment_values
from ranking.registry.calibration_offsets import read_offsets_before
from ranking.registry.manifest import (
    LOG_VALUES,
    RANK_ONNX,
    TABLES_FILE,
    TEST_VECTORS_FILE,
    USER_ONNX,
    RankerManifest,
    RankerPackage,
    read_manifest,
    read_package,
)
from ranking.registry.onnx_programs import Arrays, OnnxProgram, Program
from ranking.scoring.auction import Auction, RankedAd, ranked_ads
from ranking.scoring.candidates import CandidateBids, CandidateScores
from ranking.scoring.offsets import CalibrationOffsets, RankerCalibration

SEGMENT_PREFIX = "segment_"  # prefix of arrays of a user state that no program reads
RETAINED_VERSIONS = 14  # besides those of the days until labels are final
OUTPUT_TOLERANCE = 1e-4  # of logits and log values: rounding differs between machines
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportedRanker:
    """Scores the candidates of a surface."""

    manifest: RankerManifest
    user_program: Program
    rank_program: Program
    tables: Arrays
    offsets: CalibrationOffsets | None = None

    @property
    def objectives(self) -> tuple[str, ...]:
        """Objectives, in the order of the columns of `probabilities`."""
        return tuple(self.manifest.spec.objectives)

    @cached_property
    def feature_schema(self) -> FeatureSchema:
        """The features of the ranker's data spec."""
        return feature_schema(self.manifest.spec)

    def user_state(self, requests: RequestFeatures) -> Arrays:
        """The state that all candidates of a request share, the user's segments included."""
        segments = {
            SEGMENT_PREFIX + column: requests.user_categorical[column]
            for column in segment_columns(self.manifest.spec).values()
            if column in self.feature_schema.user.categorical
        }
        return self.user_program(named_arrays(self._lookup().user_inputs(requests))) | segments

    def score(self, user_state: Arrays, candidates: CandidateFeatures) -> CandidateScores:
        """The scores (R, C, O) of candidates at the served position."""
        return self._score(user_state, candidates, np.zeros(len(self.objectives)))

    def score_at_logged_positions(
        self, user_state: Arrays, candidates: CandidateFeatures
    ) -> CandidateScores:
        """The scores (R, C, O) of logged impressions at their positions."""
        return self._score(user_state, candidates, self._position_effects(candidates))

    def _score(
        self, user_state: Arrays, candidates: CandidateFeatures, position_effects: Float64
    ) -> CandidateScores:
        """Calibrated scores (R, C, O), given what positions add to the logits (R, C, O)."""
        inputs = named_arrays(self._lookup().candidate_inputs(candidates), CANDIDATE_PREFIX)
        outputs = self.rank_program(user_state | inputs)
        logits = outputs["logits"].astype(np.float64) + position_effects
        segments = self.segment_values(user_state, candidates)
        calibration = RankerCalibration(self.manifest.calibration, self.offsets)
        net_rates = np.ones(len(self.objectives))
        if self.offsets is not None and self.offsets.net_rates:
            net_rates = self.offsets.net_rate(segments, self.objectives)
        values = np.full(logits.shape, np.nan)
        if LOG_VALUES in outputs:  # absent if no objective has values, and in older rankers
            columns = [self.objectives.index(n) for n in self.feature_schema.value_objectives]
            values[..., columns] = np.exp(outputs[LOG_VALUES].astype(np.float64))
            values *= calibration.value_factors(segments, self.objectives)
        return CandidateScores(
            probabilities=calibration(logits, segments, self.objectives),
            net_rates=np.broadcast_to(net_rates, logits.shape),
            outcome_values=values,
        )

    def segment_values(self, user_state: Arrays, candidates: CandidateFeatures) -> SegmentValues:
        """The value (R, C) of each segment."""
        of_user = {
            name.removeprefix(SEGMENT_PREFIX): values[:, None]
            for name, values in user_state.items()
            if name.startswith(SEGMENT_PREFIX)
        }
        columns = candidates.items.categorical | candidates.context_categorical | of_user
        item_index = candidates.items.categorical[ITEM_TABLE]
        manifest = self.manifest
        return segment_values(manifest.spec, columns, item_index, manifest.num_items)

    def _position_effects(self, candidates: CandidateFeatures) -> Float64:
        """What the positions of candidates add to their logits (R, C, O)."""
        effects, feature = self.manifest.position_effects, self.feature_schema.position
        if effects is None or feature is None:
            return np.zeros(len(self.objectives))
        by_position = np.stack([effects[name] for name in self.objectives], 1)
        column = self.feature_schema.numeric_columns.index(feature.column)
        known = np.nan_to_num(candidates.numeric[..., column], nan=feature.served_position)
        return np.asarray(by_position[known.clip(0, len(by_position) - 1).astype(np.int64)])

    def rank(
        self,
        requests: RequestFeatures,
        candidates: CandidateFeatures,
        bids: CandidateBids,
        auction: Auction | None = None,
    ) -> list[RankedAd]:
        """The candidates of one request that take part in its auction, best first.

        Args:
            requests: The request.
            candidates: Its candidates.
            bids: The bids of their campaigns.
            auction: The auction; that of the ranker's own spec by default.
        """
        scores = self.score(self.user_state(requests), candidates)[candidates.mask]
        auction = auction or Auction(self.manifest.spec, self.manifest.surface)
        result = auction(scores, bids, np.zeros(len(bids.bids), np.int64))
        return ranked_ads(scores, result)

    def _lookup(self) -> InputLookup[np.ndarray]:
        return InputLookup(
            self._gather,
            np.asarray,
            self.feature_schema.similarity_columns,
            self.manifest.num_items,
        )

    def _gather(self, ids: CategoricalIds, content_vectors: np.ndarray) -> np.ndarray:
        rows = [self.tables[name][ids[name]] for name in sorted(ids)]
        return np.concatenate([*rows, content_vectors], -1)


def load_ranker(folder: StoragePath) -> ExportedRanker:
    """Load the ranker of a folder, after its files, signature and test vectors are verified.

    Raises:
        UserError: It is missing, damaged or tampered with, or scores its test vectors differently.
    """
    return ranker_from_package(read_package(folder), folder)


def load_ranker_before(folder: StoragePath, epoch_second: int) -> ExportedRanker:
    """`load_ranker` to evaluate it on later labels: with offsets that learned none of them.

    Without such offsets the ranker has the calibration of its training alone.
    """
    ranker = load_ranker(folder)
    if ranker.offsets is None:
        return ranker
    offsets = read_offsets_before(folder, ranker.manifest.version, epoch_second)
    return replace(ranker, offsets=offsets)


def ranker_from_package(package: RankerPackage, folder: StoragePath) -> ExportedRanker:
    """The ranker of a package that was read from a folder, with its ONNX programs.

    Raises:
        UserError: They cannot be loaded, or score the test vectors differently.
    """
    manifest, files, offsets = package
    try:
        user = OnnxProgram(files[USER_ONNX])
        rank = OnnxProgram(files[RANK_ONNX])
        ranker = ExportedRanker(manifest, user, rank, from_bytes(files[TABLES_FILE]), offsets)
    except Exception as error:  # ONNX Runtime and safetensors have no common exception
        reason = str(error).splitlines()[0]
        raise UserError(f"the ranker in {folder} cannot be loaded ({reason})") from error
    return verify_test_vectors(ranker, package, folder)


def verify_test_vectors(
    ranker: ExportedRanker, package: RankerPackage, folder: StoragePath
) -> ExportedRanker:
    """The ranker; raises UserError if its outputs are not those of the package's test vectors."""
    difference = max_output_difference(ranker, package.file_contents[TEST_VECTORS_FILE])
    if np.isnan(difference):
        raise UserError(
            f"the ranker in {folder} scores its own test vectors with logits that are not finite: "
            "run `gemline rank train` again"
        )
    if difference >= OUTPUT_TOLERANCE:
        raise UserError(
            f"the ranker in {folder} is off by {difference:.1g} on its own test vectors: run "
            "`gemline rank train` again"
        )
    return ranker


def max_output_difference(ranker: ExportedRanker, test_vectors: bytes) -> float:
    """The largest difference between a ranker's outputs and those of test vectors.

    NaN if an output is not finite, except for log values of which none was learned.
    """
    with np.load(io.BytesIO(test_vectors), allow_pickle=False) as stored:
        vectors: dict[str, Any] = dict(stored)
    user_state = ranker.user_program(vectors)
    outputs = ranker.rank_program(user_state | vectors)
    differences = []
    for name, found in outputs.items():
        expected = vectors[name]
        with np.errstate(invalid="ignore"):  # the difference of infinite outputs is NaN
            difference = np.abs(found - expected)
        if name == LOG_VALUES:  # NaN where no value was learned
            difference[np.isnan(found) & np.isnan(expected)] = 0.0
        differences.append(difference.max(initial=0.0))
    return float(np.max(differences))


def rankers_folder(lake: str, surface: str) -> StoragePath:
    """The folder of all versions of a surface's ranker."""
    return resolve_uri(lake, "rankers", surface)


def latest_trained_pointer(lake: str, surface: str) -> VersionPointer:
    """The pointer to the version that was trained last."""
    return VersionPointer(rankers_folder(lake, surface), "newest")


def live_pointer(lake: str, surface: str, spec: DataSpec | None = None) -> VersionPointer:
    """The pointer to the version that serves requests; one that promotes needs the spec.

    So many earlier versions are kept that with daily refits one of them has learned no label of the
    test days (`versions_before`), which end as many days ago as labels need to be final.
    """
    retained = RETAINED_VERSIONS + (spec.label_maturity_days if spec else 0)
    return VersionPointer(rankers_folder(lake, surface), max_previous=retained)


def live_version(lake: str, surface: str) -> StoragePath:
    """The folder of the live version; raises UserError if none was promoted."""
    folder = live_pointer(lake, surface).live_folder
    if folder is None:
        raise UserError(
            f"no ranker of {surface} is promoted: run `gemline rank train`, then `gemline rank "
            "promote`"
        )
    return folder


def versions_before(lake: str, surface: str, second: int, spec: DataSpec) -> Iterator[StoragePath]:
    """The live versions of a spec that learned no label final after a second, the latest first.

    A refit may have learned labels of the days on which rankers are evaluated; these are the
    versions to evaluate instead. Damaged ones are skipped with a warning.
    """
    pointer = live_pointer(lake, surface)
    state = pointer.read()
    for name in reversed(state.retained if state else ()):
        folder = pointer.folder / name
        try:
            manifest = read_manifest(folder)
            if manifest.spec.hash == spec.hash and manifest.labels_until <= second:
                read_package(folder)
                yield folder
        except UserError as error:
            log.warning("skipped in the evaluation: %s", error)


def version_to_evaluate(lake: str, surface: str, second: int, spec: DataSpec) -> StoragePath:
    """The latest live version of a spec that learned no label that became final after a second.

    If no retained version is one, the live one is returned with a warning. Raises UserError if the
    surface has no live ranker.
    """
    live = live_version(lake, surface)
    earlier = next(versions_before(lake, surface, second, spec), None)
    if earlier is None:
        since = datetime.fromtimestamp(second, UTC)
        log.warning("%s has learned labels since %s: it is evaluated on them", live, since)
    return earlier or live


def validate_ranker(ranker: ExportedRanker, lake: str, surface: str) -> ExportedRanker:
    """The ranker; raises UserError if it is of another surface, or was rolled back."""
    manifest, live = ranker.manifest, live_pointer(lake, surface).read()
    if manifest.surface != surface:
        raise UserError(
            f"the ranker {manifest.version} is of surface {manifest.surface}, not of {surface}: "
            f"promote one of {surface}"
        )
    if live and manifest.version in live.blocked:
        raise UserError(
            f"the ranker {manifest.version} of {surface} was rolled back and is blocked: run "
            f"`gemline rank rollback --unblock {manifest.version}` to allow it again"
        )
    return ranker
