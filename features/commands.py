"""`gemline features`: the item index, histories, examples, their statistics and validation.

Spark is imported only when a command runs that needs it.
"""

from collections.abc import Callable, Mapping
from datetime import date
from typing import Annotated

import tyro
from pydantic import Field

from etl.cli.runner import DayArgs, LakeArgs, holds_leases, print_counts
from etl.errors import UserError


@holds_leases("items")
def items(args: DayArgs) -> None:
    """Assign an index to each item first seen in the given days."""
    from etl.runtime.spark import spark_session
    from etl.tables.day_order import days_in_order
    from features.items import index_items

    lake = args.open_lake()
    with days_in_order(lake, "items", args.day_range):
        spark_session("items")
        print_counts("items", index_items(lake, args.day_range))


@holds_leases("history")
def history(args: DayArgs) -> None:
    """Append the given days' newly visible events to the packed histories."""
    from etl.runtime.spark import spark_session
    from etl.tables.day_order import days_in_order
    from features.history.build import build_history

    lake = args.open_lake()
    with days_in_order(lake, "history", args.day_range):
        spark_session("history")
        print_counts("history", build_history(lake, args.day_range))


@holds_leases("examples")
def examples(args: DayArgs) -> None:
    """Build examples: history pointers, attributes and counters as of each impression."""
    from etl.runtime.spark import spark_session
    from etl.tables.day_order import days_in_order
    from features.examples import build_examples

    lake = args.open_lake()
    with days_in_order(lake, "examples", args.day_range):
        spark_session("examples")
        print_counts("examples", build_examples(lake, args.day_range))


@holds_leases("feature_statistics")
def statistics(args: DayArgs) -> None:
    """Compute statistics of the features of the given days: missing values and histograms."""
    from etl.runtime.spark import spark_session
    from etl.tables.day_order import days_in_order
    from features.feature_statistics import build_statistics

    lake = args.open_lake()
    with days_in_order(lake, "feature_statistics", args.day_range):
        spark_session("statistics")
        print_counts("statistics", build_statistics(lake, args.day_range))


class DriftArgs(DayArgs):
    """Arguments of `features check-drift`."""

    rows: Annotated[int, tyro.conf.arg(help="number of features to print"), Field(ge=1)] = 20


def check_drift(args: DriftArgs) -> None:
    """Compare the features of each day with earlier days; exit 2 if one is null or constant.

    Days that were built without a single example have no features to compare.
    """
    from rich.console import Console

    from features.drift import drift_of_days, drift_table

    lake, (first, last) = args.open_lake(), args.day_range
    ingested, examples = lake.last_ingested_day(), lake.rows_by_day("examples")
    if ingested and last <= ingested and not any(first <= day <= last for day in examples):
        print(f"no examples of {first} to {last}: nothing to compare")
        return
    by_day = drift_of_days(lake, args.day_range)
    Console(width=160).print(drift_table(by_day[max(by_day)][: args.rows]))
    alarms = [(day, drift) for day, drifts in by_day.items() for drift in drifts if drift.alarm]
    for day, drift in alarms:
        print(f"ALARM: {day}: {drift.name}: {drift.alarm}")
    broken = [f"{day}: {drift.name} is {drift.alarm}" for day, drift in alarms if drift.is_broken]
    if broken:
        raise UserError(
            f"{'; '.join(broken[:5])}{' …' if len(broken) > 5 else ''}. Correct the logs of the "
            "day and run it again, or let the models learn from it and skip this check"
        )


class CompactArgs(LakeArgs):
    """Arguments of `features compact`."""

    until: Annotated[
        date | None, tyro.conf.arg(help="the last day to compact; by default as the spec says")
    ] = None
    keep_days: Annotated[
        int, tyro.conf.arg(help="without --until: how many of the latest days stay as they are")
    ] = Field(default=0, ge=0)


@holds_leases("history")
def compact(args: CompactArgs) -> None:
    """Compact all days of the histories up to one day and drop events past the spec's retention.

    Without `--until`, up to the latest day that can be compacted, if at least as many further days
    can be as the spec's `history.compact_every` says.
    """
    from etl.runtime.spark import spark_session
    from features.history.compact import compact_history, due_compaction

    lake = args.open_lake()
    if args.until is None and not lake.spec.history.compact_every:
        raise UserError("name the last day to compact, --until, or set history.compact_every")
    if args.until is not None and args.keep_days:
        raise UserError("--until already says which days stay as they are: leave out --keep-days")
    until = args.until or due_compaction(lake, args.keep_days)
    if until is None:
        print("compact: nothing is due")
        return
    spark_session("compact")
    print_counts("compact", compact_history(lake, until))


class CheckArgs(LakeArgs):
    """Arguments of `features check`."""

    sample: Annotated[int, tyro.conf.arg(help="examples to recompute"), Field(ge=1)] = 20
    seed: Annotated[int, tyro.conf.arg(help="seed of the sample")] = 0


def check(args: CheckArgs) -> None:
    """Recompute a sample of examples from the events by brute force and print differences."""
    from features.validation import validate_examples

    recomputed, different = 0, 0
    for impression, differences in validate_examples(args.open_lake(), args.sample, args.seed):
        recomputed += 1
        different += bool(differences)
        for what, stored, expected in differences:
            print(f"{impression}: {what} is {stored}, by brute force {expected}")
    print(f"{recomputed:,} examples recomputed, {different:,} differ")
    if different:
        raise UserError(
            "examples differ from the events: run `gemline features history` and `gemline features "
            "examples` for their days again"
        )


COMMANDS: dict[str, Mapping[str, Callable[..., object]]] = {
    "features": {
        "items": items,
        "history": history,
        "examples": examples,
        "statistics": statistics,
        "check-drift": check_drift,
        "compact": compact,
        "check": check,
    }
}
