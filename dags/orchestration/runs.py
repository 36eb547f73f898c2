"""The days, sources and table versions that one DAG run works on.

A run waits until the files of each daily source are complete, but at most GEMLINE_WAIT_HOURS. It
then continues without the incomplete sources if at least one event log is complete. Each ingest
records the files that it read. A later run that finds new or changed files of a day within the
spec's `allowed_lateness` reprocesses all days from that one on. A source that never arrives is
reported every day and does not block runs.

Alerts on failures and delays: written to the log, and posted to the URL of GEMLINE_ALERTS.
"""

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from datetime import date, timedelta
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

from pydantic import AliasChoices, ConfigDict, Field

from etl.errors import UserError
from etl.event_time import is_in_future
from etl.ingest.arrival import (
    day_file_states,
    has_arrived,
    ingested_file_states,
    required_daily_sources,
)
from etl.spec import DataSpec
from etl.spec.base import StrictModel
from etl.spec.units import date_range, parse_date_range
from etl.tables.day_order import first_unfinished_day


class PipelineRun(StrictModel):
    """What one run works on; stored as JSON in the asset events that trigger the next DAG.

    Events outlive releases: unknown fields are ignored, and renamed fields are also read by their
    former names.

    Attributes:
        first: First day whose tables are written.
        new_from: First day that no run has processed; GEM has not been trained on it.
        last: Last day.
        missing_sources: Sources without complete files, by day.
        tables: Metadata of each table that was written, as by `gemline etl table-info`: version,
            rows of these days, schema fingerprint.
    """

    model_config = ConfigDict(extra="ignore")

    first: date
    new_from: date = Field(validation_alias=AliasChoices("new_from", "new"))
    last: date
    missing_sources: dict[date, tuple[str, ...]] = Field(
        default_factory=dict, validation_alias=AliasChoices("missing_sources", "absent")
    )
    tables: dict[str, dict[str, int | str]] = Field(default_factory=dict)

    @property
    def day_range(self) -> str:
        """All days, as the value of `--days`."""
        return f"{self.first}:{self.last}"

    @property
    def new_day_range(self) -> str:
        """The days that GEM has not been trained on, as the value of `--days`."""
        return f"{self.new_from}:{self.last}"

    @property
    def missing_source_names(self) -> str:
        """Sources that are missing on a day, as the value of `--missing-sources`."""
        return ",".join(sorted({name for names in self.missing_sources.values() for name in names}))

    @property
    def pinned_versions(self) -> str:
        """The version to read each table at, as the value of `--pins`."""
        versions = (f"{name}: {table['version']}" for name, table in self.tables.items())
        return "{" + ", ".join(versions) + "}"


def run_from_asset_events(asset_events: Mapping[Any, Iterable[Any]]) -> PipelineRun | None:
    """The run that the latest events of all assets describe; None without events."""
    latest_events = [list(events)[-1] for events in asset_events.values()]
    if not latest_events:
        return None
    runs = [PipelineRun.model_validate(event.extra) for event in latest_events]
    tables = {name: table for run in runs for name, table in run.tables.items()}
    return runs[0].model_copy(update={"tables": tables})


def run_from_context(
    asset_events: Mapping[Any, Iterable[Any]], dag_run: Any, params: Mapping[str, Any]
) -> PipelineRun:
    """The run of a DAG run: from its asset events, else its partition key, else `params.days`.

    Raises ValueError where it has none of them.
    """
    run = run_from_asset_events(asset_events)
    if run:
        return run
    days = getattr(dag_run, "partition_key", None) or params.get("days")
    if not days:
        raise ValueError("this run has no day: trigger it with a partition key, or params.days")
    first, last = parse_date_range(days)
    return PipelineRun(first=first, new_from=first, last=last)


