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
    """Tell it."""
    log.error("%s", text)
    address = os.environ.get("GEMLINE_ALERTS")
    if address:
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(  # noqa: S310  # the address is the operator's own
            address, body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
