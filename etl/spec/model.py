"""The data spec (docs/spec.md): every column, surface, event and objective is named here alone."""

import hashlib
import json
from collections.abc import Iterator
from datetime import date, timedelta
from functools import cached_property
from typing import Literal

from pydantic import Field, field_validator, model_validator

from etl.spec.attributes import Attributes
from etl.spec.base import CategoryName, EventName, KeyName, Name, ObjectiveName, Strict, SurfaceName
from etl.spec.sources import AttributeFile, EventLog, ImpressionLog, Source, Sources
from etl.spec.units import DAY, Duration


class Surface(Strict):
    """A place where items are shown; `logged_as` is its value in the logs, if not its name."""

    logged_as: str | None = None
    ads: bool = True


class EventType(Strict):
    """What happened. One type is the impression, the thing that is ranked."""

    kind: Literal["ad", "organic"]
    role: Literal["impression", "outcome", "activity"] = "activity"


class Objective(Strict):
    """Whether `event` follows an impression within `window`.

    Outcomes that name no impression are credited to the last `credit` event of the same user and
    item before them. A label is final `settle` after its window has closed.
    """

    event: EventName
    window: Duration
    credit: EventName | None = None
    settle: Duration = 0
    surfaces: tuple[SurfaceName, ...] | None = None
    value: bool = False

    @property
    def ripens_after(self) -> int:
        """Seconds from the impression until its label is final."""
        return self.window + self.settle


class Sequence(Strict):
    """A stream of a user's events that a model reads; all types where none are named."""

    events: tuple[EventName, ...] | None = None
    max_length: int = Field(default=256, ge=1)


class Counters(Strict):
    """Counts of `events` over `windows` before an impression, for each combination of keys."""

    windows: tuple[Duration, ...] = Field(min_length=1)
    events: tuple[EventName, ...] = Field(min_length=1)
    keys: tuple[tuple[KeyName, ...], ...] = Field(min_length=1)


class Auction(Strict):
    """Item columns that tell what a campaign bids, and for which objective it pays."""

    bid: str
    goal: str
    pays_for: dict[str, ObjectiveName]


class MisfitError(ValueError):
    """Parts of a spec that do not fit together: locations, and what is wrong there."""

    def __init__(self, problems: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(where)}: {what}" for where, what in problems))
        self.problems = problems


def _tells(source: Source, entity: str) -> bool:
    return isinstance(source, AttributeFile) and source.entity == entity


class DataSpec(Strict):
    """A user's data.

    `match` names item attributes by which a candidate is compared with its user's history.
    """

    name: Name
    description: str = ""
    utc_offset_hours: int = Field(default=0, ge=-12, le=14)
    buckets: int = Field(default=16, ge=1)
    lateness: Duration = 3 * DAY
    surfaces: dict[Name, Surface] = Field(min_length=1)
    events: dict[Name, EventType]
    objectives: dict[Name, Objective] = Field(min_length=1)
    attributes: Attributes = Attributes()
    sequences: dict[Name, Sequence] = Field(min_length=1)
    match: tuple[CategoryName, ...] = ()
    counters: Counters
    auction: Auction | None = None
    sources: Sources

    @field_validator("buckets")
    @classmethod
    def _power_of_two(cls, buckets: int) -> int:
        if buckets & (buckets - 1):
            raise ValueError(f"buckets is {buckets}; it must be a power of two")
        return buckets

    @field_validator("surfaces")
    @classmethod
    def _told_apart(cls, surfaces: dict[str, Surface]) -> dict[str, Surface]:
        logged = [surface.logged_as or name for name, surface in surfaces.items()]
        twice = sorted({name for name in logged if logged.count(name) > 1})
        if twice:
            raise ValueError(f"two surfaces are logged as {', '.join(map(repr, twice))}")
        return surfaces

    @field_validator("events")
    @classmethod
    def _one_impression(cls, events: dict[str, EventType]) -> dict[str, EventType]:
        impressions = [name for name, event in events.items() if event.role == "impression"]
        if len(impressions) != 1:
            raise ValueError(f"one event type needs role: impression, {len(impressions)} have it")
        return events

    @field_validator("sources")
    @classmethod
    def _logs_and_one_file_an_entity(cls, sources: Sources) -> Sources:
        if not any(isinstance(source, EventLog | ImpressionLog) for source in sources.values()):
            raise ValueError("no source is an event_log or an impression_log")
        for entity in ("user", "item"):
            files = [name for name, source in sources.items() if _tells(source, entity)]
            if len(files) > 1:
                raise ValueError(f"sources {', '.join(files)} all tell of {entity}s; join them")
        return sources

    @model_validator(mode="after")
    def _whole(self) -> "DataSpec":
        problems = [*self._problems()]
        if problems:
            raise MisfitError(problems)
        return self

    def _problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Where parts do not fit together, and what is wrong there."""
        for surface in self.ad_surfaces:
            if not any(surface in self.surfaces_of(name) for name in self.objectives):
                yield ("surfaces", surface), "ads but no objective; say `ads: false`"
        for entity in ("user", "item"):
            files = [n for n, s in self.sources.items() if _tells(s, entity)]
            if getattr(self.attributes, entity) and not files:
                yield (
                    ("attributes", entity),
                    f"{entity}s have attributes, but no source of kind attributes tells them",
                )

    @cached_property
    def impression(self) -> str:
        """The event type that is ranked."""
        return next(n for n, e in self.events.items() if e.role == "impression")

    @cached_property
    def logs(self) -> dict[str, EventLog | ImpressionLog]:
        """The sources that hold events."""
        return {n: s for n, s in self.sources.items() if isinstance(s, EventLog | ImpressionLog)}

    @cached_property
    def surface_codes(self) -> dict[str, int]:
        """Code of each surface by its name: from 1, in the spec's order; 0 is unknown."""
        return {name: code for code, name in enumerate(self.surfaces, 1)}

    @cached_property
    def event_codes(self) -> dict[str, int]:
        """Code of each event type by its name: from 1, in the spec's order; 0 is unknown."""
        return {name: code for code, name in enumerate(self.events, 1)}

    @cached_property
    def ad_surfaces(self) -> tuple[str, ...]:
        """Surfaces that carry ads: each gets a ranker."""
        return tuple(name for name, surface in self.surfaces.items() if surface.ads)

    def surfaces_of(self, objective: str) -> tuple[str, ...]:
        """Surfaces on which an objective is trained and served."""
        return self.objectives[objective].surfaces or self.ad_surfaces

    @cached_property
    def ripens_after_days(self) -> int:
        """Whole days after which every label of a day is final."""
        return max(-(-o.ripens_after // DAY) for o in self.objectives.values())

    def day_start(self, day: date) -> int:
        """Epoch second at which a day of this spec begins."""
        midnight = (day - date(1970, 1, 1)).days * DAY
        return midnight - self.utc_offset_hours * 3600

    def day_end(self, day: date) -> int:
        """Epoch second at which the next day begins."""
        return self.day_start(day + timedelta(days=1))

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that change when the meaning of the tables does.

        Where the raw files lie and what models read of the tables is left out.
        """
        meaning = self.model_dump(mode="json", exclude={"description", "sequences", "match"})
        for source in meaning["sources"].values():
            source.pop("path")
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:12]
