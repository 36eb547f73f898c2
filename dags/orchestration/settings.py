"""Settings of the DAGs, read from environment variables GEMLINE_SPEC, GEMLINE_RAW and so on."""

import os
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path

from pydantic import Field, ValidationError

from dags.steps import PipelinePaths, split_flags
from etl.cli.runner import format_validation_error
from etl.errors import UserError
from etl.spec.base import StrictModel

ENV_PREFIX = "GEMLINE_"
MANUAL_SCHEDULE = "never"
ROOT = Path(__file__).parents[2]


class DagSettings(StrictModel):
    """Settings of the DAGs of one spec; field `wait_hours` is the variable GEMLINE_WAIT_HOURS.

    Attributes:
        spec: The data spec.
        raw: Folder or URL of the raw logs.
        lake: Folder or URL of the tables.
        first_day: The first day with logs.
        schedule: Cron expression, in the spec's time zone, by which a day is processed once it has
            ended; `never` if runs are triggered manually.
        refresh_schedule: Cron expression, in UTC, by which the current day's tables and the live
            rankers are refreshed with the logs until the full hour before; `never` by default.
        wait_hours: How long to wait for the logs of a day.
        deadline_hours: A run that takes longer raises an alert; 0 means no deadline.
        alerts: URL to which alerts are posted as JSON.
        gem: Further flags of `gemline train gem`.
        spark_jars: `--jars` of spark-submit, where the cluster lacks Delta.
        spark_properties: `--properties-file` of spark-submit.
        keep_days: How many days table versions and GEM checkpoints are kept; checkpoints at least
            until rankers of their day are trained.
        training_days: On how many days rankers and the baseline train, the latest ones.
    """

    spec: Path
    raw: str
    lake: str
    first_day: date
    schedule: str = "0 4 * * *"
    refresh_schedule: str = MANUAL_SCHEDULE
    wait_hours: float = Field(default=6, ge=0)
    deadline_hours: float = Field(default=20, ge=0)
    alerts: str | None = None
    gem: str = ""
    spark_jars: str | None = None
    spark_properties: Path | None = None
    keep_days: int = Field(default=30, ge=7)
    training_days: int = Field(default=30, ge=1)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "DagSettings | None":
        """The settings, or None where GEMLINE_SPEC is not set.

        Raises UserError where a variable is missing or invalid.
        """
        if f"{ENV_PREFIX}SPEC" not in environment:
            return None
        values = {name: environment.get(f"{ENV_PREFIX}{name.upper()}") for name in cls.model_fields}
        try:
            return cls.model_validate({name: value for name, value in values.items() if value})
        except ValidationError as error:
            raise UserError(
                f"environment variables {ENV_PREFIX}…: {format_validation_error(error)}"
            ) from None

    @property
    def paths(self) -> PipelinePaths:
        """The spec, raw logs and lake."""
        return PipelinePaths(self.spec, self.raw, self.lake)

    @property
    def gem_flags(self) -> tuple[str, ...]:
        """Further flags of `gemline train gem`. Raises UserError if a quotation mark has no end."""
        return split_flags(f"{ENV_PREFIX}GEM", self.gem)

    @property
    def arrival_timeout(self) -> timedelta:
        """How long to wait for the logs of a day."""
        return timedelta(hours=self.wait_hours)
