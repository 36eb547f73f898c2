"""The people: who they are, what they like today and how much they do."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from etl.sources.simulator.choice import draw_from_shares
from etl.sources.simulator.columns import Columns, Floats, Ints
from etl.sources.simulator.config import DAY_MS, SimulatorConfig
from etl.sources.simulator.taste import DIMENSIONS, Taste, blend, gaussian
from etl.sources.simulator.vocabulary import AGE_BANDS, COUNTRIES, DEVICES, TIERS

ATTRIBUTES = (AGE_BANDS, COUNTRIES, TIERS)
AGE_BAND, COUNTRY, TIER = range(3)
TIER_SHARES = np.array([[0.7, 0.22, 0.08]])
SURFACE_SHARES = np.array([0.55, 0.35, 0.10])
SURFACE_LOYALTY = 6.0  # concentration of the users' own shares around SURFACE_SHARES
ACTIVITY_SPREAD = 1.0  # sigma of the log-normal number of events
CLICKINESS_SPREAD = 0.5
INTEREST_MEMORY = 0.985  # correlation of a user's own interests with yesterday's
SHARED_BY_PEERS = 0.25  # share of the variance of interests due to age band and country
CHANGES_PER_DAY = 0.01  # share of users with a new attribute on a day


@dataclass(frozen=True)
class Users(Columns):
    """One row a user, as of one day.

    attributes    (n, 3)         positions in ATTRIBUTES: age band, country, tier
    changed_ms    (n,)           since when these attributes hold, epoch ms
    signup_days   (n,)           age of the account on the first day
    own_interest  (n, D)         the part of the interests that is not shared by peers
    surfaces      (n, surfaces)  share of sessions on each
    activity      (n,)           expected events over the run
    clickiness    (n,)           logit
    device        (n,)           the usual one
    """

    user: Ints
    attributes: Ints
    changed_ms: Ints
    signup_days: Ints
    own_interest: Floats
    surfaces: Floats
    activity: Floats
    clickiness: Floats
    device: Ints

    @classmethod
    def draw(cls, config: SimulatorConfig, rng: np.random.Generator) -> Self:
        """All users, as of the first day."""
        n = config.users
        attributes = [
            rng.integers(len(AGE_BANDS), size=n),
            rng.integers(len(COUNTRIES), size=n),
            draw_from_shares(np.repeat(TIER_SHARES, n, axis=0), rng),
        ]
        return cls(
            user=np.arange(n),
            attributes=np.stack(attributes, axis=1),
            changed_ms=np.full(n, config.start_ms),
            signup_days=rng.geometric(1 / 400, size=n),
            own_interest=gaussian((n, DIMENSIONS), rng),
            surfaces=rng.dirichlet(SURFACE_LOYALTY * SURFACE_SHARES, size=n),
            activity=_activity(config, rng),
            clickiness=CLICKINESS_SPREAD * gaussian((n,), rng),
            device=rng.integers(len(DEVICES), size=n),
        )

    def interest(self, taste: Taste) -> Floats:
        """(n, D) interests: those of the age band and country, and the user's own."""
        age = taste.age_band[self.attributes[:, AGE_BAND]]
        country = taste.country[self.attributes[:, COUNTRY]]
        return blend(SHARED_BY_PEERS, blend(0.6, age, country), self.own_interest)

    def liking(self, taste: Taste) -> Floats:
        """(n, categories) affinity with the centres of the categories, whatever the surface."""
        return self.interest(taste) @ taste.category.T / np.sqrt(DIMENSIONS, dtype=np.float32)

    def next_day(self, midnight_ms: int, rng: np.random.Generator) -> Self:
        """The same users a day later: interests drift, a few change one attribute."""
        n = len(self)
        rows = np.flatnonzero(rng.random(n) < CHANGES_PER_DAY)
        which = rng.integers(len(ATTRIBUTES), size=rows.size)
        sizes = np.array([len(names) for names in ATTRIBUTES])[which]
        attributes, changed_ms = self.attributes.copy(), self.changed_ms.copy()
        attributes[rows, which] = (attributes[rows, which] + rng.integers(1, sizes)) % sizes
        changed_ms[rows] = midnight_ms + rng.integers(DAY_MS, size=rows.size)
        drifted = blend(1 - INTEREST_MEMORY**2, gaussian((n, DIMENSIONS), rng), self.own_interest)
        return replace(self, attributes=attributes, changed_ms=changed_ms, own_interest=drifted)


def _activity(config: SimulatorConfig, rng: np.random.Generator) -> Floats:
    """Log-normal, cut a little under the cap, scaled until the mean is the one asked for."""
    raw = np.exp(ACTIVITY_SPREAD * rng.standard_normal(config.users))
    top, scale = 0.95 * config.max_events_per_user, 1.0
    for _ in range(100):
        scale *= config.events_per_user_mean / np.minimum(scale * raw, top).mean()
    return np.minimum(scale * raw, top)
