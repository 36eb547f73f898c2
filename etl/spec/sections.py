"""Small sections of the spec: surfaces, event types, sequences, counters and histories."""

from typing import Literal

from pydantic import Field

from etl.spec.base import EventName, KeyName, StrictModel
from etl.spec.units import DAY, Duration


class Surface(StrictModel):
    """A place where items are shown."""

    logged_as: str | None = None
    """Value of the surface in the logs; by default its name."""
    ads: bool = True
    """Whether the surface shows ads and gets a ranker; if not, its events are history only."""


class EventType(StrictModel):
    """A type of event. Exactly one type is the impression, which is what is ranked."""

    role: Literal["impression", "outcome", "activity"] = "activity"
    """`impression`: what is ranked; `outcome`: what may follow it; `activity`: anything else."""


class SequenceSpec(StrictModel):
    """A stream of a user's events that a model reads."""

    events: tuple[EventName, ...] | None = None
    """Types of events in the stream; by default all."""
    max_length: int = Field(default=256, ge=1)
    """How many of the latest events are read."""


class CounterSpec(StrictModel):
    """Counts of past events: one for each window, type of event and combination of keys."""

    windows: tuple[Duration, ...] = Field(min_length=1)
    """How long before the impression events are counted."""
    events: tuple[EventName, ...] = Field(min_length=1)
    """Types of events that are counted."""
    keys: tuple[tuple[KeyName, ...], ...] = Field(min_length=1)
    """What counted events share with the impression: user, item, surface or item attributes."""


class HistoryRetention(StrictModel):
    """How much of a user's history compaction keeps."""

    max_events: int = Field(default=8192, ge=1)
    """How many of the latest events of a user are kept."""
    max_age: Duration = 400 * DAY
    """Maximum age of the events that are kept, at the end of the compacted days."""
