"""Starts the workers of the service, and stops them when their requests are answered."""

import os
import signal
import sys
import tempfile

import uvicorn

from ranking.serve.settings import NAME, Settings

STOP_SECONDS = 30


def run(settings: Settings, host: str, port: int, workers: int) -> None:
    """Serve until a signal ends it; what was begun is answered first, and the exit code is 0."""
    signal.signal(signal.SIGTERM, _end)
    os.environ[NAME] = settings.model_dump_json()
    if settings.compiled:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker ranks on one core
    with tempfile.TemporaryDirectory(prefix="gemline-metrics-") as metrics:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
        uvicorn.run(
            "ranking.serve.app:create",
            factory=True,
            host=host,
            port=port,
            workers=workers,
            timeout_graceful_shutdown=STOP_SECONDS,
            access_log=False,
        )


def _end(*_: object) -> None:
    """What uvicorn hands on after it has stopped."""
    sys.exit(0)
