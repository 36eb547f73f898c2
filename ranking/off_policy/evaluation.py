"""Compares the promoted ranker's order of logged requests with the order in the log.

Each logged ad is scored at the served position, so that its logged position does not influence the
target ranking. Requests whose slots and propensities are complete in the log are then evaluated
off-policy (see estimators.py).

B ads, O objectives.
"""

from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Table

from etl.array_types import Bools, Float64, Int64
from etl.errors import UserError
from etl.spec.units import MICROS, DayRange, date_range
from etl.tables import arrow, label_schemas
from etl.tables.lake import Lake
from ranking.inputs.from_tables import InputBuilder
from ranking.off_policy.estimators import (
    MAX_ADS_PER_REQUEST,
    RankingPair,
    estimate_policy_value,
    ndcg,
    position_propensities,
)
from ranking.registry.ranker import (
    ExportedRanker,
    load_ranker_before,
    validate_ranker,
    version_to_evaluate,
)
from ranking.scoring.auction import EXCLUDED_RANK, Auction
from ranking.scoring.bids import BidTable, load_bids
from ranking.scoring.candidates import CandidateScores
from ranking.scoring.scorer import SCORE_ROWS, input_builder
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.evaluation.predictions import ConfidenceInterval


class ScoredAds(NamedTuple):
    """Logged ads (B) with the scores of a ranker and their labels (B, O).

    `expected_values` and `is_excluded` are those of the auction, by the ranker's probabilities.
    `spend` is what campaigns would have paid at their bids, those with a target by actual values,
    `has_final_labels` whether all labels are final.
    """

    impression_ids: npt.NDArray[np.object_]
    request_ids: Int64
    user_ids: Int64
    expected_values: Float64
    is_excluded: Bools
    labels: Float64
    spend: Float64
    has_final_labels: Bools

    def take(self, rows: npt.NDArray[np.generic]) -> "ScoredAds":
        """Some of the ads, by indices or by a mask."""
        return ScoredAds._make(column[rows] for column in self)


def score_logged_ads(
    lake: Lake, ranker: ExportedRanker, days: DayRange, data_until: date
) -> ScoredAds:
    """Score all ads of a ranker's surface on some days, with the labels final by `data_until`.

    Raises:
        UserError: Examples of a day are missing, or no day has impressions of the surface.
    """
    builder, auction = input_builder(ranker, lake), Auction(lake.spec, ranker.manifest.surface)
    reader, bid_table = builder.reader, load_bids(lake, builder.reader.items, days[0])
    reader.require_days(*days)
    label_window = LabelWindow(0, lake.spec.day_end(data_until), include_unlabelled=True)
    parts, num_requests = [], 0
    for batch in reader.batches(list(date_range(*days)), label_window, SCORE_ROWS, Shuffle(None)):
        part = _score_batch(ranker, auction, builder, bid_table, batch)
        parts.append(part._replace(request_ids=part.request_ids + num_requests))
        num_requests += len(batch.as_of)
    if not parts:
        surface = ranker.manifest.surface
        raise UserError(
            f"{surface} has no impressions on {days[0]} to {days[1]}: pass other --days"
        )
    return ScoredAds._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _score_batch(
    ranker: ExportedRanker,
    auction: Auction,
    builder: InputBuilder,
    bid_table: BidTable,
    batch: Batch,
) -> ScoredAds:
    inputs, request = builder(batch), batch.request_index.numpy()
    user_state = ranker.user_state(inputs.requests)
    mask = inputs.candidate_index.mask
    scores = ranker.score(user_state, inputs.candidates)[mask]
    as_of_us = batch.as_of.numpy()[request] * MICROS["s"]
    bids = bid_table.as_of(batch.item_index.numpy(), as_of_us)
    result, columns = auction(scores, bids, request), auction.goal_columns(bids.goals)
    labels = batch.labels.numpy().astype(np.float64)
    actual = CandidateScores(labels, np.ones_like(labels), batch.outcome_values.double().numpy())
    return ScoredAds(
        impression_ids=batch.impression_ids,
        request_ids=request,
        user_ids=batch.user_hash.numpy()[request],
        expected_values=result.expected_values,
        is_excluded=result.ranks == EXCLUDED_RANK,
        labels=labels,
        spend=auction.effective_bids(actual, bids, columns)
        * auction.goal_probabilities(labels, columns),
        has_final_labels=np.asarray(
            np.all(batch.label_mask.numpy()[:, auction.served_objectives], axis=1)
        ),
    )


@dataclass(frozen=True)
class LoggedRankings:
    """The ads of complete requests, sorted by request and slot, with both rankings.

    `num_excluded_requests` counts the requests that cannot be evaluated.
    """

    ads: ScoredAds
    rankings: RankingPair
    num_excluded_requests: int


