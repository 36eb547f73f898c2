"""Steps of several rivals timed in turn, and what the machine could do at most."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode

Step = Callable[[], object]
SIDE = 1024


def cpu_seconds(rivals: Mapping[str, Step], rounds: int, each: int = 1) -> dict[str, float]:
    """Median seconds of this process's processor that a step takes, after one round to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(rounds + 1):
        for name, step in rivals.items():
            start = time.process_time()
            for _ in range(each):
                step()
            if number:
                taken[name].append((time.process_time() - start) / each)
    return {name: median(seconds) for name, seconds in taken.items()}


def multiply() -> Step:
    """A square matrix product in fp32, the machine's limit: `2 * SIDE**3` FLOPs."""
    a, b = torch.randn(2, SIDE, SIDE)
    return lambda: a @ b


def flops_of(step: Step) -> int:
    """FLOPs of a step's matrix products (2 a multiply-add), forward and backward."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())
