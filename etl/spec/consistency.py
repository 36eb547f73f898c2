"""Contradictions between sections of a spec, each with the location of the key to change."""

from collections import Counter
from collections.abc import Iterator

from etl.spec.attributes import CategoricalAttribute, LocalTimeAttribute, NumericAttribute
from etl.spec.counters import EVENT_NUMBERS
from etl.spec.declarations import SpecDeclarations
from etl.spec.effects import KeyPath
from etl.spec.label_delays import label_delay_problems
from etl.spec.report_sources import AudienceLabelSource, AuditSource, SpendSource
from etl.spec.sections import (
    HISTORY_ATTRIBUTE_CODES,
    NEW_ITEM,
    RETENTION_MARGIN_DAYS,
    Objective,
)
from etl.spec.sources import (
    EventLogSource,
    ImpressionLogSource,
    provides_attributes_of,
)
from etl.spec.units import DAY, format_duration

Problem = tuple[KeyPath, str]


def consistency_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """All contradictions between valid sections."""
    yield from _ranking_problems(spec)
    yield from _attribute_problems(spec)
    yield from _position_problems(spec)
    yield from _segment_problems(spec)
    yield from _event_column_problems(spec)
    yield from _named_event_problems(spec)
    yield from _retraction_problems(spec)
    yield from _attribution_problems(spec)
    yield from label_delay_problems(spec)
    for name in spec.auxiliary_objectives:
        yield from _auxiliary_problems(spec, name)
    for name, surfaces in spec.domains.items():
        yield from _domain_problems(spec, name, surfaces)
    for name in spec.audiences:
        yield from _audience_problems(spec, name)
    if spec.history.compact_every % DAY:
        yield ("history", "compact_every"), "write whole days, such as 30d"
    yield from _counter_problems(spec)
    yield from _history_problems(spec)
    yield from _retention_problems(spec)
    yield from _forecast_problems(spec)
    yield from _roi_problems(spec)


def _ranking_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    for surface in spec.ad_surfaces:
        if not any(surface in spec.surfaces_of(name) for name in spec.objectives):
            yield ("surfaces", surface), "ads but no objective; set `ads: false`"
        elif spec.auction is None and spec.ranking_objective(surface) is None:
            yield ("surfaces", surface), "no auction: name the objective that ranks, `rank_by`"
    if spec.auction and spec.rank_by:
        yield ("rank_by",), "the auction ranks; leave rank_by out"
    if spec.auction and spec.auction.target_roas:
        goal_objectives = set(spec.auction.goal_objectives.values())
        if not any(o.value for name, o in spec.objectives.items() if name in goal_objectives):
            text = "no goal has an objective with a value: give one `value: true`"
            yield ("auction", "target_roas"), text


def _attribute_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    for entity in ("user", "item"):
        has_source = any(provides_attributes_of(s, entity) for s in spec.sources.values())
        if getattr(spec.attributes, entity) and not has_source:
            text = f"{entity}s have attributes, but no source of kind attributes provides them"
            yield ("attributes", entity), text
    for name, attribute in spec.attributes.event.items():
        if isinstance(attribute, NumericAttribute) and attribute.transform != "none":
            yield ("attributes", "event", name), "counters read numbers as logged: no `transform`"
        for entity in ("user", "item", "context"):
            if name in getattr(spec.attributes, entity):
                text = f"{name} is also an attribute of the {entity}: rename one of them"
                yield ("attributes", "event", name), text


def _position_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """A position that models would read as if it were known before ranking."""
    columns = {log.columns.position for log in spec.log_sources.values()} - {None}
    named = spec.position_bias.attribute if spec.position_bias else None
    for name, attribute in spec.attributes.context.items():
        if isinstance(attribute, LocalTimeAttribute):
            continue
        if name == named and isinstance(attribute, NumericAttribute):
            if attribute.transform != "none":
                yield ("attributes", "context", name), "a position has `transform: none`"
        elif name != named and (attribute.column or name) in columns:
            yield (
                ("attributes", "context", name),
                "the position is known only after ranking: leave the attribute out, or declare it "
                f"as `position_bias: {{attribute: {name}}}`",
            )


def _segment_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """A segment whose name means two things."""
    entities = ("user", "item", "context")
    for segment in spec.calibration_segments:
        named = [entity for entity in entities if segment in getattr(spec.attributes, entity)]
        named += ["new items"] * (segment == NEW_ITEM)
        if len(named) > 1:
            text = f"{segment} is a segment of {' and of '.join(named)}: rename an attribute"
            yield ("calibration_segments",), text


