"""What a simulated run is: its size, its seed and how dirty its logs are."""

from datetime import UTC, date, datetime, timedelta
from enum import IntEnum
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

SECOND_MS = 1_000
HOUR_MS = 3_600 * SECOND_MS
DAY_MS = 24 * HOUR_MS


class Stream(IntEnum):
    """Independent streams of randomness: a draw in one never moves another."""

    WORLD = 0
    DRIFT = 1
    BEHAVIOUR = 2
    TRANSIT = 3
    LATE = 4
    DUPLICATES = 5
    MALFORMED = 6
    SHUFFLE = 7


class SimulatorConfig(BaseModel):
    """A run of the simulator. The same values give the same bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    seed: int = Field(ge=0)
    start: date = Field(description="first day, UTC")
    days: int = Field(ge=1)
    users: int = Field(ge=1)
    events_per_user_mean: float = Field(gt=0, description="over the run, before duplicates")
    max_events_per_user: int = Field(description="over the run, before duplicates")
    posts: int = Field(description="organic items; all exist from the first day")
    ads_start: int = Field(ge=12, description="ads live on the first day")
    ads_per_day: int = Field(ge=12, description="ads that appear on each later day")
    advertisers: int = Field(ge=1)
    categories: int = Field(ge=8)
    duplicates: float = Field(0.01, ge=0, lt=1, description="share of records that land twice")
    late: float = Field(0.02, ge=0, lt=1, description="share of records hours to days late")
    malformed: float = Field(0.001, ge=0, lt=1, description="bad lines added per good line")

    @model_validator(mode="after")
    def _sizes_fit_each_other(self) -> Self:
        if self.posts < self.categories:
            raise ValueError(f"posts ({self.posts}) must cover {self.categories} categories")
        if self.max_events_per_user < 2 * self.events_per_user_mean:
            raise ValueError("max_events_per_user must be at least twice events_per_user_mean")
        if self.max_events_per_user < 10 * self.days:
            raise ValueError("max_events_per_user must leave room for purchases: 10 a day or more")
        return self

    @property
    def start_ms(self) -> int:
        """First moment of the run, epoch ms."""
        return int(datetime.combine(self.start, datetime.min.time(), UTC).timestamp()) * SECOND_MS

    @property
    def end_ms(self) -> int:
        """First moment after the run, epoch ms."""
        return self.day_ms(self.days)

    @property
    def ads(self) -> int:
        """Ads of the whole run."""
        return self.ads_start + self.ads_per_day * (self.days - 1)

    def day_ms(self, day: int) -> int:
        """First moment of a day counted from the start, epoch ms."""
        return self.start_ms + day * DAY_MS

    def day_name(self, day: int) -> str:
        """Name of a day counted from the start, as folders carry it: `day=2026-01-01`."""
        return f"day={self.start + timedelta(days=day)}"

    def rng(self, stream: Stream, day: int = 0) -> np.random.Generator:
        """Randomness of one stream on one day."""
        return np.random.default_rng([self.seed, stream, day])
