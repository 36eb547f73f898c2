"""A first data spec from a sample of a user's files: `gemline spec infer`.

The result is a draft: it loads, marks guesses in comments, and must be reviewed.
"""

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from etl.errors import UserError
from etl.spec.sample import Column, SourceSample, as_number, group_by_path_pattern, read_sample
from etl.spec.sample_events import (
    VIEW,
    SampledEvents,
    flag_event,
    frequent_values,
    outcome_flags,
    spec_name,
)

MAX_VOCABULARY = 12
WINDOW = "1h"


def infer_spec(folder: Path) -> str:
    """A first data spec for the files below a folder, as YAML with comments.

    Raises UserError if no file looks like a log of events.
    """
    samples = [read_sample(*group) for group in group_by_path_pattern(folder)]
    logs = [sample for sample in samples if sample.is_log]
    if not logs:
        seen = ", ".join(sample.pattern for sample in samples) or "no JSON, CSV or Parquet file"
        raise UserError(
            f"{folder}: no file looks like a log (a user, an item and a time in each record); "
            f"found: {seen}. Write the spec by hand: docs/guides/your-logs.md"
        )
    return (
        "\n".join(SpecDraft(folder.name, logs, [s for s in samples if not s.is_log]).lines()) + "\n"
    )


@dataclass(frozen=True)
class SpecDraft:
    """The YAML text of a spec for some logs and attribute files."""

    folder: str
    logs: Sequence[SourceSample]
    others: Sequence[SourceSample]

    @cached_property
    def sampled(self) -> SampledEvents:
        """The events of the logs."""
        return SampledEvents(self.logs)

    @cached_property
    def source_names(self) -> dict[str, str]:
        """The name of the source of each pattern."""
        return unique_names({sample.pattern: sample.name for sample in (*self.logs, *self.others)})

    def lines(self) -> Iterator[str]:
        """All sections of the spec."""
        today = datetime.now(UTC).date()
        yield f"# Inferred on {today} from a sample of {self.folder}: read every line before use."
        yield f"name: {spec_name(self.folder)}"
        yield "time_zone: UTC        # where your days begin"
        yield "buckets: 16           # hash partitions of users; a power of two"
        yield "allowed_lateness: 3d  # events that land later are excluded"
        for section in (
            self.surfaces,
            self.events,
            self.objectives,
            self.auxiliary_objectives,
            self.attributes,
            self.position_bias,
        ):
            if lines := [*section()]:
                yield from ("", *lines)
        yield ""
        yield from ("sequences:", "  behavior: {max_length: 256}", "")
        yield from self.counters()
        yield ""
        yield "# Orders candidates; an `auction` needs bids and goals: docs/concepts/auction.md"
        yield f"rank_by: {self.sampled.objectives[0]}"
        yield ""
        yield "sources:"
        for log in self.logs:
            yield from self.log_source(log)
        for entity, sample in self.attribute_files().items():
            yield from self.attribute_source(entity, sample)
        used = {id(s) for s in (*self.logs, *self.attribute_files().values())}
        for sample in self.others:
            if id(sample) not in used:
                columns = ", ".join(list(sample.columns)[:8])
                yield f"  # not used: {sample.pattern} (columns {columns})"

    def surfaces(self) -> Iterator[str]:
        """Each value of the logs' surface columns; one made-up surface where none has one."""
        yield "surfaces:"
        values = [v for log in self.logs for v in frequent_values(log, "surface")]
        for value in dict.fromkeys(values):
            name = spec_name(value)
            yield (
                f"  {name}: {{}}"
                if name == value
                else f"  {name}: {{logged_as: {json.dumps(value)}}}"
            )
        if not values:
            yield "  main: {}  # no column looks like a surface: name one under `columns`"

    def events(self) -> Iterator[str]:
        """Event types with their roles."""
        yield "events:  # role: impression is what is ranked, outcome what may follow it"
        for name in self.sampled.types:
            role = "impression" if name == self.sampled.impression else ""
            role = role or ("outcome" if name in self.sampled.outcomes else "activity")
            yield f"  {name}: {{role: {role}}}"

    def objectives(self) -> Iterator[str]:
        """An objective for each outcome that is not rare."""
        yield "objectives:  # window: how long after an impression its outcome counts"
        for name in self.sampled.objectives:
            yield f"  {name}: {{event: {name}, window: {WINDOW}}}"

    def auxiliary_objectives(self) -> Iterator[str]:
        """Outcomes that are rare, and dwells; nothing where the logs have neither."""
        rare, dwells = self.sampled.rare_outcomes, self.sampled.dwell_events
        if rare or dwells:
            yield "auxiliary_objectives:  # GEM learns them, too; move one up to serve it"
        for name in rare:
            share = self.sampled.counts[name] / self.sampled.counts[self.sampled.impression]
            yield (
                f"  {name}: {{event: {name}, window: {WINDOW}}}"
                f"  # after {share:.2%} of the impressions"
            )
        for name in dwells:
            yield f"  {name}_dwell: {{event: {name}, window: {WINDOW}, target: dwell}}"

    def attributes(self) -> Iterator[str]:
        """Attributes of users and items from their files, of the context from the logs."""
        yield "attributes:"
        for entity, sample in self.attribute_files().items():
            skipped = {sample.roles.get(entity), sample.roles.get("event_time")}
            columns = _informative_columns(sample, skipped)
            names = unique_names({name: spec_name(name) for name in columns})
            rows = [f"    {names[n]}: {_attribute(n, names[n], c)}" for n, c in columns.items()]
            if rows:
                yield from (f"  {entity}:", *rows)
        yield "  context:"
        if self.positions():
            column = next(iter(self.positions()))
            renamed = "" if column == "position" else f", column: {json.dumps(column)}"
            yield f"    position: {{type: numeric{renamed}}}"
        yield from self._context_attributes()

    def _context_attributes(self) -> Iterator[str]:
        """The columns of logs that have no role, and the hour, under names of their own.

        Those of wide logs are comments: a row also has what followed the impression.
        """
        columns: dict[str, Column] = {}
        of_wide_logs: set[str] = set()
        for log in self.logs:
            found = _informative_columns(log, {*log.roles.values(), *outcome_flags(log)})
            columns |= found
            if log in self.sampled.wide_logs:
                of_wide_logs |= found.keys()
        used = ["position"] if self.positions() else []
        names = unique_names({name: spec_name(name) for name in columns}, used)
        if of_wide_logs:
            yield "    # Declare those of these columns that are known before the impression:"
        for name, column in columns.items():
            comment = "# " if name in of_wide_logs else ""
            yield f"    {comment}{names[name]}: {_attribute(name, names[name], column)}"
        hour = unique_names({"hour": "hour"}, [*used, *names.values()])["hour"]
        yield f"    {hour}: {{type: clock, part: hour}}"

    def positions(self) -> dict[str, Column]:
        """The columns with the position of an impression."""
        return {
            log.roles["position"]: log.columns[log.roles["position"]]
            for log in self.logs
            if "position" in log.roles
        }

    def position_bias(self) -> Iterator[str]:
        """The position for which rankers serve; nothing where the logs have none."""
        numbers = [as_number(value) or 0 for c in self.positions().values() for value in c.values]
        if numbers:
            yield "position_bias:  # its effect is learned apart from all else"
            yield f"  {{attribute: position, served_position: {max(0, int(min(numbers)))}}}"

    def counters(self) -> Iterator[str]:
        """Counters of the impression and the outcomes."""
        events = ", ".join([self.sampled.impression, *self.sampled.outcomes])
        yield "counters:"
        yield "  windows: [1d, 7d]"
        yield f"  events: [{events}]"
        yield "  keys: [[user], [user, surface], [item], [item, surface], [surface]]"

    def log_source(self, log: SourceSample) -> Iterator[str]:
        """The source of a log."""
        flags = outcome_flags(log)
        is_wide = bool(flags) and "type" not in log.roles
        unit = log.columns[log.roles["event_time"]].time_unit
        name, files = self.source_names[log.pattern], len(log.files)
        yield f"  {name}:  # {log.num_records:,} records of {files} files were read"
        yield f"    kind: {'impression_log' if is_wide else 'event_log'}"
        yield f"    format: {log.format}"
        yield f"    path: {json.dumps(log.pattern)}"
        yield f"    time_unit: {unit}"
        yield "    columns:"
        columns = {role: name for role, name in log.roles.items() if role != "dwell" or not is_wide}
        yield from (f"      {role}: {json.dumps(name)}" for role, name in columns.items())
        if "surface" not in log.roles:
            yield "      surface: surface  # no such column was found: name one"
        if is_wide:
            yield "    outcomes:"
            for flag in flags:
                yield f"      - {{event: {flag_event(flag)}, indicator: {json.dumps(flag)}}}"
            if "dwell" in log.roles:
                dwell = json.dumps(log.roles["dwell"])
                delay = f", delay: {dwell}" if unit in ("ms", "iso") else ""
                yield f"      - {{event: {VIEW}, dwell: {dwell}{delay}}}"
        elif "type" in log.roles:
            types = {v: spec_name(v) for v in frequent_values(log, "type")}
            if any(value != name for value, name in types.items()):
                pairs = ", ".join(f"{json.dumps(v)}: {name}" for v, name in types.items())
                yield f"    types: {{{pairs}}}"
        if "{day" not in log.pattern:
            yield from self._day_column(log)

    def _day_column(self, log: SourceSample) -> Iterator[str]:
        for name, column in log.columns.items():
            if column.day_format:
                yield f'    day: {{column: {json.dumps(name)}, format: "{column.day_format}"}}'
                return
        yield "    # the day of a record is that of its ingest time; `day` may name a column"

    def attribute_source(self, entity: str, sample: SourceSample) -> Iterator[str]:
        """The source of an attribute file."""
        yield f"  {self.source_names[sample.pattern]}:"
        yield "    kind: attributes"
        yield f"    entity: {entity}"
        yield f"    format: {sample.format}"
        yield f"    path: {json.dumps(sample.pattern)}"
        yield f"    key: {json.dumps(sample.roles[entity])}"
        if "event_time" in sample.roles:
            yield f"    valid_from: {json.dumps(sample.roles['event_time'])}"
            yield f"    time_unit: {sample.columns[sample.roles['event_time']].time_unit}"
        if "{day" not in sample.pattern:
            yield "    static: true  # its rows never change; otherwise remove this line"

    def attribute_files(self) -> dict[str, SourceSample]:
        """The file that describes users, and the one that describes items."""
        found: dict[str, SourceSample] = {}
        for sample in self.others:
            named = [entity for entity in ("user", "item") if entity in sample.roles]
            if len(named) == 1:
                found.setdefault(named[0], sample)
        return found


