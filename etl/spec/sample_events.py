"""The events in sampled logs: their types, how often each occurs, and what models may learn."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from etl.spec.sample import SourceSample

MIN_RECORDS_FOR_NOISE = 500
MIN_IMPRESSIONS_FOR_SHARES = 200
RARE_SHARE = 0.005  # of the impressions; a day of 100,000 then has 500 positives
IMPRESSION_NAMES = re.compile(r"impression|shown|show$|view$|exposure|display|served")
OUTCOME_NAMES = re.compile(
    r"click|tap|convers|purchas|order|buy|bought|install|like|follow|share|comment|long_view|"
    r"forward|hate|save|repl(y|ied)|repost|subscri"
)
CONVERSION_NAMES = re.compile(r"convers|purchas|order|buy|bought|install|subscri")
VIEW = "view"  # the outcome that holds the dwell of a wide log


def spec_name(text: str) -> str:
    """A text as a name that a spec may use: lower case, digits and underscores."""
    name = re.sub(r"\W+", "_", text.lower()).strip("_")
    return name if name and name[0].isalpha() else f"v{name}"


def flag_event(flag: str) -> str:
    """The event type that a flag of a wide log stands for: `is_click` is `click`."""
    return spec_name(re.sub(r"^(is|has)_|_flag$", "", flag))


def frequent_values(sample: SourceSample, role: str) -> list[str]:
    """The values of a role's column, without those that are too rare to be no bad records."""
    column = sample.roles.get(role)
    if column is None:
        return []
    min_count = 3 if sample.num_records >= MIN_RECORDS_FOR_NOISE else 1
    counts = sample.columns[column].distinct
    return sorted(value for value, count in counts.items() if count >= min_count)


def outcome_flags(log: SourceSample) -> list[str]:
    """The columns of a log that are flags of outcomes."""
    used_columns = set(log.roles.values())
    return [
        name
        for name, column in log.columns.items()
        if name not in used_columns and column.is_flag and OUTCOME_NAMES.search(name.lower())
    ]


@dataclass(frozen=True)
class SampledEvents:
    """The events of some logs; a log without a column of types has one impression a record."""

    logs: Sequence[SourceSample]

    @cached_property
    def wide_logs(self) -> list[SourceSample]:
        """The logs with one impression a record."""
        return [log for log in self.logs if "type" not in log.roles]

    @cached_property
    def types(self) -> list[str]:
        """Names of all event types."""
        names = [spec_name(v) for log in self.logs for v in frequent_values(log, "type")]
        if self.wide_logs:
            flags = [flag_event(flag) for log in self.wide_logs for flag in outcome_flags(log)]
            views = [VIEW for log in self.wide_logs if "dwell" in log.roles and outcome_flags(log)]
            names = ["impression", *names, *flags, *views]
        return list(dict.fromkeys(names))

    @cached_property
    def impression(self) -> str:
        """The event type that is ranked."""
        names = self.types
        likely = [n for n in names if IMPRESSION_NAMES.search(n) and not OUTCOME_NAMES.search(n)]
        return next((n for n in likely if "impression" in n), likely[0] if likely else names[0])

    @cached_property
    def outcomes(self) -> list[str]:
        """Event types that may follow an impression."""
        others = [name for name in self.types if name != self.impression]
        named = [name for name in others if OUTCOME_NAMES.search(name)]
        return named or others or [self.impression]

    @cached_property
    def counts(self) -> Counter[str]:
        """Occurrences of each event type in the sample."""
        counts: Counter[str] = Counter()
        for log in self.logs:
            if "type" in log.roles:
                for value, count in log.columns[log.roles["type"]].distinct.items():
                    counts[spec_name(value)] += count
                continue
            counts["impression"] += log.num_records
            for flag in outcome_flags(log):
                values = log.columns[flag].distinct
                counts[flag_event(flag)] += sum(values[true] for true in ("1", "1.0", "True"))
        return counts

    @cached_property
    def rare_outcomes(self) -> list[str]:
        """Outcomes, but not conversions, of fewer than RARE_SHARE of the impressions.

        Empty if the sample is too small, or has no other outcomes.
        """
        impressions = self.counts[self.impression]
        if impressions < MIN_IMPRESSIONS_FOR_SHARES:
            return []
        rare = [
            name
            for name in self.outcomes
            if self.counts[name] < RARE_SHARE * impressions and not CONVERSION_NAMES.search(name)
        ]
        return rare if len(rare) < len(self.outcomes) else []

    @property
    def objectives(self) -> list[str]:
        """Outcomes that are frequent enough to be served, or conversions."""
        return [name for name in self.outcomes if name not in self.rare_outcomes]

    @cached_property
    def dwell_events(self) -> list[str]:
        """The event type of each log that most often has a dwell, of an impression if possible.

        An event that names its impression is preferred to one that may be of other content.
        """
        found = [VIEW] if VIEW in self.types and self.wide_logs else []
        for log in self.logs:
            if not {"type", "dwell"} <= set(log.roles):
                continue
            records = set(log.columns[log.roles["dwell"]].records)
            if "impression" in log.roles:
                named = records.intersection(log.columns[log.roles["impression"]].records)
                records = named or records
            types = log.columns[log.roles["type"]]
            counts = Counter(
                spec_name(str(value))
                for record, value in zip(types.records, types.values, strict=True)
                if record in records
            )
            found += [name for name, _ in counts.most_common(1) if name in self.types]
        return list(dict.fromkeys(found))
