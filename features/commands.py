"""The commands of this folder. Spark is imported when a Spark step is called."""

from datetime import date
from typing import Annotated

import tyro
from pydantic import Field

from etl.cli import DayArgs, LakeArgs, exclusive
from etl.commands import tell
from etl.errors import UserError


@exclusive("items")
def items(args: DayArgs) -> None:
    """Give an index to each item first seen in some days."""
    from etl.session import spark_session
    from features.items import index_items

    lake = args.open_lake()
    spark_session("items")
    tell("items", index_items(lake, args.span))


@exclusive("history")
def history(args: DayArgs) -> None:
    """Append some days' newly visible events to the packed histories."""
    from etl.session import spark_session
    from features.history.build import build_history

    lake = args.open_lake()
    spark_session("history")
    tell("history", build_history(lake, args.span))


@exclusive("examples")
def examples(args: DayArgs) -> None:
    """Make examples: pointers, attributes and counters as of each impression."""
    from etl.session import spark_session
    from features.examples import build_examples

    lake = args.open_lake()
    spark_session("examples")
    tell("examples", build_examples(lake, args.span))


class CompactArgs(LakeArgs):
    """Arguments of the compaction."""

    until: Annotated[date, tyro.conf.arg(help="the last day to compact")]


@exclusive("history")
def compact(args: CompactArgs) -> None:
    """Make one of all days of the histories up to one, without what is too old to be read."""
    from etl.session import spark_session
    from features.history.compact import compact as step

    lake = args.open_lake()
    spark_session("compact")
    tell("compact", step(lake, args.until))


class CheckArgs(LakeArgs):
    """Arguments of the check."""

    sample: Annotated[int, tyro.conf.arg(help="examples to recompute"), Field(ge=1)] = 20
    seed: Annotated[int, tyro.conf.arg(help="of the draw")] = 0


def check(args: CheckArgs) -> None:
    """Recompute some examples from the events by brute force, and print what differs."""
    from features.check import check as step

    checked = list(step(args.open_lake(), args.sample, args.seed))
    for impression, differences in checked:
        for what, stored, found in differences:
            print(f"{impression}: {what} is {stored}, by brute force {found}")
    different = sum(bool(differences) for _, differences in checked)
    print(f"{len(checked):,} examples recomputed, {different:,} differ")
    if different:
        raise UserError(
            "examples differ from the events: run `gemline features history` and `gemline features "
            "examples` for their days again"
        )


COMMANDS = {
    "features": {
        "items": items,
        "history": history,
        "examples": examples,
        "compact": compact,
        "check": check,
    }
}
