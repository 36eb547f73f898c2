"""The live ranker of each surface, loaded again when its pointer moves."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from etl.errors import TemporaryError, UserError
from etl.tables.uri import StoragePath
from ranking.feature_store.store import StoreMetadata
from ranking.registry.manifest import RankerManifest, offsets_of, read_manifest
from ranking.registry.ranker import ExportedRanker, live_pointer, load_ranker, validate_ranker

log = logging.getLogger("uvicorn.error")
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 4.0, 60.0
LoadFn = Callable[[StoragePath], ExportedRanker]
RankersBySurface = dict[str, tuple[StoragePath, ExportedRanker]]  # with their folders


class LoadFailure(NamedTuple):
    """The reason why a surface's ranker cannot be served with a store, and the retry time."""

    folder: StoragePath | None
    store_metadata: StoreMetadata
    message: str
    attempts: int
    retry_at: float


class LoadedRankers:
    """The live ranker of each surface that has one, with its latest calibration offsets.

    Surfaces are independent: where one cannot be loaded, its previous ranker keeps serving, and so
    do those of the other surfaces.
    """

    def __init__(self, lake: str, store_metadata: StoreMetadata, use_compiled: bool) -> None:
        self._lake = lake
        self._spec = store_metadata.spec
        self._load_ranker = _ranker_loader(use_compiled)
        self._loaded: RankersBySurface = {}
        self._failures: dict[str, LoadFailure] = {}
        self._warnings: dict[str, str | None] = {}  # logged last, by surface
        self.refresh(store_metadata)

    @property
    def versions(self) -> dict[str, str]:
        """The version of each surface's ranker."""
        return {surface: manifest.version for surface, manifest in self._manifests().items()}

    @property
    def labels_until(self) -> dict[str, int]:
        """The epoch second by which the labels were final that each surface's ranker has learned.

        Rankers that were saved before it was recorded have none.
        """
        manifests = self._manifests().items()
        return {name: found.labels_until for name, found in manifests if found.training}

    @property
    def newest_labels(self) -> dict[str, dict[str, int]]:
        """The epoch second of the latest impression whose label was learned.

        By surface and objective; without those of which no label was learned.
        """
        trainings = {name: found.training for name, found in self._manifests().items()}
        return {
            name: {objective: time for objective, time in found.newest_labels.items() if time}
            for name, found in trainings.items()
            if found
        }

    def _manifests(self) -> dict[str, RankerManifest]:
        loaded = dict(self._loaded)  # a thread may refresh it meanwhile
        return {surface: ranker.manifest for surface, (_, ranker) in loaded.items()}

    @property
    def errors(self) -> dict[str, str]:
        """By surface, the reason why its live ranker is not served."""
        failures = dict(self._failures)
        return {surface: failure.message for surface, failure in failures.items()}

    def for_surface(self, surface: str) -> ExportedRanker:
        """The ranker of a surface.

        Raises:
            UserError: The surface carries no ads.
            TemporaryError: No ranker of the surface is loaded.
        """
        self._spec.require_ad_surface(surface)
        if surface not in self._loaded:
            loaded = ", ".join(self._loaded) or "none"
            raise TemporaryError(
                f"no ranker of surface {surface!r} is loaded; loaded surfaces: {loaded}"
            )
        return self._loaded[surface][1]

    def refresh(self, store_metadata: StoreMetadata) -> None:
        """Load rankers that are new; those that fail to load are in `errors`."""
        for surface in self._spec.ad_surfaces:
            folder: StoragePath | None = None
            try:
                folder = live_pointer(self._lake, surface).live_folder
                failure = self._known_failure(surface, folder, store_metadata)
                if failure is None or time.monotonic() >= failure.retry_at:
                    self._activate(surface, folder, store_metadata)
            except Exception as error:  # ONNX Runtime, safetensors and stores raise their own
                self._record_failure(surface, folder, store_metadata, error)

    def for_store(self, store_metadata: StoreMetadata) -> RankersBySurface:
        """The rankers to serve with another store, for `replace`.

        They are those that are served now, or the live ones where these cannot be used with it.

        Raises:
            UserError: A surface that is served now would have no ranker.
        """
        live_folders = {}
        for surface, (folder, ranker) in self._loaded.items():
            try:
                require_compatible(ranker, store_metadata)
            except UserError:
                live = live_pointer(self._lake, surface).live_folder
                if live is None or live == folder:
                    raise
                validate_inputs(read_manifest(live), store_metadata)
                live_folders[surface] = live
        live_rankers: RankersBySurface = {
            surface: (live, load_verified_ranker(live, self._lake, surface, self._load_ranker))
            for surface, live in live_folders.items()  # once all are known to be compatible
        }
        return self._loaded | live_rankers

    def replace(self, rankers: RankersBySurface) -> None:
        """Serve other rankers; the store that they were chosen for has to be served with them."""
        self._loaded = rankers

    def _activate(
        self, surface: str, folder: StoragePath | None, store_metadata: StoreMetadata
    ) -> None:
        """Serve the ranker of a folder, which is loaded unless it is being served."""
        if folder:
            loaded_folder, ranker = self._loaded.get(surface, (None, None))
            if ranker is None or loaded_folder != folder:
                ranker = load_verified_ranker(folder, self._lake, surface, self._load_ranker)
            else:
                ranker = with_current_offsets(ranker, folder)
            self._loaded[surface] = folder, require_compatible(ranker, store_metadata)
            warning = embeddings_warning(ranker.manifest, store_metadata)
            if warning and self._warnings.get(surface) != warning:
                log.warning(warning)
            self._warnings[surface] = warning
        self._failures.pop(surface, None)

    def _known_failure(
        self, surface: str, folder: StoragePath | None, store_metadata: StoreMetadata
    ) -> LoadFailure | None:
        """The failure to serve a folder with a store, if it failed before."""
        failure = self._failures.get(surface)
        if failure is None or failure.folder != folder:
            return None
        return failure if failure.store_metadata is store_metadata else None

    def _record_failure(
        self,
        surface: str,
        folder: StoragePath | None,
        store_metadata: StoreMetadata,
        error: Exception,
    ) -> None:
        """Remember a failure, with exponential backoff until the next attempt."""
        previous = self._known_failure(surface, folder, store_metadata)
        if previous and time.monotonic() < previous.retry_at:
            return  # a pointer that cannot be read fails at every refresh
        attempts = previous.attempts + 1 if previous else 1
        delay = min(MIN_RETRY_SECONDS * 2 ** (attempts - 1), MAX_RETRY_SECONDS)
        message = error_message(error)
        self._failures[surface] = LoadFailure(
            folder, store_metadata, message, attempts, time.monotonic() + delay
        )
        log.error("ranker of %s: %s; next attempt in %.0f s", surface, message, delay)


