"""What each day's records are like, measured before anything is written; and what is refused."""

from dataclasses import dataclass
from datetime import date

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.sources.canonical import SEPARATOR
from etl.spec.model import DataSpec
from etl.spec.units import each_day
from etl.tables import contracts


@dataclass(frozen=True)
class Counts:
    """Records by landing day: all, the good, reasons of the others; the good with a column."""

    read: dict[date | None, int]
    good: dict[date | None, int]
    having: dict[str, int]
    reasons: dict[date | None, dict[str, int]]


def measure(spec: DataSpec, records: DataFrame) -> Counts:
    """Count the parsed records by day."""
    good = F.col("reasons") == ""
    having = [F.count(F.when(good, F.col(n))).alias(n) for n in _optional_columns(spec)]
    wrong = F.explode(F.split("reasons", SEPARATOR)).alias("reason")
    rows = records.groupBy("day").agg(
        F.count("*").alias("read"),
        F.count_if(good).alias("good"),
        *having,
    ).collect()  # fmt: skip
    bad = records.filter(~good).select("day", wrong).groupBy("day", "reason").count().collect()
    return Counts(
        read={row["day"]: row["read"] for row in rows},
        good={row["day"]: row["good"] for row in rows},
        having={n: sum(row[n] for row in rows) for n in _optional_columns(spec)},
        reasons={
            row["day"]: {r["reason"]: r["count"] for r in bad if r["day"] == row["day"]}
            for row in rows
        },
    )


def refuse_bad_days(spec: DataSpec, counts: Counts, raw: str, days: tuple[date, date]) -> None:
    """Raises UserError where a day has no events, or too large a share of bad records."""
    empty = [day for day in each_day(*days) if not counts.good.get(day)]
    if empty:
        why = "; ".join(_told(counts.reasons[day]) for day in empty if counts.reasons.get(day))
        detail = f" (quarantined: {why})" if why else ""
        names = ", ".join(map(str, empty))
        raise UserError(f"no events of {names} in {raw}{detail}; check --days")
    for day, read in counts.read.items():
        bad = read - counts.good[day]
        if day and bad > spec.most_quarantined * read:
            raise UserError(
                f"{bad:,} of {read:,} records of {day} are bad ({_told(counts.reasons[day])}); "
                f"at most {spec.most_quarantined:.0%} may be: correct the spec or the log, or "
                "raise most_quarantined in the spec"
            )


def _told(reasons: dict[str, int]) -> str:
    most = sorted(reasons.items(), key=lambda item: -item[1])
    return "; ".join(f"{reason}: {count:,}" for reason, count in most)


def refuse_unused_columns(spec: DataSpec, counts: Counts, raw: str) -> None:
    """Raises UserError where the spec names a column that no good record has."""
    for name, column in _optional_columns(spec).items():
        if not counts.having[name]:
            raise UserError(
                f"the spec names column {column}, but no record of {raw} has it; "
                "correct the spec, or take the column out"
            )


def _optional_columns(spec: DataSpec) -> dict[str, str]:
    """Raw columns that impressions hold where a spec names them, by what they become.

    Dwell and value belong to some types of events only: a day may well have none of those.
    """
    found = {f"x_{n}": a.column or n for n, a in contracts.context_columns(spec).items()}
    for log in spec.logs.values():
        c = log.columns
        own = {"request_id": c.request, "position": c.position}
        own |= {"propensity": c.propensity, "named": c.impression}
        found |= {name: column for name, column in own.items() if column}
    return found
