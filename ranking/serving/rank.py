"""Ranks one request: features, probabilities, auction; for the HTTP service and `ranking.Ranker`.

C candidates of one request.
"""

from collections.abc import Sequence

import numpy as np

from etl.errors import UserError
from etl.spec.model import DataSpec
from ranking.feature_store.fetch import FeatureFetcher, RankInputs
from ranking.feature_store.request import RankRequest, repeated_candidate
from ranking.feature_store.store import FeatureStore
from ranking.registry.ranker import ExportedRanker
from ranking.scoring.auction import Auction, AuctionResult, Exclusion, ranked_ads
from ranking.serving.schemas import ExcludedCandidate, RankedCandidate, RankResponse


def rank_request(
    ranker: ExportedRanker, store: FeatureStore, spec: DataSpec, request: RankRequest
) -> RankResponse:
    """Rank the candidates of a request, the best first.

    Args:
        ranker: The ranker of the request's surface.
        store: The feature store to read.
        spec: The data spec, for the terms of the auction.
        request: The request; it is ranked as of its time, or now.

    Raises:
        UserError: The request does not fit the spec, or has a candidate twice.
    """
    repeated = repeated_candidate(request.candidates)
    if repeated is not None:
        raise UserError(f"the candidate {repeated!r} is given twice: give each candidate once")
    limits = ranker.manifest.limits_with(store.metadata.compressor_version)
    inputs = FeatureFetcher(store, limits)(request)
    scores = ranker.score(ranker.user_state(inputs.requests), inputs.candidates)
    scores = scores[inputs.candidates.mask]
    request_index = np.zeros(len(request.candidates), np.int64)
    result = Auction(spec, request.surface)(scores, inputs.bids, request_index)
    # The models are constructed without validation: it would take longer than the ranking.
    ranking = [
        RankedCandidate.model_construct(
            rank=ad.rank,
            item=request.candidates[ad.candidate_index],
            expected_value=ad.expected_value,
            price=ad.price,
            probabilities=dict(zip(ranker.objectives, ad.probabilities, strict=True)),
            outcome_values={
                name: value
                for name, value in zip(ranker.objectives, ad.outcome_values, strict=True)
                if np.isfinite(value)
            },
        )
        for ad in ranked_ads(scores, result)
    ]
    return RankResponse.model_construct(
        ranker_version=ranker.manifest.version,
        ranking=ranking,
        excluded=_excluded_candidates(request.candidates, inputs, result),
    )


def _excluded_candidates(
    candidates: Sequence[str], inputs: RankInputs, result: AuctionResult
) -> list[ExcludedCandidate]:
    """The candidates that take no part in the auction, with the reasons."""
    is_unknown = (result.exclusions == Exclusion.NO_BID) & ~inputs.is_known_item
    reasons = np.where(is_unknown, Exclusion.UNKNOWN_ITEM, result.exclusions)
    return [
        ExcludedCandidate.model_construct(
            item=candidates[index], reason=Exclusion(reasons[index]).name.lower()
        )
        for index in np.flatnonzero(reasons).tolist()
    ]
