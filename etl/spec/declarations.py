"""The keys of a data spec, and what follows from them by look-up.

All keys are in docs/reference/spec.md.
"""

from difflib import get_close_matches
from functools import cached_property
from zoneinfo import available_timezones

from pydantic import Field, field_validator

from etl.spec.attributes import Attributes
from etl.spec.base import CategoryName, Name, ObjectiveName, SegmentName, StrictModel
from etl.spec.counters import CounterSpec
from etl.spec.sections import (
    AuctionSpec,
    AuctionTerms,
    AudienceSpec,
    AuxiliaryObjective,
    EventType,
    ForecastSpec,
    HistorySpec,
    Objective,
    OutcomeLabel,
    PositionBiasSpec,
    RetainedTable,
    RoiSpec,
    SequenceSpec,
    Surface,
    Touchpoint,
)
from etl.spec.sources import (
    EventLogSource,
    ImpressionLogSource,
    Sources,
    provides_attributes_of,
)
from etl.spec.units import DAY, Duration, format_duration

MAX_CODES = 127  # tables hold surfaces and event types as signed bytes


class SpecDeclarations(StrictModel):
    """The sections of a spec, each valid in itself."""

    name: Name
    """Name of the spec, used in messages and reports."""
    description: str = ""
    """Description of the data, for readers of the spec."""
    time_zone: str = "UTC"
    """IANA name of the time zone in which days begin, such as `Europe/Berlin`."""
    buckets: int = Field(default=16, ge=1)
    """Partitions of the users of each day, a power of two; an upgrade repartitions the tables."""
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
    auxiliary_objectives: dict[Name, AuxiliaryObjective] = {}
    """What GEM also learns to predict, by name; it is not served, and rankers do not see it."""
    attributes: Attributes = Attributes()
    """Attributes of users, items and impressions that models read."""
    position_bias: PositionBiasSpec | None = None
    """The attribute that is the position of an impression, and the position that is served."""
    sequences: dict[Name, SequenceSpec] = Field(min_length=1)
    """Streams of a user's events that models read, by name."""
    history: HistorySpec = HistorySpec()
    """How much of a user's history is kept."""
    retention: dict[RetainedTable, Duration] = {}
    """How long the days of a table are kept, in whole days; by default for ever."""
    similarity_attributes: tuple[CategoryName, ...] = ()
    """Item attributes by which a candidate is compared with the items of its user's history."""
    calibration_segments: tuple[SegmentName, ...] = ()
    """Categorical attributes within whose values rankers are calibrated, and `new_item`."""
    counters: CounterSpec
    """Aggregations of past events that models read as features."""
    auction: AuctionSpec | None = None
    """How ads compete; without an auction candidates are ranked by `rank_by`."""
    rank_by: ObjectiveName | None = None
    """Objective that ranks candidates without an auction; default: the only one of the surface."""
    audiences: dict[Name, AudienceSpec] = {}
    """Properties of users that data providers state and an auditor measures, by name."""
    forecast: ForecastSpec | None = None
    """What forecasts of reach and performance are made from; by default there are none."""
    roi: RoiSpec | None = None
    """Campaigns whose budgets follow return; by default there are none."""
    sources: Sources
    """Logs, attribute files, labels of data providers, audits and spend, by name."""

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
        logs = (EventLogSource, ImpressionLogSource)
        if not any(isinstance(source, logs) for source in sources.values()):
            raise ValueError("no source is an event_log or an impression_log")
        for entity in ("user", "item"):
            names = [name for name, s in sources.items() if provides_attributes_of(s, entity)]
            if len(names) > 1:
                raise ValueError(f"sources {', '.join(names)} all hold {entity}s; join them")
        return sources

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
    def impression_logs(self) -> tuple[str, ...]:
        """The wide logs, whose records hold an impression and its outcomes."""
        logs = self.log_sources.items()
        return tuple(name for name, log in logs if isinstance(log, ImpressionLogSource))

    @cached_property
    def visibility_delays(self) -> dict[str, int]:
        """Seconds from the ingest of an event until it is visible, by event type.

        Where several logs declare a type, the largest of their delays.
        """
        delays: dict[str, int] = {}
        for log in self.log_sources.values():
            for event in self.event_types_of(log):
                delays[event] = max(delays.get(event, 0), log.delay)
        return delays

    @cached_property
    def impression_delay(self) -> int:
        """Seconds from the ingest of an impression until it is visible."""
        return self.visibility_delays.get(self.impression_type, 0)

    def event_types_of(self, log: EventLogSource | ImpressionLogSource) -> set[str]:
        """The types of the events of a log."""
        if isinstance(log, ImpressionLogSource):
            return {self.impression_type, *(outcome.event for outcome in log.outcomes)}
        if log.columns.type:
            return set(log.types.values() or self.events)
        return {log.event or self.impression_type}

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
    def all_objectives(self) -> dict[str, Objective | AuxiliaryObjective]:
        """Objectives and auxiliary objectives, by name."""
        return {**self.objectives, **self.auxiliary_objectives}

    @cached_property
    def objective_labels(self) -> dict[str, tuple[str, int]]:
        """Objective and window (seconds) by label; `click_30m` is for the extra window 30m."""
        windows = {}
        for name, objective in self.objectives.items():
            windows[name] = name, objective.window
            for window in objective.extra_windows:
                windows[f"{name}_{format_duration(window)}"] = name, window
        return windows

    @cached_property
    def retraction_types(self) -> tuple[str, ...]:
        """Event types that take outcomes of objectives back."""
        retractions = [o.retracted_by.event for o in self.objectives.values() if o.retracted_by]
        return tuple(dict.fromkeys(retractions))

    @property
    def longest_retraction(self) -> int:
        """Seconds after final labels within which outcomes may be retracted; 0 if none can be."""
        retractions = (o.retracted_by for o in self.objectives.values() if o.retracted_by)
        return max((retraction.within for retraction in retractions), default=0)

    @cached_property
    def extra_window_labels(self) -> tuple[str, ...]:
        """The labels of extra windows, such as `click_30m`."""
        return tuple(name for name in self.objective_labels if name not in self.objectives)

    @cached_property
    def extra_window_objectives(self) -> tuple[int, ...]:
        """The position of the objective of each of `extra_window_labels`."""
        names = [self.objective_labels[label][0] for label in self.extra_window_labels]
        return tuple(list(self.objectives).index(name) for name in names)

    @cached_property
    def label_windows(self) -> dict[str, tuple[str, int]]:
        """Objective and window (seconds) by label, also of auxiliary objectives."""
        auxiliary = {name: (name, a.window) for name, a in self.auxiliary_objectives.items()}
        return self.objective_labels | auxiliary

    def attribution_touches(self, objective: OutcomeLabel) -> tuple[Touchpoint, ...]:
        """The touchpoints of an objective, the preferred first.

        Outcomes follow impressions within the window of the objective in any case; any other
        touchpoint without a window gets that window.
        """
        if not objective.attribution:
            return (Touchpoint(touch=self.impression_type),)
        *preferred, last = objective.attribution
        if last.window is None and last.touch != self.impression_type:
            last = last.model_copy(update={"window": objective.window})
        return (*preferred, last)

    @cached_property
    def allowed_lateness_days(self) -> int:
        """`allowed_lateness` in days, rounded up."""
        return -(-self.allowed_lateness // DAY)

    @cached_property
    def label_maturity_seconds(self) -> int:
        """Seconds from an impression until all its labels are final.

        They are not final before the impression is visible. Auxiliary objectives are not later than
        the objectives of their surfaces.
        """
        slowest = max(objective.label_maturity_seconds for objective in self.objectives.values())
        return max(slowest, self.impression_delay)

    @cached_property
    def label_maturity_days(self) -> int:
        """Days after which every label of a day is final, rounded up."""
        return -(-self.label_maturity_seconds // DAY)

    @cached_property
    def attribution_lookback_days(self) -> int:
        """Days before an impression of which touches may decide who its outcomes belong to.

        A preferred touch may lie up to its window before the impression, and the touch's own
        impression up to another window before that. A touch of the last touchpoint matters only
        after the impression, because later ones supersede it; its own impression may lie up to its
        window before it. With `unknown_impression: last_touch`, the impressions that outcomes name
        matter for the window of the objective.
        """
        seconds = 0
        for objective in self.all_objectives.values():
            *preferred, last = self.attribution_touches(objective)
            of_last = 0 if last.touch == self.impression_type else last.window or 0
            of_named = objective.window if objective.unknown_impression == "last_touch" else 0
            of_preferred = (2 * (touchpoint.window or 0) for touchpoint in preferred)
            seconds = max(seconds, of_last, of_named, *of_preferred)
        return -(-seconds // DAY)

    @cached_property
    def retraction_horizon_days(self) -> int:
        """Days before a retraction is visible on which it and events of its outcome may land."""
        lateness = 1 + self.allowed_lateness_days
        within = -(-self.longest_retraction // DAY)
        lookback = self.attribution_lookback_days
        return self.label_maturity_days + within + 2 * lateness + lookback

    @property
    def uses_item_attribute_attribution(self) -> bool:
        """Whether some outcome is attributed by an attribute of its item."""
        touches = (touch for o in self.all_objectives.values() for touch in o.attribution)
        return any(touch.key != "item" for touch in touches)

    @property
    def ingest_uses_item_attributes(self) -> bool:
        """Whether events of some log follow touches with the same attribute of their items."""
        logs = (log for log in self.log_sources.values() if isinstance(log, EventLogSource))
        return any(log.touch_key not in (None, "item") for log in logs)

    def surfaces_of(self, objective: str) -> tuple[str, ...]:
        """Surfaces whose impressions have the label of an objective, auxiliary ones included."""
        return self.all_objectives[objective].surfaces or self.ad_surfaces

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
