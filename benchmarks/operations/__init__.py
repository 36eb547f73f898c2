"""`gemline bench operations`: what it costs to run the line by day, and on many processes."""

from typing import Annotated

import tyro
from tqdm import tqdm

from benchmarks.result import Result
from etl.spec.base import Strict

COLUMNS = ("what", "ours", "beside", "ratio", "goal")


class OperationsBenchArgs(Strict):
    """Arguments of the benchmark."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="parts to take; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: OperationsBenchArgs) -> None:
    """Parsing DAGs, backfills, a warm start, time that went to learning, and 2D beside 1D."""
    from benchmarks.operations import backfill, balance, increment, parse, replicas, warm

    parts = {
        "parse": parse,
        "backfill": backfill,
        "warm": warm,
        "increment": increment,
        "replicas": replicas,
        "balance": balance,
    }
    result = Result("Running the line by day, and on many processes", COLUMNS)
    for name in (told := tqdm([n for n in parts if not args.only or n in args.only], unit="part")):
        told.set_description(name)
        parts[name].measure(result)
    result.show(args.as_json)
