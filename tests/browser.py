"""A page in headless Chromium, for tests that click and read."""

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import connect

from tests.waiting import wait_for

START_SECONDS = 30
WAIT_SECONDS = 60
INTERVAL = 0.1  # seconds between two looks at the page


class BrowserPage:
    """One page, which evaluates JavaScript by the Chrome DevTools Protocol."""

    def __init__(self, url: str, profile: Path) -> None:
        """Open a page; `profile` is an empty folder."""
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command = ["chromium", *flags, f"--user-data-dir={profile}", url]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            active_port = profile / "DevToolsActivePort"
            wait_for(
                lambda: active_port.is_file() and active_port.read_text(), START_SECONDS, INTERVAL
            )
            port = active_port.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                (page,) = [one for one in json.load(answer) if one["type"] == "page"]
            self.socket = connect(page["webSocketDebuggerUrl"])
        except BaseException:
            self.process.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait()

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        parameters = {"expression": script, "returnByValue": True, "awaitPromise": True}
        message = {"id": 1, "method": "Runtime.evaluate", "params": parameters}
        self.socket.send(json.dumps(message))
        result = json.loads(self.socket.recv())["result"]
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until an expression is true."""
        wait_for(lambda: self.evaluate(script), WAIT_SECONDS, INTERVAL)
