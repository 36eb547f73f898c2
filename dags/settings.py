"""Where the DAGs run, from the environment: GEMLINE_SPEC, GEMLINE_RAW and so on."""

import os
import shlex
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path

from pydantic import Field, ValidationError

from dags.line import Place
from etl.cli import reasons_of
from etl.errors import UserError
from etl.spec.base import Strict

PREFIX = "GEMLINE_"
NEVER = "never"
ROOT = Path(__file__).parents[1]


class Settings(Strict):
    """One line of data: each field is a variable, `spec` GEMLINE_SPEC.

    `first_day` is the first day with logs. `schedule` says when a day is begun that ended before
    (cron, in the spec's time zone; `never`: by hand). A day's logs are waited for so many hours;
    a run that takes longer than `deadline_hours` (0: as long as it likes) is told of to `alerts`,
    a URL that takes JSON. `gem` are further flags of the training of GEM; `spark_jars` and
    `spark_properties` what spark-submit is given, where the cluster does not have it. Table
    versions and GEMs of the last `keep_days` are kept.
    """

    spec: Path
    raw: str
    lake: str
    first_day: date
    schedule: str = "0 4 * * *"
    wait_hours: float = Field(default=6, ge=0)
    deadline_hours: float = Field(default=20, ge=0)
    alerts: str | None = None
    gem: str = ""
    spark_jars: str | None = None
    spark_properties: Path | None = None
    keep_days: int = Field(default=30, ge=7)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings | None":
        """The settings; None where no spec is named. Raises UserError where they are wrong."""
        if f"{PREFIX}SPEC" not in environment:
            return None
        named = {name: environment.get(f"{PREFIX}{name.upper()}") for name in cls.model_fields}
        try:
            return cls.model_validate({name: word for name, word in named.items() if word})
        except ValidationError as error:
            raise UserError(f"environment variables {PREFIX}…: {reasons_of(error)}") from None

    @property
    def place(self) -> Place:
        """Where the line runs."""
        return Place(self.spec, self.raw, self.lake)

    @property
    def gem_flags(self) -> tuple[str, ...]:
        """Further flags of the training of GEM."""
        return tuple(shlex.split(self.gem))

    @property
    def wait(self) -> timedelta:
        """How long a day's logs are waited for."""
        return timedelta(hours=self.wait_hours)
