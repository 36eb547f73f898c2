"""Purchase cycles: people buy again, each category at its own pace, and need shows before.

A user has a few cyclic categories, and buys in category c about every P_c, a period that all
users share. The need of c at time t follows from the purchases around it: x = (purchase - t) / P_c.

    0 <= x <= LEAD              1       the purchase is near
    -SATISFIED <= x < 0         1       just bought, still looking around
    -RESTED <= x < -SATISFIED   -REST   has what was wanted
    otherwise                   0
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from etl.sources.simulator.choice import draw_in_order
from etl.sources.simulator.columns import Floats, Ints
from etl.sources.simulator.config import SimulatorConfig
from etl.sources.simulator.taste import SHORTEST_CYCLE_DAYS, Taste
from etl.sources.simulator.users import Users

CYCLES = 6  # categories a user
CYCLE_TASTE = 3.0  # how much the cyclic categories are the liked ones
JITTER = 0.04  # of an interval, sigma relative to the period
LEAD, SATISFIED, RESTED = 0.18, 0.04, 0.40  # in periods
REST = 0.2


@dataclass(frozen=True)
class Cycles:
    """category (users, CYCLES), and every purchase of the run and a little more.

    purchase_ms (users, CYCLES, J) increases along J, epoch ms.
    """

    category: Ints
    purchase_ms: Ints

    @classmethod
    def draw(
        cls, config: SimulatorConfig, taste: Taste, users: Users, rng: np.random.Generator
    ) -> Self:
        """Cycles with a phase of their own for every user and category."""
        n = len(users)
        category = draw_in_order(CYCLE_TASTE * users.liking(taste), rng)[0][:, :CYCLES]
        count = int(config.days / SHORTEST_CYCLE_DAYS * 1.1) + 3
        interval = 1 + JITTER * rng.standard_normal((n, CYCLES, count)).clip(-3, 3)
        interval[:, :, 0] = rng.random((n, CYCLES))
        due = np.cumsum(interval, axis=2) * taste.period_ms[category][:, :, None]
        return cls(category=category, purchase_ms=config.start_ms + due.astype(np.int64))

    def need(self, taste: Taste, user: Ints, category: Ints, time_ms: Ints) -> Floats:
        """(n,) need of users for categories at times: 1, 0 or -REST."""
        row, cycle = np.nonzero(self.category[user] == category[:, None])
        ahead_ms = self.purchase_ms[user[row], cycle] - time_ms[row, None]
        ahead = ahead_ms / taste.period_ms[category[row], None]
        near = np.any((ahead >= -SATISFIED) & (ahead <= LEAD), axis=1)
        resting = np.any((ahead >= -RESTED) & (ahead < -SATISFIED), axis=1)
        need = np.zeros(len(user))
        need[row] = np.where(near, 1.0, np.where(resting, -REST, 0.0))
        return need

    def purchases(self, since_ms: int, until_ms: int) -> tuple[Ints, Ints, Ints]:
        """User, category and time of every purchase in [since, until)."""
        inside = (since_ms <= self.purchase_ms) & (self.purchase_ms < until_ms)
        user, cycle, turn = np.nonzero(inside)
        return user, self.category[user, cycle], self.purchase_ms[user, cycle, turn]