def with_current_offsets(ranker: ExportedRanker, folder: StoragePath) -> ExportedRanker:
    """The ranker with the calibration offsets that its folder has now."""
    offsets = offsets_of(folder, ranker.manifest)
    return ranker if offsets == ranker.offsets else replace(ranker, offsets=offsets)


def load_verified_ranker(
    folder: StoragePath, lake: str, surface: str, load: LoadFn = load_ranker
) -> ExportedRanker:
    """Load the ranker of a folder, and check that it is of the surface and not rolled back."""
    return validate_ranker(load(folder), lake, surface)


def _ranker_loader(use_compiled: bool) -> LoadFn:
    if not use_compiled:
        return load_ranker
    from ranking.registry.aot import load_compiled  # needs torch

    return load_compiled


def error_message(error: Exception) -> str:
    """The message of an error in one line, with its class unless it is written for users."""
    if isinstance(error, UserError | TemporaryError):
        return str(error)
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"


def require_compatible(ranker: ExportedRanker, store_metadata: StoreMetadata) -> ExportedRanker:
    """Return the ranker; raise UserError if a store does not have the features that it reads."""
    validate_inputs(ranker.manifest, store_metadata)
    return ranker


def validate_inputs(manifest: RankerManifest, store_metadata: StoreMetadata) -> None:
    """Raise UserError if a store does not have the features that a ranker reads."""
    name = f"the ranker {manifest.version} of {manifest.surface}"
    if manifest.spec.hash != store_metadata.spec.hash:
        raise UserError(
            f"{name} was trained with spec {manifest.spec.hash}, not {store_metadata.spec.hash}"
        )
    changed = manifest.changed_inputs(store_metadata.spec)
    served = [key for key in changed if key != "position_bias"]  # which only evaluations read
    if served:
        raise UserError(
            f"{name} has other {', '.join(served)} than the feature store: train it again, or run "
            "`gemline rank materialize`"
        )
    teacher_history_length = store_metadata.teacher_history_length
    if teacher_history_length is None:  # an older store, of which it is not known
        teacher_history_length = manifest.teacher_history_length
    if (
        manifest.num_items > store_metadata.num_items
        or manifest.sequence != store_metadata.sequence
        or manifest.max_length > store_metadata.history_length
        or manifest.teacher_history_length > teacher_history_length
    ):
        raise UserError(
            f"{name} reads more than the feature store holds: run `gemline rank materialize`"
        )


def embeddings_warning(manifest: RankerManifest, store_metadata: StoreMetadata) -> str | None:
    """Why a ranker is served without teacher embeddings of a store that has some; or None."""
    stored = store_metadata.compressor_version
    if manifest.can_read_embeddings_of(stored):
        return None
    return (
        f"the ranker {manifest.version} of {manifest.surface} is served without teacher "
        f"embeddings: it was trained with those of compressor {manifest.compressor_version}, the "
        f"feature store has those of {stored}; run `gemline rank materialize`, or train it again"
    )
