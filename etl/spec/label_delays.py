"""Outcomes that do not count for labels, because labels wait shorter than their log's `delay`."""

from collections.abc import Iterator

from etl.spec.declarations import SpecDeclarations
from etl.spec.effects import KeyPath
from etl.spec.sources import ImpressionLogSource
from etl.spec.units import format_duration


def label_delay_problems(spec: SpecDeclarations) -> Iterator[tuple[KeyPath, str]]:
    """Objectives with labels that are final before any outcome is visible."""
    shortest: dict[str, int] = {}
    for name, window in spec.label_windows.values():
        shortest[name] = min(window, shortest.get(name, window))
    for name, objective in spec.all_objectives.items():
        delay = min(_outcome_delays(spec, objective.event), default=0)
        final = max(shortest[name] + objective.label_grace_period, spec.impression_delay)
        if delay and delay >= final:
            section = "objectives" if name in spec.objectives else "auxiliary_objectives"
            yield (
                (section, name),
                f"its labels are final before {objective.event} events are visible, which they are "
                f"{format_duration(delay)} after their ingest: give it a label_grace_period of at "
                f"least {format_duration(delay)}",
            )


def label_delay_warnings(spec: SpecDeclarations) -> Iterator[str]:
    """A sentence for each objective whose outcomes do not count at the end of its window."""
    for name, objective in spec.all_objectives.items():
        window, delay = objective.window, max(_outcome_delays(spec, objective.event), default=0)
        final = max(objective.label_maturity_seconds, spec.impression_delay)
        if delay and window + delay > final:
            missed = min(window, window + delay - final)
            yield (
                f"objective {name}: {objective.event} events in the last {format_duration(missed)} "
                f"of the window do not count, because they are visible {format_duration(delay)} "
                f"after their ingest; with a label_grace_period of {format_duration(delay)} they do"
            )


def _outcome_delays(spec: SpecDeclarations, event: str) -> Iterator[int]:
    """For each way in which logs hold an event, by how much it is visible after its ingest.

    0 for an event that is visible with its impression, for which labels wait in any case.
    """
    for log in spec.log_sources.values():
        if event == spec.impression_type:
            yield 0
        elif isinstance(log, ImpressionLogSource):
            yield from (log.delay if o.delay else 0 for o in log.outcomes if o.event == event)
        elif event in spec.event_types_of(log):
            yield log.delay