def _event_column_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """Dwells, values and attributes of events that no source provides."""
    of_events = {*EVENT_NUMBERS, *spec.attributes.event}
    used = [
        (("counters", "aggregations"), aggregation.column, aggregation.event)
        for aggregation in spec.counters.aggregations
        if aggregation.column in of_events
    ]
    used += [
        (("auxiliary_objectives", name), "dwell", auxiliary.event)
        for name, auxiliary in spec.auxiliary_objectives.items()
        if auxiliary.target == "dwell"
    ]
    for path, column, event in used:
        if not any(_has_column(spec, log, event, column) for log in spec.log_sources.values()):
            text = f"no source has a {column} of {event} events: name its column or leave it out"
            yield path, text


def _counter_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """Counters whose columns have the same name."""
    counted = Counter(counter.column for counter in spec.counters.columns)
    repeated = [name for name, number in counted.items() if number > 1]
    if repeated:
        text = f"several counters have the column {repeated[0]}: rename an attribute or an event"
        yield ("counters",), text


def _named_event_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """Impressions without a field, touches that name touches, and touches without an id."""
    logs = {n: log for n, log in spec.log_sources.items() if isinstance(log, EventLogSource)}
    touches = {log.touch for log in logs.values()} - {None}
    with_ids = {type_ for log in logs.values() for type_ in spec.event_types_of(log)}
    for name, log in logs.items():
        lacking, types = log.fields_of_named, spec.event_types_of(log)
        if lacking and spec.impression_type in types:
            text = f"impressions need their {lacking[0]}: name its column"
            yield ("sources", name, "columns", lacking[0]), text
        for type_ in sorted(types & touches if log.touch else ()):
            text = f"a touch cannot follow a touch: let {type_} events name impressions"
            yield ("sources", name, "touch"), text
        if log.touch_key and log.touch not in spec.visibility_delays:
            text = f"no log has {log.touch} events"
            yield ("sources", name, "touch"), text
        longest = max(objective.window for objective in spec.all_objectives.values())
        if log.touch_window is not None and log.touch_window > longest:
            text = f"labels end {format_duration(longest)} after the impression: write at most that"
            yield ("sources", name, "touch_window"), text
        if log.columns.touch and log.touch not in with_ids:
            text = f"no event log has {log.touch} events, whose ids could be named"
            yield ("sources", name, "touch"), text


def _retraction_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    for name, objective in spec.objectives.items():
        retraction, path = objective.retracted_by, ("objectives", name, "retracted_by")
        if retraction is None:
            continue
        if spec.events[retraction.event].role != "retraction":
            yield path, f"give the event type {retraction.event} `role: retraction`"
        logs = spec.log_sources.values()
        if not any(
            retraction.event in spec.event_types_of(log) and log.columns.retracts for log in logs
        ):
            text = f"no source has the column `retracts` for {retraction.event} events: name it"
            yield path, text
        if others := _confusable_outcomes(spec, objective):
            text = (
                f"{retraction.event} also retracts {others[0]} events, of another log, which may "
                "have the same ids: give each a retraction type of its own, or set "
                "`shared_event_ids: true` if no two logs use one id"
            )
            yield path, text


def _confusable_outcomes(spec: SpecDeclarations, objective: Objective) -> list[str]:
    """Other types of outcomes, of other logs, that the retractions of an objective may name.

    Ids differ within a log, and across logs with `shared_event_ids`.
    """
    if spec.shared_event_ids or objective.retracted_by is None:
        return []
    retraction = objective.retracted_by.event
    rivals = [o for o in spec.objectives.values() if o.retracted_by and o.event != objective.event]
    others = {o.event for o in rivals if o.retracted_by and o.retracted_by.event == retraction}
    logs = [spec.event_types_of(log) for log in spec.log_sources.values()]
    return sorted(
        other
        for other in others
        if sum(bool({other, objective.event} & types) for types in logs) > 1
    )


def _attribution_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """Preferred touchpoints without a window: touches of any age would decide about outcomes."""
    for section in ("objectives", "auxiliary_objectives"):
        for name, objective in getattr(spec, section).items():
            for position, touchpoint in enumerate(objective.attribution[:-1]):
                if touchpoint.window is None:
                    text = (
                        f"give touch {touchpoint.touch} a window: only the last touch may have none"
                    )
                    yield (section, name, "attribution", str(position)), text


def _has_column(
    spec: SpecDeclarations,
    log: EventLogSource | ImpressionLogSource,
    event: str,
    column: str,
) -> bool:
    is_attribute = column in spec.attributes.event
    if isinstance(log, ImpressionLogSource):
        outcomes = [outcome for outcome in log.outcomes if outcome.event == event]
        return any(column in o.attributes if is_attribute else getattr(o, column) for o in outcomes)
    has_column = is_attribute or getattr(log.columns, column) is not None
    return event in spec.event_types_of(log) and has_column


