"""Alerts on failures and delays: written to the log, and posted to the URL of GEMLINE_ALERTS."""

import json
import logging
import os
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

from dags.orchestration.runs import PipelineRun

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
            f"were read; the tables of {run.day_range} are rebuilt"
        )
