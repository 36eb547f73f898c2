"""The rankers that answer now; a new one takes over between two requests."""

import logging
from collections.abc import Callable

from etl.errors import UserError
from etl.tables.place import Place
from ranking.online.store import Meta
from ranking.package.ranker import Ranker, load
from ranking.package.versions import current, identified

log = logging.getLogger("uvicorn.error")


class Rankers:
    """The ranker of each surface that has one, followed by its pointer."""

    def __init__(self, lake: str, meta: Meta, compiled: bool) -> None:
        self._lake = lake
        self._load = _loader(compiled)
        self._loaded: dict[str, tuple[Place, Ranker]] = {}
        self.renew(meta)

    @property
    def versions(self) -> dict[str, str]:
        """The version of each surface's ranker."""
        return {surface: ranker.manifest.version for surface, (_, ranker) in self._loaded.items()}

    def of(self, surface: str) -> Ranker:
        """The ranker of a surface; raises UserError where it has none."""
        found = self._loaded.get(surface)
        if found is None:
            known = ", ".join(self._loaded) or "none yet"
            raise UserError(f"no ranker of surface {surface!r}; there are {known}")
        return found[1]

    def renew(self, meta: Meta) -> None:
        """Load what is new and fits a store; else that is told of, and the one before goes on."""
        for surface in meta.spec.ad_surfaces:
            try:
                folder = current(self._lake, surface).target
                if folder and self._loaded.get(surface, (None,))[0] != folder:
                    ranker = identified(self._load(folder), self._lake, surface)
                    self._loaded[surface] = folder, fitting(ranker, meta)
            except UserError as error:
                log.error("%s", error)


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