def _auxiliary_problems(spec: SpecDeclarations, name: str) -> Iterator[Problem]:
    """Labels of an auxiliary objective that have the name of others, or that nothing trains on."""
    path, auxiliary = ("auxiliary_objectives", name), spec.auxiliary_objectives[name]
    if name in spec.objective_labels:
        yield path, "an objective has a label of this name"
        return
    for surface in spec.surfaces_of(name):
        names = [other for other in spec.objectives if surface in spec.surfaces_of(other)]
        maturities = [spec.objectives[other].label_maturity_seconds for other in names]
        if not names:
            yield path, f"surface {surface!r} has no objective; leave it out of `surfaces`"
        elif auxiliary.label_maturity_seconds > max(maturities):
            longest = format_duration(max(maturities))
            yield (
                path,
                f"its labels on {surface} are final after those of all objectives, with which GEM "
                f"learns them; window and grace period may be {longest} together",
            )


def _domain_problems(
    spec: SpecDeclarations, name: str, surfaces: tuple[str, ...]
) -> Iterator[Problem]:
    if not surfaces:
        yield ("domains", name), "it has no surface"
    for surface in surfaces:
        others = [n for n, s in spec.domains.items() if surface in s and n != name]
        if surface not in spec.ad_surfaces:
            known = ", ".join(spec.ad_surfaces)
            yield ("domains", name), f"no ads on surface {surface!r}; known: {known}"
        elif others or surfaces.count(surface) > 1:
            yield ("domains", name), f"surface {surface!r} is in a domain already"


def _audience_problems(spec: SpecDeclarations, name: str) -> Iterator[Problem]:
    """An audience without labels or without audits."""
    for kind, source_type in (("audience_labels", AudienceLabelSource), ("audits", AuditSource)):
        sources = [s for s in spec.sources.values() if isinstance(s, source_type)]
        if not any(source.audience == name for source in sources):
            yield ("audiences", name), f"no source of kind {kind} is about it"


def _forecast_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """Attributes of a targeting that are ambiguous, or that are known only after ranking."""
    position = spec.position_bias.attribute if spec.position_bias else None
    for name in spec.forecast.attributes if spec.forecast else ():
        if name in spec.attributes.user and name in spec.attributes.context:
            text = f"{name} is an attribute of users and of the context: rename one"
            yield ("forecast", "attributes"), text
        elif name == position:
            text = f"{name} is the position, which a campaign cannot choose: leave it out"
            yield ("forecast", "attributes"), text
        elif name == "surface":
            yield (
                ("forecast", "attributes"),
                "a targeting may always name the surface: leave it out",
            )


def _retention_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """Tables whose days would be removed while other steps read them."""
    slowest = max(objective.label_maturity_seconds for objective in spec.objectives.values())
    margin = RETENTION_MARGIN_DAYS * DAY
    open_days = slowest + spec.allowed_lateness
    forecast = spec.forecast.window if spec.forecast else 0
    audits = max((audience.window for audience in spec.audiences.values()), default=0)
    windows = {"scores": forecast, "audits": audits, "audience_counts": audits}
    if spec.retraction_types:  # net rates read the examples, campaign days the impressions
        windows["examples"] = open_days + spec.longest_retraction
        windows["impressions"] = spec.retraction_horizon_days * DAY
    for name, retention in spec.retention.items():
        shortest = max(open_days, windows.get(name, 0)) + margin
        if retention % DAY:
            yield ("retention", name), "write whole days, such as 60d"
        elif retention < shortest:
            days = format_duration(-(-shortest // DAY) * DAY)
            yield ("retention", name), f"later steps read the days before: keep at least {days}"


def _history_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """Attributes whose values do not fit one byte."""
    limit = HISTORY_ATTRIBUTE_CODES
    for name in spec.history.attributes:
        attribute = spec.attributes.event[name]
        if isinstance(attribute, CategoricalAttribute) and attribute.num_embeddings > limit:
            text = (
                f"{name} has {attribute.num_embeddings} rows, and events of histories hold {limit}"
            )
            yield ("history", "attributes"), text


def _roi_problems(spec: SpecDeclarations) -> Iterator[Problem]:
    """Campaigns without spend, or whose outcomes have no value."""
    if spec.roi is None:
        return
    if not any(isinstance(source, SpendSource) for source in spec.sources.values()):
        yield ("roi",), "no source of kind spend says what campaigns were billed"
    if not spec.objectives[spec.roi.objective].value:
        yield ("roi", "objective"), f"give the objective {spec.roi.objective} `value: true`"
    named = sorted({*spec.roi.groups} & {*ROI_COLUMNS})
    if named:
        text = f"{named[0]} is a column of campaign_days: rename the attribute"
        yield ("roi", "groups"), text


ROI_COLUMNS = (
    *("campaign", "day", "spend", "conversions", "value", "currency", "arrived", "impressions"),
    "incremental_share",
)
