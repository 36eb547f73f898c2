"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def wait_for(condition: Callable[[], ResultT], seconds: float, interval: float = 1) -> ResultT:
    """The first result of a condition that is true; fails after some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(interval)
    raise AssertionError(f"{condition} was not met within {seconds} s")
