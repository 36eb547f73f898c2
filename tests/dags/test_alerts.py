"""Alerts reach who listens; that nobody does stops no run."""

import socket
import threading

import pytest

from dags import alerts


def test_who_listens_hears(posted_alerts: list[object]) -> None:
    alerts.send("reels of 2026-01-02 did not come")
    assert posted_alerts == [{"text": "reels of 2026-01-02 did not come"}]


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
