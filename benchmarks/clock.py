"""Rivals timed in turn, so that a slow minute of the machine hits all of them."""

import time
from collections.abc import Callable, Mapping
from statistics import median


def in_turn(
    rivals: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each; whoever asks has warmed them up, on less data where that is long.

    With `time.process_time` as the clock they are seconds of this process's processor.
    """
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            start = clock()
            run()
            taken[name].append(clock() - start)
    return {name: median(seconds) for name, seconds in taken.items()}
