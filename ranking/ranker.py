"""The Python API: ranks requests in process, with the code that the HTTP service runs.

Neither torch nor deltalake is needed: a ranker is a pair of ONNX programs, and its features come
from the lake's feature store.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.model import DataSpec
from etl.tables.code_registry import assign_codes, read_codes
from etl.tables.uri import StoragePath
from ranking.feature_store.request import RankRequest
from ranking.feature_store.store import FeatureStore, validate_metadata
from ranking.feature_store.wal import FeatureStoreHandle, feature_store_pointer
from ranking.registry.ranker import ExportedRanker, live_version
from ranking.serving.loaded_rankers import (
    embeddings_warning,
    load_verified_ranker,
    require_compatible,
)
from ranking.serving.rank import rank_request
from ranking.serving.schemas import RankResponse

log = logging.getLogger(__name__)


class Ranker:
    """The promoted ranker of a surface, with the feature store of its lake.

    It keeps the ranker and the feature store that were live when it was loaded; load it again for
    newer ones. Events posted to an HTTP service on the same machine and lake are seen, as both read
    the same store. A ranker is closed by `close` or as a context manager:

        with Ranker.load("work/demo/lake", surface="feed", spec="conf/specs/simulator.yaml") as r:
            response = r.rank(RankRequest(user="u1", surface="feed", candidates=["ad-1", "ad-2"]))

    Rankers of one lake that were loaded with the same store share it. One process cannot have both
    a ranker and an HTTP worker of the same lake, because LMDB opens a folder once per process.
    """

    def __init__(
        self, exported: ExportedRanker, feature_store: "SharedFeatureStore", spec: DataSpec
    ) -> None:
        """Use `load` instead."""
        self._exported = exported
        self._feature_store: SharedFeatureStore | None = feature_store
        self._spec = spec

    @classmethod
    def load(cls, lake: str | Path, surface: str, spec: str | Path) -> "Ranker":
        """Load the promoted ranker of a surface and open the lake's feature store.

        Args:
            lake: The folder or URI of the lake.
            surface: A surface of the spec that carries ads.
            spec: The file of the data spec.

        Raises:
            UserError: The surface carries no ads, no ranker of it is promoted, it was changed since
                it was saved, or there is no feature store that fits it.
        """
        uri = str(lake)
        data_spec = assign_codes(load_spec(Path(spec)), read_codes(uri))
        data_spec.require_ad_surface(surface)
        exported = load_verified_ranker(live_version(uri, surface), uri, surface)
        feature_store = SharedFeatureStore.acquire(uri, data_spec)
        try:
            require_compatible(exported, feature_store.store.metadata)
        except UserError:
            feature_store.release()
            raise
        warning = embeddings_warning(exported.manifest, feature_store.store.metadata)
        if warning:
            log.warning(warning)
        return cls(exported, feature_store, data_spec)

    @property
    def surface(self) -> str:
        """The surface whose requests it ranks."""
        return self._exported.manifest.surface

    @property
    def version(self) -> str:
        """The version of the ranker."""
        return self._exported.manifest.version

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives of its probabilities."""
        return self._exported.objectives

    def rank(self, request: RankRequest) -> RankResponse:
        """Rank the candidates of a request, the best first, as `POST /rank` does.

        Args:
            request: The request, as of its time or of now.

        Returns:
            The ranking, with rank, item, probabilities by objective, expected value and price, and
            the candidates that are excluded from the auction, with the reasons.

        Raises:
            UserError: The request does not fit the spec, is of another surface, or is more than a
                day older than the data of the feature store.
            ValueError: The ranker is closed.
        """
        if self._feature_store is None:
            raise ValueError("the ranker is closed")
        if request.surface != self.surface:
            raise UserError(
                f"this ranker is of surface {self.surface}, the request of {request.surface}: load "
                "the ranker of that surface"
            )
        store = self._feature_store.store
        earliest = store.earliest_request
        if request.as_of is not None and request.as_of < earliest:
            raise UserError(
                f"the request is as of {request.as_of}; the feature store serves requests from "
                f"{earliest} on (seconds since 1970)"
            )
        return rank_request(self._exported, store, self._spec, request)

    def close(self) -> None:
        """Close the feature store, unless another ranker uses it; closing again does nothing."""
        if self._feature_store is not None:
            self._feature_store.release()
            self._feature_store = None

    def __enter__(self) -> "Ranker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class SharedFeatureStore:
    """An open feature store, shared by the rankers of this process and counted by them."""

    store: FeatureStore
    num_users: int = 0

    @classmethod
    def acquire(cls, lake: str, spec: DataSpec) -> "SharedFeatureStore":
        """Open the live feature store of a lake, or share it if it is open.

        Raises:
            UserError: There is no feature store, or it was built with another spec.
        """
        with _lock:
            live = feature_store_pointer(lake).live_folder
            shared = _open_stores.get(_resolved(live)) if live else None
            if shared is None:
                shared = cls(open_live_store(lake, spec))
                _open_stores[_resolved(shared.store.folder)] = shared
            else:
                validate_metadata(shared.store.metadata, spec, shared.store.folder)
            shared.num_users += 1
            return shared

    def release(self) -> None:
        """Close the store when its last user releases it."""
        with _lock:
            self.num_users -= 1
            if not self.num_users:
                del _open_stores[_resolved(self.store.folder)]
                self.store.close()


def open_live_store(lake: str, spec: DataSpec) -> FeatureStore:
    """Open the live feature store of a lake, up to date with the write-ahead log.

    The log is closed again, so that the process can open the next store. Raises UserError as
    FeatureStoreHandle does.
    """
    handle = FeatureStoreHandle(lake, spec)
    handle.wal.close()
    return handle.store


def _resolved(folder: StoragePath) -> Path:
    return Path(str(folder)).resolve()


_lock = Lock()
_open_stores: dict[Path, SharedFeatureStore] = {}
