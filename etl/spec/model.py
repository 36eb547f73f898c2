"""The data spec (docs/spec.md): every column, surface, event and objective is named here alone."""

import hashlib
import json
from collections.abc import Collection, Iterator
from datetime import date, datetime, time, timedelta
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, field_validator, model_validator

from etl.errors import UserError
from etl.spec.attributes import Attributes
from etl.spec.auction import Auction, Terms
from etl.spec.base import (
    CategoryName,
    EventName,
    KeyName,
    Name,
    ObjectiveName,
    Strict,
)
from etl.spec.effects import effect_of, keys_of
from etl.spec.objectives import Objective, Touch
from etl.spec.sources import AttributeFile, EventLog, ImpressionLog, Source, Sources
from etl.spec.units import DAY, Duration, format_duration

MOST_CODES = 127  # tables hold surfaces and event types as signed bytes


class Surface(Strict):
    """A place where items are shown; `logged_as` is its value in the logs, if not its name."""

    logged_as: str | None = None
    ads: bool = True


class EventType(Strict):
    """What happened. One type is the impression, the thing that is ranked."""

    kind: Literal["ad", "organic"]
    role: Literal["impression", "outcome", "activity"] = "activity"


class Sequence(Strict):
    """A stream of a user's events that a model reads; all types where none are named."""

    events: tuple[EventName, ...] | None = None
    max_length: int = Field(default=256, ge=1)


class Counters(Strict):
    """Counts of `events` over `windows` before an impression, for each combination of keys."""

    windows: tuple[Duration, ...] = Field(min_length=1)
    events: tuple[EventName, ...] = Field(min_length=1)
    keys: tuple[tuple[KeyName, ...], ...] = Field(min_length=1)


class History(Strict):
    """What compaction keeps of a user's events: the last `most_events`, none older than `max_age`.

    Ages count back from the end of the compacted days.
    """

    most_events: int = Field(default=8192, ge=1)
    max_age: Duration = 400 * DAY


class MisfitError(ValueError):
    """Parts of a spec that do not fit together: locations, and what is wrong there."""

    def __init__(self, problems: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(where)}: {what}" for where, what in problems))
        self.problems = problems


def _tells(source: Source, entity: str) -> bool:
    return isinstance(source, AttributeFile) and source.entity == entity


