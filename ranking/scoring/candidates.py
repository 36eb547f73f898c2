"""What a ranker predicts of candidates, and what their campaigns bid.

B candidates, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from etl.array_types import Bools, Float64, Int64

NO_ADVERTISER = -1  # code of an unknown advertiser


@dataclass(frozen=True)
class CandidateScores:
    """Predictions of a ranker, each (…, O).

    Attributes:
        probabilities: Calibrated probabilities of the objectives.
        net_rates: The share of their outcomes that are not retracted.
        outcome_values: The expected value of an outcome, given that it occurs; NaN for objectives
            without `value` in the spec, or of which the ranker has learned no value.
    """

    probabilities: Float64
    net_rates: Float64
    outcome_values: Float64

    @property
    def net_probabilities(self) -> Float64:
        """The probabilities of outcomes that are not retracted."""
        return self.probabilities * self.net_rates

    def __getitem__(self, mask: Bools) -> "CandidateScores":
        """The scores of the candidates that a mask selects."""
        return CandidateScores(
            self.probabilities[mask], self.net_rates[mask], self.outcome_values[mask]
        )


@dataclass(frozen=True)
class CandidateBids:
    """What campaigns bid for candidates (B).

    Attributes:
        bids: The bid of each, per event that its campaign pays for; 0 for none.
        goals: The goal of each campaign; with None it takes part in no auction.
        target_roas: The target return on ad spend of each; 0 for none. A campaign with a target
            bids the expected value of its goal over the target, capped at its bid.
        advertisers: The code of each campaign's advertiser, or NO_ADVERTISER.
    """

    bids: Float64
    goals: Sequence[str | None]
    target_roas: Float64
    advertisers: Int64
