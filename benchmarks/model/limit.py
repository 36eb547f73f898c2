"""Steps of training, beside what the machine could do at most."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.clock import in_turn

Step = Callable[[], object]
SIDE = 1024


@dataclass(frozen=True)
class Speed:
    """Units a second, the `limit` that the machine's GEMM rate (FLOPs a second) sets to them."""

    each: float
    limit: float
    rate: float

    def row(self, what: str, unit: str, goal: float) -> tuple[str, ...]:
        """As a row of the table."""
        limit = f"{self.limit:,.0f} at {self.rate / 1e9:.0f} GFLOP/s"
        share = f"{self.each / self.limit:.2f}"
        return what, f"{self.each:,.0f} {unit}/s", limit, share, f">= {goal:,}"


def cpu_seconds(rivals: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of this process's processor, after one round to warm up."""
    in_turn(rivals, 1)
    return in_turn(rivals, rounds, time.process_time)


def speeds(steps: dict[str, Step], units: int, repeats: int = 1) -> dict[str, Speed]:
    """How fast steps of so many units are, each timed over some repeats, in turn with a product.

    A step's FLOPs are those of its matrix products, two a multiply-add, forward and backward.
    """
    a, b = torch.randn(2, SIDE, SIDE)

    def repeated(step: Step) -> Step:
        return lambda: [step() for _ in range(repeats)]

    rivals = {name: repeated(step) for name, step in (steps | {"limit": lambda: a @ b}).items()}
    seconds = {name: taken / repeats for name, taken in cpu_seconds(rivals, rounds=9).items()}
    rate = 2 * SIDE**3 / seconds["limit"]
    return {
        name: Speed(units / seconds[name], units * rate / flops_of(step), rate)
        for name, step in steps.items()
    }


def flops_of(step: Step) -> int:
    """FLOPs of a step."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())
