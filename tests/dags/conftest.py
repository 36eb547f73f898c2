"""Shared by the tests of the line and of Airflow."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dags import standalone
from dags.line import Place
from tests.conftest import FIRST


def environment(folder: Path, spec: Path, raw: Path, port: int = 8080) -> dict[str, str]:
    """An Airflow of its own, with the DAGs of a lake in a folder."""
    place = Place(spec, str(raw), str(folder / "lake"))
    return standalone.environment(place, folder / "airflow", port, FIRST) | {
        "GEMLINE_GEM": "--scale tiny",
        "GEMLINE_DEADLINE_HOURS": "0",  # DAG.test() can't read a deadline back
    }


@pytest.fixture
def posted_alerts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What was posted to GEMLINE_ALERTS."""
    posted: list[object] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GEMLINE_ALERTS", f"http://127.0.0.1:{server.server_port}")
        yield posted
        server.shutdown()
