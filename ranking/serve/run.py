"""Starts the workers of the service, and stops them when their requests are answered."""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvicorn

from ranking.serve.health import health_server
from ranking.serve.protocol import LimitedProtocol
from ranking.serve.settings import NAME, Settings

log = logging.getLogger("uvicorn.error")
# How uvicorn serves, in all workers.
OPTIONS: dict[str, Any] = {
    "http": LimitedProtocol,
    "ws": "none",
    "access_log": False,
    "server_header": False,
    "timeout_graceful_shutdown": 30,
}


def run(settings: Settings, host: str, port: int, health: tuple[str, int]) -> None:
    """Serve until a signal ends it; what was begun is answered first, and the exit code is 0.

    `/health` of all workers is answered on `health`, a host and a port.
    """
    signal.signal(signal.SIGTERM, _end)
    if settings.compiled:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker ranks on one core
    with tempfile.TemporaryDirectory(prefix="gemline-serve-") as folder:
        metrics, status = (Path(folder, name) for name in ("metrics", "status"))
        for made in (metrics, status):
            made.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        settings = settings.model_copy(update={"status_folder": status})
        os.environ[NAME] = settings.model_dump_json()
        with health_server(*health, status) as health_port:
            log.warning("Health on http://%s:%d/health", health[0], health_port)
            uvicorn.run(
                "ranking.serve.app:create",
                factory=True,
                host=host,
                port=port,
                workers=settings.workers,
                **OPTIONS,
            )


def _end(*_: object) -> None:
    """What uvicorn hands on after it has stopped."""
    sys.exit(0)
