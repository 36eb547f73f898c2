"""The simulated world as of one day: tastes, users, items, purchase cycles and audiences.

A user has a few cyclic categories, and buys in category c about every P_c, a period that all users
share. The need for c at time t follows from the purchases around it, x = (purchase - t) / P_c:

    0 <= x <= NEED_LEAD_PERIODS                         1   a purchase is due soon
    -NEED_TAIL_PERIODS <= x < 0                         1   has just bought, is still browsing
    -SATIATION_PERIODS <= x < -NEED_TAIL_PERIODS        -SATIATION_PENALTY   the need is satisfied
    otherwise                                           0
"""

from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np

from etl.array_types import Floats, Int64
from etl.simulator.arrays import sample_without_replacement
from etl.simulator.audience import Audience
from etl.simulator.config import RandomStream, SimulatorConfig
from etl.simulator.entities import (
    MIN_CYCLE_DAYS,
    Ads,
    Items,
    TasteSpace,
    Users,
    draw_ads,
    draw_posts,
)

CYCLES_PER_USER = 6  # cyclic categories of each user
CYCLE_AFFINITY_WEIGHT = 3.0  # how much cyclic categories depend on the affinity with them
INTERVAL_JITTER = 0.04  # sigma of an interval, as a share of the period
NEED_LEAD_PERIODS, NEED_TAIL_PERIODS, SATIATION_PERIODS = 0.18, 0.04, 0.40
SATIATION_PENALTY = 0.2


@dataclass(frozen=True)
class PurchaseCycles:
    """The purchases of all users during the run and a little longer.

    Attributes:
        category: (users, CYCLES_PER_USER) categories.
        purchase_ms: (users, CYCLES_PER_USER, purchases) epoch ms, increasing on the last axis.
    """

    category: Int64
    purchase_ms: Int64

    @classmethod
    def draw(
        cls, config: SimulatorConfig, taste: TasteSpace, users: Users, rng: np.random.Generator
    ) -> Self:
        """Draw cycles, each user and category with its own phase."""
        n = len(users)
        logits = CYCLE_AFFINITY_WEIGHT * users.category_affinity(taste)
        category = sample_without_replacement(logits, rng)[0][:, :CYCLES_PER_USER]
        purchases = int(config.days / MIN_CYCLE_DAYS * 1.1) + 3
        noise = rng.standard_normal((n, CYCLES_PER_USER, purchases)).clip(-3, 3)
        interval = 1 + INTERVAL_JITTER * noise
        interval[:, :, 0] = rng.random((n, CYCLES_PER_USER))
        offset_ms = np.cumsum(interval, axis=2) * taste.period_ms[category][:, :, None]
        return cls(category=category, purchase_ms=config.start_ms + offset_ms.astype(np.int64))

    def need(self, taste: TasteSpace, user: Int64, category: Int64, time_ms: Int64) -> Floats:
        """(n,) need of users for categories at times: 1, 0 or -SATIATION_PENALTY."""
        row, cycle = np.nonzero(self.category[user] == category[:, None])
        until_ms = self.purchase_ms[user[row], cycle] - time_ms[row, None]
        periods = until_ms / taste.period_ms[category[row], None]
        is_due = np.any((periods >= -NEED_TAIL_PERIODS) & (periods <= NEED_LEAD_PERIODS), axis=1)
        is_satiated = np.any(
            (periods >= -SATIATION_PERIODS) & (periods < -NEED_TAIL_PERIODS), axis=1
        )
        need = np.zeros(len(user))
        need[row] = np.select([is_due, is_satiated], [1.0, -SATIATION_PENALTY], 0.0)
        return need

    def purchases_between(self, since_ms: int, until_ms: int) -> tuple[Int64, Int64, Int64]:
        """User, category and time of each purchase in [since_ms, until_ms)."""
        selected = (since_ms <= self.purchase_ms) & (self.purchase_ms < until_ms)
        user, cycle, purchase = np.nonzero(selected)
        return user, self.category[user, cycle], self.purchase_ms[user, cycle, purchase]


@dataclass(frozen=True)
class World:
    """Tastes, users, items, purchase cycles and audiences, as of one day."""

    config: SimulatorConfig
    taste: TasteSpace
    users: Users
    posts: Items
    ads: Ads
    cycles: PurchaseCycles
    audience: Audience | None

    @classmethod
    def draw(cls, config: SimulatorConfig) -> Self:
        """The world on the first day."""
        rng = config.rng(RandomStream.WORLD)
        taste = TasteSpace.draw(config.categories, rng)
        users = Users.draw(config, rng)
        return cls(
            config=config,
            taste=taste,
            users=users,
            posts=draw_posts(config, taste, rng),
            ads=draw_ads(config, taste, rng),
            cycles=PurchaseCycles.draw(config, taste, users, rng),
            audience=Audience.draw(config, users),
        )

    def advance_to_day(self, day: int) -> Self:
        """The same world with its users as of the start of a later day."""
        config = self.config
        midnight_ms = config.day_start_ms(day)
        users = self.users.next_day(midnight_ms, config.rng(RandomStream.DRIFT, day))
        audience = self.audience
        if audience is not None:
            audience = audience.next_day(users, midnight_ms, config.rng(RandomStream.AUDIENCE, day))
        return replace(self, users=users, audience=audience)

    @property
    def purchase_counts(self) -> Int64:
        """(users,) purchases of each user during the run."""
        user, _, _ = self.cycles.purchases_between(self.config.start_ms, self.config.end_ms)
        return np.bincount(user, minlength=len(self.users))

    @property
    def remaining_events(self) -> Int64:
        """(users,) events that the sessions of each user may cause during the run."""
        return self.config.max_events_per_user - self.purchase_counts

    @property
    def expected_daily_events(self) -> Floats:
        """(users,) events that the sessions of each user are expected to cause per day."""
        events = np.maximum(self.users.activity - self.purchase_counts, 1)
        return cast(Floats, events / self.config.days)
