"""Rivals timed in turn, so that a slow minute of the machine hits all of them."""

import time
from collections.abc import Callable, Mapping
from statistics import median


def in_turn(rivals: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after a round that warms up and does not count."""
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(rounds + 1):
        for name, run in rivals.items():
            start = time.perf_counter()
            run()
            if number:
                taken[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in taken.items()}


def cpu_seconds(run: Callable[[], object]) -> float:
    """Seconds of this process's processor that a call takes."""
    start = time.process_time()
    run()
    return time.process_time() - start
