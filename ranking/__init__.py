"""Calibrated rankers, one per surface, distilled from GEM: training, evaluation and serving.

The public Python API ranks in process, without the HTTP service:

    from ranking import Ranker, RankRequest

    with Ranker.load("work/demo/lake", surface="feed", spec="conf/specs/simulator.yaml") as ranker:
        response = ranker.rank(RankRequest(user="u1", surface="feed", candidates=["ad-1", "ad-2"]))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranking.feature_store.request import RankRequest as RankRequest
    from ranking.ranker import Ranker as Ranker
    from ranking.serving.schemas import RankResponse as RankResponse

__all__ = ["RankRequest", "RankResponse", "Ranker"]
_MODULES = {
    "RankRequest": "ranking.feature_store.request",
    "RankResponse": "ranking.serving.schemas",
    "Ranker": "ranking.ranker",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: commands that do not rank need no ONNX Runtime or LMDB."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
