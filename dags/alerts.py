"""Who is told when something is late, or failed: the log, and the URL of GEMLINE_ALERTS."""

import logging
import os
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from dags.rest import answer
from dags.runs import Run

log = logging.getLogger(__name__)


def failed(context: Mapping[str, Any]) -> None:
    """A task has failed for good."""
    task = context["ti"]
    send(f"{task.dag_id} {task.run_id}: {task.task_id} failed: {context.get('exception')}")


async def late(context: Mapping[str, Any], **_: Any) -> None:
    """A run takes longer than it may."""
    run = context.get("dag_run") or {}
    send(f"{run.get('dag_id')} {run.get('dag_run_id')}: not done in time")


def send(text: str) -> None:
    """Tell it; that nobody listens is told to the log alone, and stops nothing."""
    log.error("%s", text)
    address = os.environ.get("GEMLINE_ALERTS")
    if address:
        try:
            answer(address, {"text": text}, timeout=10)
        except (OSError, ValueError, HTTPException) as reason:
            log.error("GEMLINE_ALERTS does not take alerts: %s", reason)


def send_run_alerts(spec_name: str, run: Run) -> None:
    """Send an alert for sources that a run goes without, and one for earlier days read again."""
    if run.absent:
        send(f"{spec_name} {run.last}: {run.sources_absent} not complete; went without")
    if run.first < run.new:
        send(
            f"{spec_name} {run.last}: files of {run.first} are new or changed since they "
            f"were read; the tables of {run.days} are made again"
        )
