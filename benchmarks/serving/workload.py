"""Arguments of `bench serving`, and requests drawn from a lake's users and items."""

from datetime import date
from typing import Annotated

import numpy as np
import tyro
from pydantic import Field

from etl.cli import LakeArgs
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from ranking.online.request import Asked


class ServingArgs(LakeArgs):
    """A lake with rankers that answer and online features, as `gemline run` leaves one."""

    surface: str = "feed"
    day: Annotated[date, tyro.conf.arg(help="the day whose logged requests are replayed")]
    requests: Annotated[int, Field(ge=1), tyro.conf.arg(help="to replay")] = 10_000
    seconds: Annotated[float, Field(gt=0), tyro.conf.arg(help="of load on the service")] = 60.0
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="parts to take; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def askers(lake: Lake, surface: str, day: date, candidates: int, n: int) -> list[Asked]:
    """`n` requests of users who were shown ads on a day, at its end, for so many ads of the lake.

    Each is drawn with replacement; the context is empty.
    """
    spec, rng = lake.spec, np.random.default_rng(0)
    shown = arrow.snapshot(lake, contracts.impressions(spec)).read(["user_id", "item_id"])
    users = shown["user_id"].unique().to_pylist()
    items = shown["item_id"].unique().to_pylist()
    as_of = spec.day_end(day)
    return [
        Asked(str(rng.choice(users)), surface, as_of, rng.choice(items, candidates).tolist(), {})
        for _ in range(n)
    ]
