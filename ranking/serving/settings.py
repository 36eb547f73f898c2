"""Settings of a worker process, and the limits on what it accepts."""

import os
import time
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from etl.errors import UserError
from etl.event_time import parse_local_time
from etl.spec.base import StrictModel
from etl.spec.model import DataSpec
from etl.spec.units import MICROS

SETTINGS_VARIABLE = "GEMLINE_SERVE"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")

# A host name, all names below one (`*.example.com`), all names, or an IPv6 address.
HostPattern = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])$")]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]
arg = tyro.conf.arg


class ServiceLimits(StrictModel):
    """Limits on the concurrent load of a worker, and timeouts for clients."""

    max_connections: Annotated[
        PositiveInt, arg(help="open connections; further ones get a 503")
    ] = 256
    max_queued_candidates: Annotated[
        PositiveInt, arg(help="candidates of all queued requests; further requests get a 429")
    ] = 12_000
    max_body_bytes: Annotated[PositiveInt, arg(help="size of one request body")] = 4 << 20
    max_buffered_bytes: Annotated[
        PositiveInt, arg(help="size of all request bodies in memory; further ones get a 429")
    ] = 32 << 20
    receive_timeout_seconds: Annotated[
        PositiveSeconds, arg(help="time for the headers, and again for the body, before a 408")
    ] = 10.0
    queue_timeout_seconds: Annotated[
        PositiveSeconds, arg(help="time a request may wait in the queue before a 503")
    ] = 2.0


class Settings(StrictModel):
    """Settings of a worker process.

    Attributes:
        spec: The file of the data spec.
        lake: The URI of the lake.
        limits: What the worker accepts.
        allowed_hosts: Values that the Host header of a request may have.
        workers: The number of workers, which share the rate of a token.
        use_compiled: Use the rankers' compiled programs, where they have them.
        clock_offset_seconds: Added to the system clock, to serve old logs.
        status_folder: Where the worker writes its status, if set.
    """

    spec: Path
    lake: str
    limits: ServiceLimits = ServiceLimits()
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS
    workers: int = 1
    use_compiled: bool = False
    clock_offset_seconds: int = 0
    status_folder: Path | None = None

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read the settings that `gemline rank serve` passes to its workers.

        Raises:
            UserError: The variable is not set.
        """
        text = os.environ.get(SETTINGS_VARIABLE)
        if text is None:
            raise UserError(
                f"{SETTINGS_VARIABLE} is not set: start the service with `gemline rank serve`"
            )
        return cls.model_validate_json(text)

    def now_us(self) -> int:
        """The current time in µs, with the clock offset."""
        return int((time.time() + self.clock_offset_seconds) * MICROS["s"])


def clock_offset_seconds(spec: DataSpec, start_time: str) -> int:
    """Seconds from now to a time, in the spec's time zone unless it names an offset.

    Raises UserError if the text is not a time.
    """
    try:
        start = parse_local_time(spec, start_time)
    except ValueError:
        raise UserError(
            f"--start-time {start_time} is not a time: write it as 2026-01-11T12:00"
        ) from None
    return round(start - time.time())
