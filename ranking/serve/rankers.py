"""The rankers that answer now; a new one takes over between two requests."""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from etl.errors import TemporaryError, UserError
from etl.tables.place import Place
from ranking.online.store import Meta
from ranking.package.ranker import Ranker, load
from ranking.package.versions import current, identified

log = logging.getLogger("uvicorn.error")
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 4.0, 60.0


class Fault(NamedTuple):
    """Why a surface's ranker in a folder is not served with a store, and when it is tried again."""

    folder: Place | None
    meta: Meta
    sentence: str
    attempts: int
    retry_at: float


class Rankers:
    """The ranker of each surface that has one, followed by its pointer.

    A fault of one surface stays that surface's: the ranker before goes on, and so do the others.
    """

    def __init__(self, lake: str, meta: Meta, compiled: bool) -> None:
        self._lake = lake
        self._surfaces = meta.spec.ad_surfaces
        self._load = _loader(compiled)
        self._loaded: dict[str, tuple[Place, Ranker]] = {}
        self._faults: dict[str, Fault] = {}
        self.renew(meta)

    @property
    def versions(self) -> dict[str, str]:
        """The version of each surface's ranker."""
        return {surface: ranker.manifest.version for surface, (_, ranker) in self._loaded.items()}

    @property
    def faults(self) -> dict[str, str]:
        """Why the ranker that a surface's pointer names is not served, by surface."""
        return {surface: fault.sentence for surface, fault in self._faults.items()}

    def of(self, surface: str) -> Ranker:
        """The ranker of a surface.

        Raises UserError for a surface without ads, TemporaryError where no ranker is loaded.
        """
        if surface not in self._surfaces:
            known = ", ".join(self._surfaces)
            raise UserError(f"no ads on surface {surface!r}; known: {known}")
        if surface not in self._loaded:
            known = ", ".join(self._loaded) or "none yet"
            raise TemporaryError(f"no ranker of surface {surface!r} is loaded; there are {known}")
        return self._loaded[surface][1]

    def renew(self, meta: Meta) -> None:
        """Load what is new and fits a store; what cannot be loaded becomes the surface's fault."""
        for surface in self._surfaces:
            folder: Place | None = None
            try:
                folder = current(self._lake, surface).target
                fault = self._fault(surface, folder, meta)
                if fault is None or time.monotonic() >= fault.retry_at:
                    self._take(surface, folder, meta)
            except Exception as error:  # ONNX Runtime, safetensors and stores raise their own kinds
                self._note(surface, folder, meta, error)

    def _take(self, surface: str, folder: Place | None, meta: Meta) -> None:
        """Serve the ranker of a folder, which is loaded already if it was served before."""
        loaded = self._loaded.get(surface)
        if folder:
            is_loaded = loaded and loaded[0] == folder
            ranker = loaded[1] if loaded and is_loaded else self._identified(folder, surface)
            self._loaded[surface] = folder, fitting(ranker, meta)
        self._faults.pop(surface, None)

    def _identified(self, folder: Place, surface: str) -> Ranker:
        return identified(self._load(folder), self._lake, surface)

    def _fault(self, surface: str, folder: Place | None, meta: Meta) -> Fault | None:
        """The fault that a folder has shown with a store, if it has."""
        fault = self._faults.get(surface)
        return fault if fault and fault.folder == folder and fault.meta is meta else None

    def _note(self, surface: str, folder: Place | None, meta: Meta, error: Exception) -> None:
        """Keep a fault, and wait twice as long as before until the next attempt."""
        before = self._fault(surface, folder, meta)
        if before and time.monotonic() < before.retry_at:
            return  # a pointer that cannot be read is looked at each time
        attempts = before.attempts + 1 if before else 1
        seconds = min(FIRST_RETRY_SECONDS * 2 ** (attempts - 1), LAST_RETRY_SECONDS)
        sentence = sentence_of(error)
        self._faults[surface] = Fault(folder, meta, sentence, attempts, time.monotonic() + seconds)
        log.error("ranker of %s: %s; tried again in %.0f s", surface, sentence, seconds)


def sentence_of(error: Exception) -> str:
    """What is wrong, in one line; with its kind where a library says it."""
    if isinstance(error, UserError | TemporaryError):
        return str(error)
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _loader(compiled: bool) -> Callable[[Place], Ranker]:
    if not compiled:
        return load
    from ranking.compiled import load_native  # torch, only where it was asked for

    return load_native


def fitting(ranker: Ranker, meta: Meta) -> Ranker:
    """The ranker; raises UserError where a store cannot feed it."""
    told = ranker.manifest
    name = f"the ranker {told.version} of {told.surface}"
    if told.spec.hash != meta.spec.hash:
        raise UserError(f"{name} is of spec {told.spec.hash}, not of {meta.spec.hash}")
    if told.spec.match != meta.spec.match:
        raise UserError(f"{name} compares other attributes than the spec: train it again")
    if told.items > meta.items or told.sequence != meta.sequence or told.max_length > meta.length:
        raise UserError(
            f"{name} reads more than the online features hold: run `gemline rank store`"
        )
    return ranker
