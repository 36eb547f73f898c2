"""What an auction reads, from plain arrays."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ranking.scoring.candidates import NO_ADVERTISER, CandidateBids, CandidateScores

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def scores_of(probabilities: Floats, outcome_values: Floats | float = 0.0) -> CandidateScores:
    """Scores without retractions."""
    values = np.broadcast_to(np.asarray(outcome_values, np.float64), probabilities.shape)
    return CandidateScores(probabilities, np.ones_like(probabilities), values)


def bids_of(
    bids: Sequence[float] | Floats,
    goals: Sequence[str | None],
    advertisers: Ints | None = None,
    target_roas: Floats | float = 0.0,
) -> CandidateBids:
    """Bids, by default of different advertisers and without targets."""
    if advertisers is None:
        advertisers = np.full(len(bids), NO_ADVERTISER)
    targets = np.full(len(bids), target_roas, np.float64)
    return CandidateBids(np.asarray(bids, np.float64), goals, targets, advertisers)
