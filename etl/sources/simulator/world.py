"""All that behaviour depends on, as of one day."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from etl.sources.simulator.columns import Floats, Ints
from etl.sources.simulator.config import SimulatorConfig, Stream
from etl.sources.simulator.cycles import Cycles
from etl.sources.simulator.items import Ads, Items, draw_ads, draw_posts
from etl.sources.simulator.taste import Taste
from etl.sources.simulator.users import Users


@dataclass(frozen=True)
class World:
    """The tastes, the people, what they can be shown and what they will buy."""

    config: SimulatorConfig
    taste: Taste
    users: Users
    posts: Items
    ads: Ads
    cycles: Cycles

    @classmethod
    def draw(cls, config: SimulatorConfig) -> Self:
        """The world on the first day."""
        rng = config.rng(Stream.WORLD)
        taste = Taste.draw(config.categories, rng)
        users = Users.draw(config, rng)
        return cls(
            config=config,
            taste=taste,
            users=users,
            posts=draw_posts(config, taste, rng),
            ads=draw_ads(config, taste, rng),
            cycles=Cycles.draw(config, taste, users, rng),
        )

    def on(self, day: int) -> Self:
        """The same world, its users moved on to the morning of a later day."""
        config = self.config
        users = self.users.next_day(config.day_ms(day), config.rng(Stream.DRIFT, day))
        return replace(self, users=users)

    @property
    def purchases(self) -> Ints:
        """(users,) purchases of each user during the run."""
        user, _, _ = self.cycles.purchases(self.config.start_ms, self.config.end_ms)
        return np.bincount(user, minlength=len(self.users))

    @property
    def room(self) -> Ints:
        """(users,) events that sessions may cause during the run."""
        return self.config.max_events_per_user - self.purchases

    @property
    def browsing(self) -> Floats:
        """(users,) events that sessions are expected to cause each day."""
        return np.maximum(self.users.activity - self.purchases, 1) / self.config.days
