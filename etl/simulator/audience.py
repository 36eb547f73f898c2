"""Audiences: age bands that data providers state of users, and audits of whom campaigns reached.

Some advertisers buy the users to whom a provider gives certain labels. An auditor asks a panel, and
reports for each campaign (all ads of an advertiser) and day the shares of the true age bands.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from etl.array_types import Bools, Floats, Int64
from etl.simulator.arrays import MISSING, Events, draw_from_probabilities
from etl.simulator.config import (
    AGE_BANDS,
    DAY_MS,
    AudienceConfig,
    EventType,
    RandomStream,
    SimulatorConfig,
)
from etl.simulator.entities import AGE_BAND, Ads, Users

SKEW = 1.5  # concentration of the Dirichlet distribution of a provider's wrong labels
MAX_TARGETED_LABELS = 2


@dataclass(frozen=True)
class Audience:
    """What S providers state of users on one day, and which labels advertisers buy.

    Attributes:
        labels: (users, S) position in AGE_BANDS; MISSING where the provider does not know the user.
        changed_ms: (users, S) when the label last changed, epoch ms.
        wrong_shares: (S, age bands) distribution of the wrong labels of each provider.
        provider: (advertisers,) provider whose labels are bought; MISSING for all users.
        is_bought: (advertisers, age bands) whether the advertiser buys the label.
    """

    config: AudienceConfig
    labels: Int64
    changed_ms: Int64
    wrong_shares: Floats
    provider: Int64
    is_bought: Bools

    @classmethod
    def draw(cls, config: SimulatorConfig, users: Users) -> "Audience | None":
        """Labels on the first day, and what advertisers buy; None without a configuration."""
        if config.audience is None:
            return None
        rng, providers = config.rng(RandomStream.AUDIENCE), config.audience.providers
        wrong_shares = rng.dirichlet(np.full(len(AGE_BANDS), SKEW), len(providers))
        is_targeted = rng.random(config.advertisers) < config.audience.targeted_advertisers
        provider = rng.integers(len(providers), size=config.advertisers)
        order = rng.random((config.advertisers, len(AGE_BANDS))).argsort(axis=1)
        bought = rng.integers(1, MAX_TARGETED_LABELS + 1, (config.advertisers, 1))
        return cls(
            config=config.audience,
            labels=_draw_labels(config.audience, users.attributes[:, AGE_BAND], wrong_shares, rng),
            changed_ms=np.full((len(users), len(providers)), config.start_ms),
            wrong_shares=wrong_shares,
            provider=np.where(is_targeted, provider, MISSING),
            is_bought=order < bought,
        )

    def next_day(self, users: Users, midnight_ms: int, rng: np.random.Generator) -> Self:
        """The same a day later: providers look at some users anew."""
        drawn = _draw_labels(self.config, users.attributes[:, AGE_BAND], self.wrong_shares, rng)
        is_renewed = rng.random(drawn.shape) < self.config.relabel_rate
        changed_ms = midnight_ms + rng.integers(DAY_MS, size=drawn.shape)
        return replace(
            self,
            labels=np.where(is_renewed, drawn, self.labels),
            changed_ms=np.where(is_renewed, changed_ms, self.changed_ms),
        )

    def is_eligible(self, users: Int64, advertisers: Int64) -> Bools:
        """(n, k) whether ads of the (n, k) advertisers may be shown to the (n,) users."""
        provider = self.provider[advertisers]
        label = self.labels[users[:, None], provider]  # of the last provider, where it is MISSING
        is_bought: Bools = self.is_bought[advertisers, label] & (label != MISSING)
        is_untargeted: Bools = provider == MISSING
        return is_bought | is_untargeted


def _draw_labels(
    config: AudienceConfig,
    age_band: Int64,
    wrong_shares: Floats,
    rng: np.random.Generator,
) -> Int64:
    """(users, S) labels of users in the given age bands."""
    n, names = len(age_band), [provider.name for provider in config.providers]
    stated: list[Int64] = []
    for provider, shares in zip(config.providers, wrong_shares, strict=True):
        wrong = draw_from_probabilities(np.repeat(shares[None], n, axis=0), rng)
        label = np.where(rng.random(n) < provider.accuracy, age_band, wrong)
        if provider.copies is not None:
            is_copied = rng.random(n) < provider.copy_rate
            label = np.where(is_copied, stated[names.index(provider.copies)], label)
        stated.append(label)
    coverage = np.array([provider.coverage for provider in config.providers])
    is_known = rng.random((n, len(names))) < coverage
    return np.where(is_known, np.stack(stated, axis=1), MISSING)


@dataclass(frozen=True)
class AuditReports:
    """Shares of the age bands (n, age bands) in the panel of each campaign, and its size (n,)."""

    advertiser: Int64
    panel: Int64
    shares: Floats


def audit_impressions(
    config: SimulatorConfig, day: int, events: Events, users: Users, ads: Ads
) -> AuditReports:
    """What the auditor reports of the impressions among the events of a day."""
    assert config.audience is not None
    rng = config.rng(RandomStream.AUDITS, day)
    impressions = events.take(events.type == EventType.AD_IMPRESSION)
    impressions = impressions.take(np.unique(impressions.event, return_index=True)[1])
    audited = impressions.take(rng.random(len(impressions)) < config.audience.panel)
    people = np.zeros((config.advertisers, len(AGE_BANDS)), np.int64)
    np.add.at(people, (ads.advertiser[audited.item], users.attributes[audited.user, AGE_BAND]), 1)
    panel = people.sum(1)
    reported = np.flatnonzero(panel >= config.audience.min_panel)
    return AuditReports(reported, panel[reported], people[reported] / panel[reported, None])
