"""Alerts are posted as JSON; a failure to post one does not fail the run."""

import socket
import threading
from datetime import date

import pytest

from dags.orchestration import runs
from dags.orchestration.runs import PipelineRun

TEXT = "reels of 2026-01-02 did not arrive"


def test_an_alert_is_posted_as_json(posted_alerts: list[dict[str, str]]) -> None:
    runs.send_alert(TEXT)
    assert posted_alerts == [{"text": TEXT}]


def test_a_run_without_a_source_or_with_changed_files_is_reported(
    posted_alerts: list[dict[str, str]],
) -> None:
    first, second = date(2026, 1, 1), date(2026, 1, 2)
    runs.send_run_alerts("shop", PipelineRun(first=second, new_from=second, last=second))
    assert not posted_alerts
    runs.send_run_alerts(
        "shop",
        PipelineRun(
            first=first, new_from=second, last=second, missing_sources={second: ("reels",)}
        ),
    )
    missing, changed = (alert["text"] for alert in posted_alerts)
    assert "shop 2026-01-02: reels not complete; the run continues without" in missing
    assert "files of 2026-01-01 are new or changed" in changed
    assert "tables of 2026-01-01:2026-01-02 are rebuilt" in changed


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/hook", "no URL"])
def test_an_alert_that_cannot_be_posted_is_logged(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEMLINE_ALERTS", url)
    runs.send_alert(TEXT)
    assert TEXT in caplog.text and "GEMLINE_ALERTS" in caplog.text


def test_a_response_that_is_not_http_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"no HTTP\r\n")

        threading.Thread(target=respond, daemon=True).start()
        monkeypatch.setenv("GEMLINE_ALERTS", f"http://127.0.0.1:{server.getsockname()[1]}")
        runs.send_alert(TEXT)
    assert "GEMLINE_ALERTS" in caplog.text
