"""What a campaign brings of a segment in a flight, given its bid, frequency cap and budget."""

from dataclasses import replace

import numpy as np

from etl.errors import UserError
from etl.spec.model import DataSpec
from ranking.forecast.expansion import SampleExpansion
from ranking.forecast.in_target import in_target_users
from ranking.forecast.schemas import CampaignForecast, ForecastRequest, Interval
from ranking.forecast.shard import PARTICIPATIONS, SPEND, Campaign, Query, ShardPool
from ranking.forecast.sums import SampleSums

MIN_SAMPLED_USERS = 5  # fewer may be as few users, whatever their weights are


def requested_campaign(spec: DataSpec, request: ForecastRequest) -> Campaign | None:
    """The campaign of a request, if it has one; raises UserError if it is not valid."""
    if request.bid is None and request.goal is None:
        if request.budget or request.frequency_cap:
            raise UserError("a budget or a frequency cap needs a bid and a goal")
        return None
    auction = spec.auction
    if auction is None:
        raise UserError(f"spec {spec.name} has no auction: leave out bid and goal")
    goals = ", ".join(auction.goal_objectives)
    if request.bid is None or request.goal is None:
        raise UserError(f"a campaign needs a bid and a goal, one of {goals}")
    if request.goal not in auction.goal_objectives:
        raise UserError(f"no campaign has the goal {request.goal!r}; known: {goals}")
    objective = auction.goal_objectives[request.goal]
    return Campaign(objective, request.bid, request.frequency_cap, request.budget is not None)


async def forecast_campaign(
    spec: DataSpec,
    pool: ShardPool,
    query: Query,
    budget: float | None,
    expansion: SampleExpansion,
    in_target_rate: Interval | None,
) -> CampaignForecast | None:
    """What the campaign of a query brings; None if it wins too few users to report."""
    assert spec.forecast and query.campaign
    campaign, min_users = query.campaign, spec.forecast.min_users
    free = won = await pool.sums(query)
    # A segment with fewer sampled users is one of enough counted ones.
    is_sampled = won.users >= MIN_SAMPLED_USERS or expansion.in_flight.users < MIN_SAMPLED_USERS
    if not (is_sampled and expansion.is_reportable(free, free, min_users)):
        return None
    if budget is not None:
        share = budget / max(expansion.volume(free, SPEND, free).value, 1e-300)
        campaign = replace(campaign, participation=affordable_participation(free, share))
    if campaign.participation < 1:
        won = await pool.sums(replace(query, campaign=campaign))
        if not expansion.is_reportable(won, free, min_users):
            return None
    events = {
        name: expansion.rounded_volume(won, SPEND + 1 + k, free)
        for k, name in enumerate(spec.objectives)
    }
    paid, bought = expansion.rounded_volume(won, SPEND, free), events[campaign.objective].value
    if budget is not None:
        paid = paid.at_most(Interval(value=budget, low=budget, high=budget))
    event = SPEND + 1 + list(events).index(campaign.objective)
    reach = expansion.users(won, free).at_most(
        expansion.users(expansion.in_flight, expansion.in_flight)
    )
    return CampaignForecast(
        reach=reach,
        reach_in_target=in_target_users(reach, in_target_rate) if in_target_rate else None,
        impressions=expansion.impressions(won, free),
        spend=paid,
        events=events,
        cost_per_event=expansion.cost(paid.value / bought, won, event, free) if bought else None,
        participation=float(f"{campaign.participation:.3g}"),
    )


def affordable_participation(free: SampleSums, spend_share: float) -> float:
    """The share of the auctions in which a campaign spends a share of what it spends in all.

    Without a frequency cap the spend is linear in it; with one, less of it is lost to the cap.
    """
    if spend_share >= 1 or not len(free.spend_curve):
        return min(spend_share, 1.0)
    spend, shares = (np.append(0.0, values) for values in (free.spend_curve, PARTICIPATIONS))
    return float(np.interp(spend_share * spend[-1], spend, shares))
