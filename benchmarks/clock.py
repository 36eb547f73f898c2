"""Rivals timed in turn, so that a slow minute of the machine hits all of them."""

import time
from collections.abc import Callable, Mapping
from statistics import median


def in_turn(rivals: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each; whoever asks has warmed them up, on less data where that is long."""
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in taken.items()}


def cpu_seconds(run: Callable[[], object]) -> float:
    """Seconds of this process's processor that a call takes."""
    start = time.process_time()
    run()
    return time.process_time() - start
