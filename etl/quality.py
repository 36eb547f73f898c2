"""What each day's records are like, measured before anything is written; and what is refused."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.parse import parse_log
from etl.sources.canonical import SEPARATOR
from etl.sources.storage import files_like
from etl.spec.model import DataSpec
from etl.spec.sources import EventLog, ImpressionLog
from etl.spec.units import each_day
from etl.tables import contracts

# Fewer records of a log or a surface are not enough to refuse it.
FEW = 100


@dataclass(frozen=True)
class Group:
    """Records of one log and one surface (None where it is unknown) that landed on one day.

    `impressions` are those of the good ones, `having` counts the good ones that hold each optional
    column, `reasons` tells what is wrong with the others.
    """

    day: date | None
    log: str
    surface: int | None
    read: int
    good: int
    impressions: int
    having: Mapping[str, int]
    reasons: Mapping[str, int]


def measure(spec: DataSpec, records: DataFrame) -> list[Group]:
    """Count parsed records by day, log and surface."""
    good, keys = F.col("reasons") == "", ("day", "log", "surface")
    columns = sorted({name for log in spec.logs.values() for name in optional_columns(spec, log)})
    having = [F.count(F.when(good, F.col(name))).alias(name) for name in columns]
    counts = records.groupBy(*keys).agg(
        F.count("*").alias("read"),
        F.count_if(good).alias("good"),
        F.count_if(good & (F.col("type") == spec.event_codes[spec.impression])).alias("shown"),
        *having,
    )
    reason = F.explode(F.split("reasons", SEPARATOR)).alias("reason")
    bad = records.filter(~good).select(*keys, reason).groupBy(*keys, "reason").count().collect()
    return [
        Group(
            row["day"],
            row["log"],
            row["surface"],
            row["read"],
            row["good"],
            row["shown"],
            {name: row[name] for name in columns},
            {r["reason"]: r["count"] for r in bad if all(r[key] == row[key] for key in keys)},
        )
        for row in counts.collect()
    ]


def read_by_day(groups: Iterable[Group]) -> dict[date | None, int]:
    """Records by landing day."""
    read = Counter[date | None]()
    for group in groups:
        read[group.day] += group.read
    return dict(read)


def refuse_bad_days(
    spec: DataSpec, groups: Iterable[Group], raw: str, days: tuple[date, date]
) -> None:
    """Raises UserError where a day has no events or too many bad records.

    Too many are more than `most_quarantined` of a day's records, of those of one log, or of those
    of one log and surface.
    """
    groups = list(groups)
    for day in each_day(*days):
        of_day = [group for group in groups if group.day == day]
        if not sum(group.good for group in of_day):
            why = _reasons(of_day)
            detail = f" (quarantined: {why})" if why else ""
            raise UserError(f"no events of {day} in {raw}{detail}; check --days")
        _refuse_bad(spec, of_day, f"of {day}")
        for log in sorted({group.log for group in of_day}):
            of_log = [group for group in of_day if group.log == log]
            _refuse_bad(spec, of_log, f"of log {log} of {day}", at_least=FEW)
            for surface, code in spec.surface_codes.items():
                part = [group for group in of_log if group.surface == code]
                where = f"of log {log} on surface {surface} of {day}"
                _refuse_bad(spec, part, where, at_least=FEW)


def _refuse_bad(spec: DataSpec, groups: list[Group], what: str, at_least: int = 0) -> None:
    read = sum(group.read for group in groups)
    bad = read - sum(group.good for group in groups)
    if read >= at_least and bad > spec.most_quarantined * read:
        raise UserError(
            f"{bad:,} of {read:,} records {what} are bad ({_reasons(groups)}); at most "
            f"{spec.most_quarantined:.0%} may be: correct the spec or the log, or raise "
            "most_quarantined in the spec"
        )


def _reasons(groups: Iterable[Group]) -> str:
    reasons = sum((Counter(group.reasons) for group in groups), Counter[str]())
    return "; ".join(f"{reason}: {count:,}" for reason, count in reasons.most_common())


def refuse_unused_columns(
    spec: DataSpec, groups: Iterable[Group], raw: str, days: tuple[date, date]
) -> None:
    """Raises UserError where the spec names a column that a log lacks, in its newest files, too.

    A log without records lacks nothing; one with few gets a warning. A column that the log has from
    a later day on is no fault of these days.
    """
    groups = list(groups)
    for name in spec.logs:
        unused = _unused(spec, name, groups)
        certain = {column for column, records in unused.items() if records >= FEW}
        if certain:
            certain &= _unused_in_newest(spec, name, raw, days)
        if certain:
            raise UserError(
                f"the spec names column {min(certain)}, but no record of log {name} in {raw} has "
                "it; correct the spec, or take the column out"
            )
        for column, records in unused.items():
            logging.warning("log %s: none of %d records has column %s", name, records, column)


def _unused(spec: DataSpec, name: str, groups: Iterable[Group]) -> dict[str, int]:
    """Raw columns of a log that none of its good records holds, and how many should."""
    of_log, unused = [group for group in groups if group.log == name], {}
    for column_name, column in optional_columns(spec, spec.logs[name]).items():
        any_type = column_name == "named"
        records = sum(group.good if any_type else group.impressions for group in of_log)
        if records and not any(group.having[column_name] for group in of_log):
            unused[column] = records
    return unused


def _unused_in_newest(spec: DataSpec, name: str, raw: str, days: tuple[date, date]) -> set[str]:
    """Raw columns that the newest files of a log lack, too; all where these have been read."""
    log = spec.logs[name]
    every = set(optional_columns(spec, log).values())
    if "{day}" not in log.path:
        return every
    root = raw if "://" in raw else str(Path(raw).absolute())
    pattern = re.compile(re.escape(log.path.split("{day}")[0]) + r"(\d{4}-\d\d-\d\d)")
    files = files_like(f"{root.rstrip('/')}/{log.path.replace('{day}', '*')}")
    found = (pattern.search(file.path) for file in files)
    newest = max((date.fromisoformat(match[1]) for match in found if match), default=days[1])
    if newest <= days[1]:
        return every
    return set(_unused(spec, name, measure(spec, parse_log(spec, name, raw, (newest, newest)))))


def optional_columns(spec: DataSpec, log: EventLog | ImpressionLog) -> dict[str, str]:
    """Raw columns that records of a log hold where the spec names them, by what they become.

    Only impressions hold most of them; any type of event may name its impression. Dwell and value
    belong to some types of events: a day may well have none of those.
    """
    c = log.columns
    found = {f"x_{n}": a.column or n for n, a in contracts.context_columns(spec).items()}
    own = {"request_id": c.request, "position": c.position}
    own |= {"propensity": c.propensity, "named": c.impression}
    return found | {name: column for name, column in own.items() if column}
