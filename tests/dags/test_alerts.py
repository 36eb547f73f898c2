"""Alerts reach who listens; that nobody does stops no run."""

import socket
import threading
from datetime import date

import pytest

from dags import alerts
from dags.runs import Run


def test_who_listens_hears(posted_alerts: list[object]) -> None:
    alerts.send("reels of 2026-01-02 did not come")
    assert posted_alerts == [{"text": "reels of 2026-01-02 did not come"}]


def test_a_run_without_a_source_or_with_changed_files_is_reported(
    posted_alerts: list[dict[str, str]],
) -> None:
    first, second = date(2026, 1, 1), date(2026, 1, 2)
    alerts.send_run_alerts("shop", Run(first=second, new=second, last=second))
    assert not posted_alerts
    alerts.send_run_alerts(
        "shop", Run(first=first, new=second, last=second, absent={second: ("reels",)})
    )
    without, changed = (alert["text"] for alert in posted_alerts)
    assert "shop 2026-01-02: reels not complete; went without" in without
    assert "files of 2026-01-01 are new or changed" in changed
    assert "tables of 2026-01-01:2026-01-02 are made again" in changed


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/hook", "no URL"])
def test_that_nobody_listens_stops_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEMLINE_ALERTS", address)
    alerts.send("reels of 2026-01-02 did not come")
    assert "did not come" in caplog.text and "GEMLINE_ALERTS" in caplog.text


def test_an_answer_that_is_none_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            caller, _ = server.accept()
            with caller:
                caller.recv(65536)
                caller.sendall(b"no HTTP\r\n")

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("GEMLINE_ALERTS", f"http://127.0.0.1:{server.getsockname()[1]}")
        alerts.send("reels of 2026-01-02 did not come")
    assert "GEMLINE_ALERTS" in caplog.text
