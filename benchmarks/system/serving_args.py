"""Arguments of `gemline bench serving`."""

from datetime import date
from typing import Annotated

import tyro
from pydantic import Field

from etl.cli.runner import LakeArgs


class ServingArgs(LakeArgs):
    """A lake with live rankers and an online feature store, as created by `gemline run`."""

    surface: str = "feed"
    day: Annotated[date, tyro.conf.arg(help="the day whose logged requests are replayed")]
    requests: Annotated[int, Field(ge=1), tyro.conf.arg(help="requests to replay")] = 10_000
    seconds: Annotated[float, Field(gt=0), tyro.conf.arg(help="seconds of load")] = 60.0
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="parts to run; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False
