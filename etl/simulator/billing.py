"""What campaigns pay: their bid for each event of their goal; some state a target return on it."""

import numpy as np

from etl.array_types import Floats
from etl.simulator.arrays import MISSING, Events
from etl.simulator.config import GOALS, SALES, EventType, RandomStream, SimulatorConfig
from etl.simulator.entities import Ads, TasteSpace

GOAL_EVENTS = {
    "awareness": EventType.AD_LONG_VIEW,
    "traffic": EventType.AD_CLICK,
    "sales": EventType.CONVERSION,
}

TARGET_SPREAD = 0.2  # standard deviation of ln(target), around the mean purchase over the bid


def target_returns(config: SimulatorConfig, ads: Ads, taste: TasteSpace) -> Floats:
    """The target return on ad spend of each ad (n,), MISSING for those without one.

    The ads of the whole run are drawn at once. The simulated auction does not read targets: events
    do not depend on them.
    """
    rng, n = config.rng(RandomStream.TARGETS), len(ads.item)
    has_target = (ads.goal == SALES) & (rng.random(n) < (config.target_roas_share or 0.0))
    targets = taste.price[ads.category] / ads.bid * np.exp(TARGET_SPREAD * rng.standard_normal(n))
    return np.where(has_target, targets.round(2), MISSING)


def billed_spend(ads: Ads, events: Events, advertisers: int) -> Floats:
    """What each advertiser (advertisers,) is billed for some events; copies are billed once."""
    distinct = events.take(np.unique(events.event, return_index=True)[1])
    paid_type = np.array([GOAL_EVENTS[goal] for goal in GOALS])
    of_ads = distinct.take(np.isin(distinct.type, paid_type))
    is_billed = paid_type[ads.goal[of_ads.item]] == of_ads.type
    ad = of_ads.item[is_billed]
    return np.bincount(ads.advertiser[ad], ads.bid[ad], minlength=advertisers).astype(np.float64)
