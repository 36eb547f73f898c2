"""Configuration of a simulated run, and the values of categorical columns in its logs.

Arrays hold such values as positions in the tuples below.
"""

from datetime import UTC, date, datetime, timedelta
from enum import IntEnum
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from etl.spec.base import StrictModel

SURFACES = ("feed", "reels", "messaging")
FORMATS = ("image", "video", "carousel", "story")
GOALS = ("awareness", "traffic", "sales")
DEVICES = ("android", "ios", "web")
CONNECTIONS = ("wifi", "4g", "5g")
AGE_BANDS = ("18-24", "25-34", "35-44", "45-54", "55+")
COUNTRIES = ("BR", "DE", "IN", "JP", "NG", "US")
TIERS = ("basic", "plus", "premium")

VIDEO = FORMATS.index("video")
SALES = GOALS.index("sales")
WIFI = CONNECTIONS.index("wifi")


class EventType(IntEnum):
    """Types of events: organic ones first, then those of ads."""

    POST_VIEW = 0
    POST_LIKE = 1
    MESSAGE_SENT = 2
    POST_PURCHASE = 3
    AD_IMPRESSION = 4
    AD_VIEW = 5
    AD_LONG_VIEW = 6
    AD_CLICK = 7
    CONVERSION = 8
    REFUND = 9


EVENT_TYPES = tuple(event_type.name.lower() for event_type in EventType)

SECOND_MS = 1_000
HOUR_MS = 3_600 * SECOND_MS
DAY_MS = 24 * HOUR_MS


class RandomStream(IntEnum):
    """Independent random streams: draws from one do not change the others."""

    WORLD = 0
    DRIFT = 1
    BEHAVIOUR = 2
    INGEST_DELAY = 3
    LATE = 4
    DUPLICATES = 5
    MALFORMED = 6
    SHUFFLE = 7
    REFUNDS = 8
    AUDIENCE = 9
    AUDITS = 10
    TARGETS = 11


class RefundConfig(StrictModel):
    """Refunds of conversions; the share of a category is up to twice `rate`, by its number."""

    rate: float = Field(gt=0, le=0.5)
    """Mean share of conversions that are refunded."""
    mean_delay_hours: float = Field(gt=0)
    """Mean time from a conversion to its refund; times are distributed exponentially."""


class ProviderConfig(StrictModel):
    """A data provider, which states the age bands of users."""

    name: str
    """Name of the provider."""
    coverage: float = Field(gt=0, le=1)
    """Share of the users whom it knows."""
    accuracy: float = Field(ge=0, le=1)
    """Share of its own labels that are taken from the truth; the rest is drawn at random."""
    copies: str | None = None
    """An earlier provider, some of whose labels it repeats."""
    copy_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of its labels that repeat those of `copies`."""


class AudienceConfig(StrictModel):
    """Providers of age bands, advertisers that buy by them, and audits of their campaigns."""

    providers: tuple[ProviderConfig, ...] = Field(min_length=1)
    """Providers; one may copy those before it."""
    targeted_advertisers: float = Field(default=0.6, ge=0, le=1)
    """Share of the advertisers that buy the labels of a provider; the others buy all users."""
    relabel_rate: float = Field(default=0.02, ge=0, le=1)
    """Share of the users whom a provider looks at anew each day."""
    panel: float = Field(default=0.3, gt=0, le=1)
    """Share of the impressions that are audited."""
    min_panel: int = Field(default=10, ge=1)
    """Minimum number of audited impressions in a report of a campaign and day."""

    @model_validator(mode="after")
    def _check_copies(self) -> Self:
        names = [provider.name for provider in self.providers]
        for position, provider in enumerate(self.providers):
            if provider.copies is not None and provider.copies not in names[:position]:
                raise ValueError(
                    f"{provider.name} copies {provider.copies}, which is not before it"
                )
        return self


class SimulatorConfig(StrictModel):
    """Configuration of a simulated run. The same values give the same bytes."""

    name: str
    """Name of the run."""
    seed: int = Field(ge=0)
    """Seed of all random streams."""
    start: date
    """First day, in UTC."""
    days: int = Field(ge=1)
    """Number of days."""
    users: int = Field(ge=1)
    """Number of users."""
    events_per_user_mean: float = Field(gt=0)
    """Mean number of events per user over the run, before duplicates."""
    max_events_per_user: int
    """Maximum number of events per user over the run, before duplicates."""
    posts: int
    """Number of organic items, all of which exist from the first day on."""
    ads_start: int = Field(ge=12)
    """Number of ads that are active on the first day."""
    ads_per_day: int = Field(ge=12)
    """Number of ads that are added on each later day."""
    advertisers: int = Field(ge=1)
    """Number of advertisers."""
    categories: int = Field(ge=8)
    """Number of categories of items."""
    duplicates: float = Field(0.01, ge=0, lt=1)
    """Share of records that are logged twice."""
    late: float = Field(0.02, ge=0, lt=1)
    """Share of records that are logged hours to days late."""
    malformed: float = Field(0.001, ge=0, lt=1)
    """Malformed lines added per valid line."""
    refunds: RefundConfig | None = None
    """Refunds of conversions; by default there are none."""
    audience: AudienceConfig | None = None
    """Labels of users, targeted ads and audits; by default there are none."""
    billing: bool | None = None
    """Whether campaigns are billed their bid for each event of their goal; by default not."""
    target_roas_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the ads for sales that state a target return on ad spend; by default none does."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.posts < self.categories:
            raise ValueError(f"posts ({self.posts}) must cover {self.categories} categories")
        if self.max_events_per_user < 2 * self.events_per_user_mean:
            raise ValueError("max_events_per_user must be at least twice events_per_user_mean")
        if self.max_events_per_user < 10 * self.days:
            raise ValueError("max_events_per_user must leave room for purchases: 10 a day or more")
        return self

    @property
    def start_ms(self) -> int:
        """Start of the run, epoch ms."""
        return int(datetime.combine(self.start, datetime.min.time(), UTC).timestamp()) * SECOND_MS

    @property
    def end_ms(self) -> int:
        """End of the run (exclusive), epoch ms."""
        return self.day_start_ms(self.days)

    @property
    def ads(self) -> int:
        """Number of ads of the whole run."""
        return self.ads_start + self.ads_per_day * (self.days - 1)

    def day_start_ms(self, day: int) -> int:
        """Start of a day of the run (from 0), epoch ms."""
        return self.start_ms + day * DAY_MS

    def day_partition(self, day: int) -> str:
        """Name of the partition of a day of the run (from 0): `day=2026-01-01`."""
        return f"day={self.start + timedelta(days=day)}"

    def rng(self, stream: RandomStream, day: int = 0) -> np.random.Generator:
        """Random generator of one stream on one day."""
        return np.random.default_rng([self.seed, stream, day])