def plan_run(spec: DataSpec, raw: str, lake: str, run: PipelineRun) -> PipelineRun:
    """The run with its missing sources, and with earlier days whose tables must be built again.

    These are days whose files changed, and days that were ingested but not finished by a later
    step: it failed for good.

    Raises UserError where no event log of a new day is complete, or the last one is not over.
    """
    new_days = date_range(run.new_from, run.last)
    missing = {day: incomplete_sources(spec, raw, day) for day in new_days}
    _require_a_complete_log(spec, raw, missing)
    if is_in_future(spec.day_end(run.last)):
        raise UserError(
            f"{run.last} is not over, so that its labels would miss outcomes: run it tomorrow; the "
            f"DAG {spec.name}_refresh adds the current day"
        )
    day_before = run.new_from - timedelta(days=1)
    oldest = run.last - timedelta(days=spec.allowed_lateness_days)
    earlier_days = date_range(oldest, day_before)
    changed_days = [day for day in earlier_days if has_changed_files(spec, raw, lake, day)]
    first = min([run.new_from, *changed_days])
    unfinished = first_unfinished_day(spec, lake)
    if unfinished and unfinished < first and ingested_file_states(lake, unfinished) is not None:
        first = unfinished
    repeated_days = date_range(first, day_before)
    missing = {day: incomplete_sources(spec, raw, day) for day in repeated_days} | missing
    return run.model_copy(
        update={
            "first": first,
            "missing_sources": {day: names for day, names in missing.items() if names},
        }
    )


def incomplete_sources(spec: DataSpec, raw: str, day: date) -> tuple[str, ...]:
    """The daily sources whose files of a day are not complete."""
    return tuple(
        name for name in required_daily_sources(spec) if not has_arrived(spec, raw, name, day)
    )


def has_changed_files(spec: DataSpec, raw: str, lake: str, day: date) -> bool:
    """Whether a day's files of a complete source differ from those that the last ingest read."""
    ingested = ingested_file_states(lake, day)
    if ingested is None:
        return False
    current = day_file_states(spec, raw, day)
    changed = (name for name, files in current.items() if files != ingested.get(name, {}))
    return any(has_arrived(spec, raw, name, day) for name in changed)


def _require_a_complete_log(
    spec: DataSpec, raw: str, missing_sources: Mapping[date, Collection[str]]
) -> None:
    for day, names in missing_sources.items():
        if all(name in names for name in spec.log_sources):
            paths = ", ".join(spec.sources[name].location for name in spec.log_sources)
            raise UserError(
                f"no log of {day} is complete in {raw} (looked for {paths}): find out why it was "
                "not written, then run this day again"
            )


log = logging.getLogger(__name__)


def http_request(url: str, body: object = None, timeout: float = 30) -> bytes:
    """The response body of a GET, or of a POST of `body` as JSON; `timeout` is in seconds."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=timeout) as response:  # noqa: S310  # URLs come from settings
        content: bytes = response.read()
    return content


def on_task_failure(context: Mapping[str, Any]) -> None:
    """Airflow callback: a task has failed and is not retried."""
    task = context["ti"]
    send_alert(f"{task.dag_id} {task.run_id}: {task.task_id} failed: {context.get('exception')}")


async def on_deadline_missed(context: Mapping[str, Any], **_: Any) -> None:
    """Airflow callback: a DAG run takes longer than GEMLINE_DEADLINE_HOURS."""
    run = context.get("dag_run") or {}
    send_alert(f"{run.get('dag_id')} {run.get('dag_run_id')}: deadline missed")


def send_alert(text: str) -> None:
    """Log a text and post it; a failure to post it is logged, never raised."""
    log.error("%s", text)
    url = os.environ.get("GEMLINE_ALERTS")
    if url:
        try:
            http_request(url, {"text": text}, timeout=10)
        except (OSError, ValueError, HTTPException) as error:
            log.error("the alert could not be posted to GEMLINE_ALERTS: %s", error)


def send_run_alerts(spec_name: str, run: PipelineRun) -> None:
    """Send an alert for missing sources, and one for earlier days that are processed again."""
    if run.missing_sources:
        send_alert(
            f"{spec_name} {run.last}: {run.missing_source_names} not complete; the run continues "
            "without"
        )
    if run.first < run.new_from:
        send_alert(
            f"{spec_name} {run.last}: files of {run.first} are new or changed since they "
            f"were read, or a step of it failed; the tables of {run.day_range} are rebuilt"
        )