def load_logged_rankings(lake: Lake, days: DayRange, scored_ads: ScoredAds) -> LoggedRankings:
    """Select the requests that can be evaluated, and rank their ads with the ranker.

    Excluded are requests for which the log lacks a slot, a propensity or a final label, and those
    with more than MAX_ADS_PER_REQUEST ads.

    Raises:
        UserError: No request can be evaluated.
    """
    positions, propensities = _logged_slots(lake, days, scored_ads.impression_ids)
    order = np.lexsort((positions, scored_ads.request_ids))
    ads = scored_ads.take(order)
    positions, propensities = positions[order], propensities[order]
    _, first, size = np.unique(ads.request_ids, return_index=True, return_counts=True)
    ranks = np.arange(len(order)) - np.repeat(first, size)
    is_complete = (positions - positions.min() == ranks) & np.isfinite(propensities)
    is_usable = is_complete & ads.has_final_labels
    is_usable &= np.repeat(size <= MAX_ADS_PER_REQUEST, size)
    selected = np.repeat(np.logical_and.reduceat(is_usable, first), size)
    if not selected.any():
        raise UserError("no request has all its slots, propensities and labels in the log")
    ads = ads.take(selected)
    num_excluded = len(first) - int(selected[first].sum())
    return LoggedRankings(ads, _rank_ads(ads, propensities[selected]), num_excluded)


def _rank_ads(ads: ScoredAds, slot_propensities: Float64) -> RankingPair:
    """The logged and the ranker's ranking of ads that are sorted by request and slot."""
    _, first, size = np.unique(ads.request_ids, return_index=True, return_counts=True)
    start = np.repeat(first, size)
    target_order = np.lexsort((-ads.expected_values, ads.is_excluded, ads.request_ids))
    target_ranks = np.empty(len(target_order), np.int64)
    target_ranks[target_order] = np.arange(len(target_order)) - start
    propensities = np.empty(len(target_order))
    for num_ads in np.unique(size):
        rows = first[size == num_ads][:, None] + np.arange(num_ads)
        by_position = position_propensities(slot_propensities[rows])
        propensities[rows] = np.diagonal(by_position, axis1=1, axis2=2)
    return RankingPair(
        logged_ranks=np.arange(len(target_order)) - start,
        target_ranks=target_ranks,
        propensities=propensities,
        request_ids=ads.request_ids,
        user_ids=ads.user_ids,
    )


def _logged_slots(
    lake: Lake, days: DayRange, impression_ids: npt.NDArray[np.object_]
) -> tuple[Int64, Float64]:
    """The logged positions and propensities (B) of impressions.

    The propensity is NaN where either is missing.
    """
    impressions = arrow.snapshot(lake, label_schemas.impressions(lake.spec))
    columns = ["impression_id", "position", "propensity"]
    rows = impressions.read(columns, day=list(date_range(*days)))
    ids = pa.array(impression_ids, pa.string())
    slots = rows.take(pc.index_in(ids, rows["impression_id"].combine_chunks()))
    if len(slots) in (slots["position"].null_count, slots["propensity"].null_count):
        raise UserError(
            f"the logs of {lake.spec.name} have no positions and propensities of ads: name their "
            "columns in the spec"
        )
    has_position = slots["position"].is_valid().to_numpy()
    positions = slots["position"].fill_null(pc.min(slots["position"])).to_numpy()
    propensities = slots["propensity"].to_numpy()
    return positions.astype(np.int64), np.where(has_position, propensities, np.nan)


def evaluate_policy(lake: Lake, surface: str, days: DayRange, data_until: date) -> Table:
    """Estimate the value of the promoted ranker's order, compared with the order in the log.

    Returns:
        A table with a row for each objective of the surface and one for the spend.

    Raises:
        UserError: No ranker is promoted, all that are retained have learned labels of the days, or
            the log has no positions and propensities.
    """
    first_second = lake.spec.day_start(days[0])
    version = version_to_evaluate(lake.root, surface, first_second, lake.spec)
    ranker = validate_ranker(load_ranker_before(version, first_second), lake.root, surface)
    if ranker.manifest.labels_until > first_second:
        raise UserError(
            f"all retained rankers of {surface} have learned labels that became final since "
            f"{days[0]}: pass later --days"
        )
    logged = load_logged_rankings(lake, days, score_logged_ads(lake, ranker, days, data_until))
    ads, rankings = logged.ads, logged.rankings
    num_requests = len(np.unique(rankings.request_ids))
    table = Table(
        "per request",
        "as logged",
        f"in the order of {ranker.manifest.version}",
        "difference [95 %]",
        "NDCG logged",
        "NDCG",
        title=f"{num_requests:,} requests of {surface}, {logged.num_excluded_requests:,} excluded",
    )
    served = [name for name in ranker.objectives if surface in lake.spec.surfaces_of(name)]
    rewards = {name: ads.labels[:, ranker.objectives.index(name)] for name in served}
    for name, reward in (rewards | {"spend at the bid": ads.spend}).items():
        estimate = estimate_policy_value(reward, rankings)
        table.add_row(
            name,
            format_interval(estimate.logged),
            format_interval(estimate.ips),
            format_interval(estimate.difference),
            f"{ndcg(reward, rankings.logged_ranks, rankings.request_ids):.3f}",
            f"{ndcg(reward, rankings.target_ranks, rankings.request_ids):.3f}",
        )
    return table


def format_interval(interval: ConfidenceInterval) -> str:
    """A value with the bounds of its interval."""
    return f"{interval.value:.5f} [{interval.low:.5f}, {interval.high:.5f}]"
