"""How high what was acted on stands (Järvelin and Kekäläinen 2002)."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def ndcg(gains: Floats, places: Ints, request: Ints) -> float:
    """Mean over requests with a gain, of ads (B) in places from 0; NaN where there is none."""
    _, owner = np.unique(request, return_inverse=True)
    best = np.lexsort((-gains, owner))
    ideal = np.empty(len(best), np.int64)
    _, first, size = np.unique(owner, return_index=True, return_counts=True)
    ideal[best] = np.arange(len(best)) - np.repeat(np.sort(first), size)
    found, most = (np.bincount(owner, gains / np.log2(2 + p)) for p in (places, ideal))
    some = most > 0
    return float((found[some] / most[some]).mean()) if some.any() else float("nan")