def unique_names(names: Mapping[str, str], used: Collection[str] = ()) -> dict[str, str]:
    """`names` by their keys; one that is used already, or by an earlier key, gets a number."""
    unique: dict[str, str] = {}
    for key, name in names.items():
        numbered = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        unique[key] = next(n for n in numbered if n not in {*used, *unique.values()})
    return unique


def _informative_columns(
    sample: SourceSample, skipped: Collection[str | None]
) -> dict[str, Column]:
    """The columns of a sample that are no times and not the same in all records."""
    columns = {}
    for name, column in sample.columns.items():
        is_constant = len(column.distinct) == 1
        if column.is_list:
            is_constant = not (column.vector_width or column.listed)
        is_time = column.time_unit or column.day_format
        if name not in skipped and not is_time and not is_constant:
            columns[name] = column
    return columns


def _attribute(column_name: str, name: str, column: Column) -> str:
    """The declaration of an attribute by its values."""
    renamed = "" if name == column_name else f", column: {json.dumps(column_name)}"
    if column.vector_width:
        return f"{{type: vector, width: {column.vector_width}{renamed}}}"
    if column.is_list:
        values = sorted(column.listed)
        inputs = f"vocabulary: {json.dumps(values)}"
        if len(values) > MAX_VOCABULARY:
            inputs = f"size: {min(256, 2 * len(values))}"
        return f"{{type: multi_categorical, {inputs}{renamed}}}"
    values = sorted(column.distinct)
    if column.is_number and not column.is_id and len(values) > MAX_VOCABULARY:
        heavy_tail = all((as_number(value) or 0) >= 0 for value in column.values)
        return f"{{type: numeric, transform: {'log' if heavy_tail else 'none'}{renamed}}}"
    if len(values) <= MAX_VOCABULARY and not column.is_number and not column.is_id:
        return f"{{type: categorical, vocabulary: {json.dumps(values)}{renamed}}}"
    size = 1 << max(4, (2 * len(values)).bit_length())
    return f"{{type: categorical, size: {size}{renamed}}}  # {len(values)} values in the sample"
