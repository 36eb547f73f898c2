"""Who is told when something is late, or failed: the log, and the URL of GEMLINE_ALERTS."""

import json
import logging
import os
import urllib.request
from collections.abc import Mapping
from typing import Any

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
            _post(address, {"text": text})
        except (OSError, ValueError) as reason:
            log.error("GEMLINE_ALERTS does not take alerts: %s", reason)


def _post(address: str, body: object) -> None:
    data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data, head)  # noqa: S310  # the operator's own
    urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