class DataSpec(Strict):
    """A user's data.

    A domain is a group of surfaces that may share a model from which their rankers begin.
    `match` names item attributes by which a candidate is compared with its user's history. Of a
    share `calibration_holdout` of requests models learn nothing until all labels are final. A day
    of which a larger share than `most_quarantined` is bad is refused; what a user does on a day
    beyond `most_events_a_day` is parked, as no person does so much. Impressions without a request
    in the log are of one request while none follows the one before later than `request_gap`.
    Ids of events are those of one log, unless logs have `shared_event_ids`. Without an auction,
    candidates are ranked by the objective `rank_by`.

    The order of surfaces and of event types is that of their codes (etl/tables/codes.py).
    """

    name: Name
    description: str = ""
    time_zone: str = "UTC"
    buckets: int = Field(default=16, ge=1)
    lateness: Duration = 3 * DAY
    most_quarantined: float = Field(default=0.1, ge=0, le=1)
    most_events_a_day: int = Field(default=20_000, ge=1)
    request_gap: Duration = 0
    shared_event_ids: bool = False
    surfaces: dict[Name, Surface] = Field(min_length=1, max_length=MOST_CODES)
    domains: dict[Name, tuple[Name, ...]] = {}
    events: dict[Name, EventType] = Field(max_length=MOST_CODES)
    objectives: dict[Name, Objective] = Field(min_length=1)
    attributes: Attributes = Attributes()
    sequences: dict[Name, Sequence] = Field(min_length=1)
    history: History = History()
    match: tuple[CategoryName, ...] = ()
    calibration_holdout: float = Field(default=0.1, ge=0, lt=1)
    counters: Counters
    auction: Auction | None = None
    rank_by: ObjectiveName | None = None
    sources: Sources

    @field_validator("time_zone")
    @classmethod
    def _a_zone(cls, zone: str) -> str:
        if zone not in available_timezones():
            near = get_close_matches(zone, available_timezones(), n=1) or ["Europe/Berlin"]
            raise ValueError(f"no time zone is called {zone!r}; write one such as {near[0]}")
        return zone

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
            elif self.auction is None and self.ranking_objective(surface) is None:
                yield ("surfaces", surface), "no auction: name the objective that ranks, `rank_by`"
        if self.auction and self.rank_by:
            yield ("rank_by",), "the auction ranks; leave rank_by out"
        for name, surfaces in self.domains.items():
            yield from self._problems_of(name, surfaces)
        for entity in ("user", "item"):
            files = [n for n, s in self.sources.items() if _tells(s, entity)]
            if getattr(self.attributes, entity) and not files:
                yield (
                    ("attributes", entity),
                    f"{entity}s have attributes, but no source of kind attributes tells them",
                )

    def _problems_of(
        self, name: str, surfaces: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        if not surfaces:
            yield ("domains", name), "it has no surface"
        for surface in surfaces:
            others = [n for n, s in self.domains.items() if surface in s and n != name]
            if surface not in self.ad_surfaces:
                known = ", ".join(self.ad_surfaces)
                yield ("domains", name), f"no ads on surface {surface!r}; known: {known}"
            elif others or surfaces.count(surface) > 1:
                yield ("domains", name), f"surface {surface!r} is in a domain already"

    @cached_property
    def impression(self) -> str:
        """The event type that is ranked."""
        return next(n for n, e in self.events.items() if e.role == "impression")

    @cached_property
    def logs(self) -> dict[str, EventLog | ImpressionLog]:
        """The sources that hold events."""
        return {n: s for n, s in self.sources.items() if isinstance(s, EventLog | ImpressionLog)}

    @cached_property
    def delays(self) -> dict[str, int]:
        """Seconds from the ingest until an event is visible, by the types that the logs declare.

        Where several logs declare a type it is the largest of theirs.
        """
        found: dict[str, int] = {}
        for log in self.logs.values():
            for event in self._types_of(log):
                found[event] = max(found.get(event, 0), log.delay)
        return found

    def _types_of(self, log: EventLog | ImpressionLog) -> set[str]:
        if isinstance(log, ImpressionLog):
            return {self.impression, *(outcome.event for outcome in log.outcomes)}
        if log.columns.type:
            return set(log.types.values() or self.events)
        return {log.event or self.impression}

    def without_files_of(self, sources: Collection[str]) -> "DataSpec":
        """The same spec, where some sources may lack files; UserError where it has no such one."""
        unknown = sorted(set(sources) - set(self.sources))
        if unknown:
            raise UserError(
                f"spec {self.name} has no source {unknown[0]!r}; known: {', '.join(self.sources)}"
            )
        if not sources:
            return self
        told = self.model_dump()
        for name in sources:
            told["sources"][name]["sparse"] = True
        return type(self).model_validate(told)

    @cached_property
    def surface_codes(self) -> dict[str, int]:
        """Code of each surface by its name: its place, from 1; 0 is unknown."""
        return {name: code for code, name in enumerate(self.surfaces, 1)}

    @cached_property
    def event_codes(self) -> dict[str, int]:
        """Code of each event type by its name: its place, from 1; 0 is unknown."""
        return {name: code for code, name in enumerate(self.events, 1)}

    @cached_property
    def ad_surfaces(self) -> tuple[str, ...]:
        """Surfaces that carry ads: each gets a ranker."""
        return tuple(name for name, surface in self.surfaces.items() if surface.ads)

    @cached_property
    def labels(self) -> dict[str, tuple[str, int]]:
        """Objective and window (seconds) of each label: `conversion`, and shorter `…_1d`."""
        found = {}
        for name, objective in self.objectives.items():
            found[name] = name, objective.window
            for window in objective.also_within:
                found[f"{name}_{format_duration(window)}"] = name, window
        return found

    def attribution_of(self, objective: Objective) -> tuple[Touch, ...]:
        """The kinds of touches of an objective, the first preferred."""
        return objective.attribution or (Touch(touch=self.impression),)

    @property
    def attributes_by_items(self) -> bool:
        """Whether some outcome is attributed by an attribute of its item."""
        touches = (t for o in self.objectives.values() for t in o.attribution)
        return any(touch.key != "item" for touch in touches)

    def surfaces_of(self, objective: str) -> tuple[str, ...]:
        """Surfaces on which an objective is trained and served."""
        return self.objectives[objective].surfaces or self.ad_surfaces

    def ranking_objective(self, surface: str) -> str | None:
        """The objective that ranks a surface without an auction: `rank_by`, else its only one."""
        served = [name for name in self.objectives if surface in self.surfaces_of(name)]
        if self.rank_by in served:
            return self.rank_by
        return served[0] if len(served) == 1 else None

    def domain_of(self, surface: str) -> str | None:
        """The domain that holds a surface."""
        return next((name for name, held in self.domains.items() if surface in held), None)

    def terms_of(self, surface: str) -> Terms:
        """On which terms ads compete for a surface."""
        return self.auction.terms.get(surface, Terms()) if self.auction else Terms()

    @cached_property
    def lateness_days(self) -> int:
        """Whole days for which events of a day are waited for."""
        return -(-self.lateness // DAY)

    @cached_property
    def ripens_after_days(self) -> int:
        """Whole days after which every label of a day is final."""
        return max(-(-o.ripens_after // DAY) for o in self.objectives.values())

    def day_start(self, day: date) -> int:
        """Epoch second at which a day of this spec begins."""
        return int(datetime.combine(day, time(), ZoneInfo(self.time_zone)).timestamp())

    def day_end(self, day: date) -> int:
        """Epoch second at which the next day begins."""
        return self.day_start(day + timedelta(days=1))

    @cached_property
    def reading(self) -> dict[str, Any]:
        """How raw records are read."""
        told = {"sources", "surfaces", "attributes", "most_quarantined"}
        return self.model_dump(mode="json", include=told)

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that change when the values in tables would, the codes among them."""
        keys = keys_of(self.model_dump(mode="json"))
        facts = {
            "keys": {".".join(path): value for path, value in keys if effect_of(path).is_hashed},
            "surfaces": list(self.surfaces),
            "events": list(self.events),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
