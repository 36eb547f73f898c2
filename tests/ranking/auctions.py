"""What an auction reads, from plain arrays."""

from collections.abc import Sequence

import numpy as np

from etl.array_types import Float64, Int64
from ranking.scoring.candidates import NO_ADVERTISER, CandidateBids, CandidateScores


def scores_of(probabilities: Float64, outcome_values: Float64 | float = 0.0) -> CandidateScores:
    """Scores without retractions."""
    values = np.broadcast_to(np.asarray(outcome_values, np.float64), probabilities.shape)
    return CandidateScores(probabilities, np.ones_like(probabilities), values)


def bids_of(
    bids: Sequence[float] | Float64,
    goals: Sequence[str | None],
    advertisers: Int64 | None = None,
    target_roas: Float64 | float = 0.0,
) -> CandidateBids:
    """Bids, by default of different advertisers and without targets."""
    if advertisers is None:
        advertisers = np.full(len(bids), NO_ADVERTISER)
    targets = np.full(len(bids), target_roas, np.float64)
    return CandidateBids(np.asarray(bids, np.float64), goals, targets, advertisers)
