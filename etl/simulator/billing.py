"""Billing: campaigns pay their bid for each event of their goal."""

import numpy as np

from etl.simulator.arrays import Events, Floats
from etl.simulator.config import GOALS, EventType
from etl.simulator.entities import Ads

GOAL_EVENTS = {
    "awareness": EventType.AD_LONG_VIEW,
    "traffic": EventType.AD_CLICK,
    "sales": EventType.CONVERSION,
}


def billed_spend(ads: Ads, events: Events, advertisers: int) -> Floats:
    """What each advertiser (advertisers,) is billed for some events; copies are billed once."""
    distinct = events.take(np.unique(events.event, return_index=True)[1])
    paid_type = np.array([GOAL_EVENTS[goal] for goal in GOALS])
    of_ads = distinct.take(np.isin(distinct.type, paid_type))
    is_billed = paid_type[ads.goal[of_ads.item]] == of_ads.type
    ad = of_ads.item[is_billed]
    return np.bincount(ads.advertiser[ad], ads.bid[ad], minlength=advertisers).astype(np.float64)
