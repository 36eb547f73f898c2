"""`gemline bench serving`: how fast rankers answer, and whether live features are the tables'."""

from datetime import date
from typing import Annotated

import tyro
from pydantic import Field
from tqdm import tqdm

from benchmarks.result import Result
from etl.cli import LakeArgs

COLUMNS = ("what", "ours", "beside", "goal")


class ServingArgs(LakeArgs):
    """A lake with rankers that answer and online features, as `gemline run` leaves one."""

    surface: str = "feed"
    day: Annotated[date, tyro.conf.arg(help="the day of which requests are asked again")]
    requests: Annotated[int, Field(ge=1), tyro.conf.arg(help="to ask again")] = 10_000
    seconds: Annotated[float, Field(gt=0), tyro.conf.arg(help="of load on the service")] = 60.0
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="parts to take; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: ServingArgs) -> None:
    """One request, the service under load, and a replay of logged requests."""
    from benchmarks.serving import batch, counters, load, program, replay

    parts = {
        "program": program, "counters": counters, "batch": batch, "service": load,
        "replay": replay,
    }  # fmt: skip
    result = Result(f"Rankers of {args.lake} at work", COLUMNS)
    for name in (told := tqdm([n for n in parts if not args.only or n in args.only], unit="part")):
        told.set_description(name)
        parts[name].measure(args, result)
    result.show(args.as_json)
