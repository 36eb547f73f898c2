"""What a worker of the service is given when it starts, and what it takes on at once."""

import os
import time
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.units import MICROS

NAME = "GEMLINE_SERVE"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
arg = tyro.conf.arg


class Limits(Strict):
    """What one worker takes on at once, and how long it waits for a client."""

    connections: Annotated[Count, arg(help="open at once; more get a 503")] = 256
    queued_candidates: Annotated[
        Count, arg(help="of requests that wait for their turn; more get a 429")
    ] = 12_000
    body_bytes: Annotated[Count, arg(help="of one request")] = 4 << 20
    buffered_bytes: Annotated[
        Count, arg(help="of all bodies that are in memory; more get a 429")
    ] = 32 << 20
    receive_seconds: Annotated[
        Seconds, arg(help="in which headers must arrive, and again the body, before a 408")
    ] = 10.0
    deadline_seconds: Annotated[
        Seconds, arg(help="that a request waits for its turn before a 503")
    ] = 2.0


class Settings(Strict):
    """Where a worker finds what it serves, what it takes on, and how its clock is shifted.

    `hosts` are the names that the Host header of a request may have. `workers` share the rate of a
    token. `shift` is in seconds. Where `compiled`, rankers answer with their native programs, if
    they have them. A worker writes its state into `status_folder` if there is one.
    """

    spec: Path
    lake: str
    limits: Limits = Limits()
    hosts: tuple[str, ...] = LOOPBACK_HOSTS
    workers: int = 1
    compiled: bool = False
    shift: int = 0
    status_folder: Path | None = None

    @classmethod
    def from_environment(cls) -> "Settings":
        """Those that `gemline rank serve` has set; raises UserError where there are none."""
        text = os.environ.get(NAME)
        if text is None:
            raise UserError(f"{NAME} is not set: start the service with `gemline rank serve`")
        return cls.model_validate_json(text)

    def now(self) -> int:
        """The time, in µs."""
        return int(time.time() * MICROS["s"]) + self.shift * MICROS["s"]
