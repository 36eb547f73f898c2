"""The data spec, from which schemas, features, models and steps are derived.

All keys are in docs/reference/spec.md.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from datetime import date, datetime, time, timedelta
from difflib import get_close_matches
from functools import cached_property
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, field_validator, model_validator

from etl.errors import UserError
from etl.spec.attributes import Attributes
from etl.spec.base import CategoryName, Name, ObjectiveName, StrictModel
from etl.spec.effects import KeyPath, effect_of, flatten_keys
from etl.spec.sections import (
    AuctionSpec,
    AuctionTerms,
    CounterSpec,
    EventType,
    HistoryRetention,
    Objective,
    SequenceSpec,
    Surface,
    Touchpoint,
)
from etl.spec.sources import AttributeSource, EventLogSource, ImpressionLogSource, Source, Sources
from etl.spec.units import DAY, Duration, format_duration

MAX_CODES = 127  # tables hold surfaces and event types as signed bytes


class SpecConsistencyError(ValueError):
    """Sections of a spec contradict each other; holds the location of each problem and its text."""

    def __init__(self, problems: list[tuple[KeyPath, str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(path)}: {text}" for path, text in problems))
        self.problems = problems


def _provides_attributes_of(source: Source, entity: str) -> bool:
    return isinstance(source, AttributeSource) and source.entity == entity


class DataSpec(StrictModel):
    """One user's data: logs, surfaces, events, objectives, attributes and how ads compete.

    The order of surfaces and event types is that of their codes (etl/tables/code_registry.py).
    """

    name: Name
    """Name of the spec, used in messages and reports."""
    description: str = ""
    """Description of the data, for readers of the spec."""
    time_zone: str = "UTC"
    """IANA name of the time zone in which days begin, such as `Europe/Berlin`."""
    buckets: int = Field(default=16, ge=1)
    """Partitions of the users of each day; a power of two."""
    allowed_lateness: Duration = 3 * DAY
    """How long before its landing day an event may have occurred; older events are excluded."""
    max_bad_record_rate: float = Field(default=0.1, ge=0, le=1)
    """Share of bad records above which a day is refused before anything is written."""
    max_events_per_user_day: int = Field(default=20_000, ge=1)
    """Maximum number of events of a user per day; the rest is excluded as automated traffic."""
    request_session_gap: Duration = 0
    """Longest gap between two impressions of one request, where the log has no request ids."""
    shared_event_ids: bool = False
    """Whether an event id means the same event in all logs; by default in one log only."""
    surfaces: dict[Name, Surface] = Field(min_length=1, max_length=MAX_CODES)
    """Places where items are shown, by name."""
    domains: dict[Name, tuple[Name, ...]] = {}
    """Groups of surfaces whose rankers may be initialized from one shared model, by name."""
    events: dict[Name, EventType] = Field(max_length=MAX_CODES)
    """Types of events, by name; exactly one has `role: impression`."""
    objectives: dict[Name, Objective] = Field(min_length=1)
    """What models predict of an impression, by name."""
    attributes: Attributes = Attributes()
    """Attributes of users, items and impressions that models read."""
    sequences: dict[Name, SequenceSpec] = Field(min_length=1)
    """Streams of a user's events that models read, by name."""
    history: HistoryRetention = HistoryRetention()
    """How much of a user's history is kept."""
    similarity_attributes: tuple[CategoryName, ...] = ()
    """Item attributes by which a candidate is compared with the items of its user's history."""
    calibration_holdout: float = Field(default=0.1, ge=0, lt=1)
    """Share of requests kept from training until all their labels are final, for calibration."""
    counters: CounterSpec
    """Counts of past events that models read as features."""
    auction: AuctionSpec | None = None
    """How ads compete; without an auction candidates are ranked by `rank_by`."""
    rank_by: ObjectiveName | None = None
    """Objective that ranks candidates without an auction; default: the only one of the surface."""
    sources: Sources
    """Logs and attribute files, by name."""

    @field_validator("time_zone")
    @classmethod
    def _check_time_zone(cls, zone: str) -> str:
        if zone not in available_timezones():
            close = get_close_matches(zone, available_timezones(), n=1) or ["Europe/Berlin"]
            raise ValueError(f"unknown time zone {zone!r}; write one such as {close[0]}")
        return zone

    @field_validator("buckets")
    @classmethod
    def _check_power_of_two(cls, buckets: int) -> int:
        if buckets & (buckets - 1):
            raise ValueError(f"buckets is {buckets}; it must be a power of two")
        return buckets

    @field_validator("surfaces")
    @classmethod
    def _check_logged_names_unique(cls, surfaces: dict[str, Surface]) -> dict[str, Surface]:
        logged_names = [surface.logged_as or name for name, surface in surfaces.items()]
        duplicates = sorted({name for name in logged_names if logged_names.count(name) > 1})
        if duplicates:
            raise ValueError(f"two surfaces are logged as {', '.join(map(repr, duplicates))}")
        return surfaces

    @field_validator("events")
    @classmethod
    def _check_one_impression_type(cls, events: dict[str, EventType]) -> dict[str, EventType]:
        impressions = [name for name, event in events.items() if event.role == "impression"]
        if len(impressions) != 1:
            raise ValueError(f"one event type needs role: impression, {len(impressions)} have it")
        return events

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: Sources) -> Sources:
        if all(isinstance(source, AttributeSource) for source in sources.values()):
            raise ValueError("no source is an event_log or an impression_log")
        for entity in ("user", "item"):
            names = [name for name, s in sources.items() if _provides_attributes_of(s, entity)]
            if len(names) > 1:
                raise ValueError(f"sources {', '.join(names)} all hold {entity}s; join them")
        return sources

    @model_validator(mode="after")
    def _check_consistency(self) -> "DataSpec":
        problems = [*self._ranking_problems(), *self._attribute_problems()]
        for name, surfaces in self.domains.items():
            problems += self._domain_problems(name, surfaces)
        if problems:
            raise SpecConsistencyError(problems)
        return self

    def _ranking_problems(self) -> Iterator[tuple[KeyPath, str]]:
        for surface in self.ad_surfaces:
            if not any(surface in self.surfaces_of(name) for name in self.objectives):
                yield ("surfaces", surface), "ads but no objective; set `ads: false`"
            elif self.auction is None and self.ranking_objective(surface) is None:
                yield ("surfaces", surface), "no auction: name the objective that ranks, `rank_by`"
        if self.auction and self.rank_by:
            yield ("rank_by",), "the auction ranks; leave rank_by out"

    def _attribute_problems(self) -> Iterator[tuple[KeyPath, str]]:
        for entity in ("user", "item"):
            has_source = any(_provides_attributes_of(s, entity) for s in self.sources.values())
            if getattr(self.attributes, entity) and not has_source:
                text = f"{entity}s have attributes, but no source of kind attributes provides them"
                yield ("attributes", entity), text

    def _domain_problems(
        self, name: str, surfaces: tuple[str, ...]
    ) -> Iterator[tuple[KeyPath, str]]:
        if not surfaces:
            yield ("domains", name), "it has no surface"
        for surface in surfaces:
            others = [n for n, s in self.domains.items() if surface in s and n != name]
            if surface not in self.ad_surfaces:
                known = ", ".join(self.ad_surfaces)
                yield ("domains", name), f"no ads on surface {surface!r}; known: {known}"
            elif others or surfaces.count(surface) > 1:
                yield ("domains", name), f"surface {surface!r} is in a domain already"

    def require_ad_surface(self, surface: str) -> None:
        """Raise UserError unless a surface is in the spec and carries ads."""
        if surface not in self.ad_surfaces:
            raise UserError(f"no ads on surface {surface!r}; known: {', '.join(self.ad_surfaces)}")

    @cached_property
    def impression_type(self) -> str:
        """The event type that is ranked."""
        return next(name for name, event in self.events.items() if event.role == "impression")

    @cached_property
    def log_sources(self) -> dict[str, EventLogSource | ImpressionLogSource]:
        """The sources that hold events, by name."""
        return {
            name: source
            for name, source in self.sources.items()
            if isinstance(source, EventLogSource | ImpressionLogSource)
        }

    @cached_property
    def visibility_delays(self) -> dict[str, int]:
        """Seconds from the ingest of an event until it is visible, by event type.

        Where several logs declare a type, the largest of their delays.
        """
        delays: dict[str, int] = {}
        for log in self.log_sources.values():
            for event in self._event_types_of(log):
                delays[event] = max(delays.get(event, 0), log.delay)
        return delays

    def _event_types_of(self, log: EventLogSource | ImpressionLogSource) -> set[str]:
        if isinstance(log, ImpressionLogSource):
            return {self.impression_type, *(outcome.event for outcome in log.outcomes)}
        if log.columns.type:
            return set(log.types.values() or self.events)
        return {log.event or self.impression_type}

    def allow_missing_sources(self, names: Collection[str]) -> "DataSpec":
        """The same spec with some sources optional; raises UserError for unknown names."""
        unknown = sorted(set(names) - set(self.sources))
        if unknown:
            raise UserError(
                f"spec {self.name} has no source {unknown[0]!r}; known: {', '.join(self.sources)}"
            )
        if not names:
            return self
        dump = self.model_dump()
        for name in names:
            dump["sources"][name]["optional"] = True
        return type(self).model_validate(dump)

    @cached_property
    def surface_codes(self) -> dict[str, int]:
        """Code of each surface by name: its position in `surfaces`, from 1; 0 is unknown."""
        return {name: code for code, name in enumerate(self.surfaces, 1)}

    @cached_property
    def event_codes(self) -> dict[str, int]:
        """Code of each event type by name: its position in `events`, from 1; 0 is unknown."""
        return {name: code for code, name in enumerate(self.events, 1)}

    @cached_property
    def ad_surfaces(self) -> tuple[str, ...]:
        """Surfaces with ads, each of which gets a ranker."""
        return tuple(name for name, surface in self.surfaces.items() if surface.ads)

    @cached_property
    def label_windows(self) -> dict[str, tuple[str, int]]:
        """Objective and window (seconds) by label; `click_30m` is for the extra window 30m."""
        windows = {}
        for name, objective in self.objectives.items():
            windows[name] = name, objective.window
            for window in objective.extra_windows:
                windows[f"{name}_{format_duration(window)}"] = name, window
        return windows

    def attribution_touches(self, objective: Objective) -> tuple[Touchpoint, ...]:
        """The touchpoints of an objective, the preferred first."""
        return objective.attribution or (Touchpoint(touch=self.impression_type),)

    @property
    def uses_item_attribute_attribution(self) -> bool:
        """Whether some outcome is attributed by an attribute of its item."""
        touches = (touch for o in self.objectives.values() for touch in o.attribution)
        return any(touch.key != "item" for touch in touches)

    def surfaces_of(self, objective: str) -> tuple[str, ...]:
        """Surfaces on which an objective is trained and served."""
        return self.objectives[objective].surfaces or self.ad_surfaces

    def ranking_objective(self, surface: str) -> str | None:
        """The objective that ranks a surface without an auction: `rank_by`, else its only one."""
        objectives = [name for name in self.objectives if surface in self.surfaces_of(name)]
        if self.rank_by in objectives:
            return self.rank_by
        return objectives[0] if len(objectives) == 1 else None

    def domain_of(self, surface: str) -> str | None:
        """The domain that a surface belongs to."""
        return next((name for name, group in self.domains.items() if surface in group), None)

    def terms_of(self, surface: str) -> AuctionTerms:
        """The terms on which ads compete for a surface."""
        return self.auction.terms.get(surface, AuctionTerms()) if self.auction else AuctionTerms()

    @cached_property
    def allowed_lateness_days(self) -> int:
        """`allowed_lateness` in days, rounded up."""
        return -(-self.allowed_lateness // DAY)

    @cached_property
    def label_maturity_days(self) -> int:
        """Days after which every label of a day is final, rounded up."""
        return max(-(-o.label_maturity_seconds // DAY) for o in self.objectives.values())

    def day_start(self, day: date) -> int:
        """Epoch second at which a day begins in `time_zone`."""
        return int(datetime.combine(day, time(), ZoneInfo(self.time_zone)).timestamp())

    def day_end(self, day: date) -> int:
        """Epoch second at which the next day begins in `time_zone`."""
        return self.day_start(day + timedelta(days=1))

    @cached_property
    def ingest_settings(self) -> dict[str, Any]:
        """The sections that determine how raw records are read."""
        sections = {"sources", "surfaces", "attributes", "max_bad_record_rate"}
        return self.model_dump(mode="json", include=sections)

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that change with each key that affects tables, and with the codes."""
        keys = flatten_keys(self.model_dump(mode="json"))
        facts = {
            "keys": {".".join(path): value for path, value in keys if effect_of(path).is_hashed},
            "surfaces": list(self.surfaces),
            "events": list(self.events),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
