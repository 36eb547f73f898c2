"""What a worker of the service is told when it starts."""

import os
import time
from pathlib import Path

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.units import MICROS

NAME = "GEMLINE_SERVE"


class Settings(Strict):
    """Where a worker finds what it serves, how much it takes on, and how its clock is shifted.

    `most_waiting` requests wait for a worker, of at most `most_bytes` each; `shift` is in seconds.
    Where `compiled`, rankers answer with their native programs, if they have them.
    """

    spec: Path
    lake: str
    most_waiting: int
    most_bytes: int
    compiled: bool = False
    shift: int = 0

    @classmethod
    def told(cls) -> "Settings":
        """Those of the environment; raises UserError where there are none."""
        text = os.environ.get(NAME)
        if text is None:
            raise UserError(f"{NAME} is not set: start the service with `gemline rank serve`")
        return cls.model_validate_json(text)

    def now(self) -> int:
        """The time, in µs."""
        return int(time.time() * MICROS["s"]) + self.shift * MICROS["s"]
