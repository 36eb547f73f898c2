"""Shared by the tests of the pipeline and of its Airflow DAGs."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dags.orchestration import standalone
from dags.steps import PipelinePaths
from etl.spec import load_spec
from etl.tables.lake import Lake, create_table
from etl.tables.schemas import table_registry
from tests.conftest import FIRST


def environment(folder: Path, spec: Path, raw: Path, port: int = 8080) -> dict[str, str]:
    """The environment of an Airflow whose home and lake are below a folder."""
    paths = PipelinePaths(spec, str(raw), str(folder / "lake"))
    return standalone.airflow_environment(paths, folder / "airflow", port, FIRST) | {
        "GEMLINE_GEM": "--scale tiny",
        "GEMLINE_DEADLINE_HOURS": "0",  # DAG.test() can't read a deadline back
    }


@pytest.fixture
def posted_alerts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, str]]]:
    """The alerts that were posted to the URL of GEMLINE_ALERTS."""
    posted: list[dict[str, str]] = []

    class AlertHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), AlertHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GEMLINE_ALERTS", f"http://127.0.0.1:{server.server_port}")
        yield posted
        server.shutdown()


@pytest.fixture(scope="package")
def empty(tmp_path_factory: pytest.TempPathFactory, spec_path: Path) -> Lake:
    """A lake with all tables of the shared spec, without rows; tests only read it."""
    lake = Lake(str(tmp_path_factory.mktemp("empty")), load_spec(spec_path))
    for schema in table_registry(lake.spec).values():
        create_table(lake, schema)
    return lake
