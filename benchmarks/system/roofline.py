"""Throughput of training steps, compared with the machine's roofline."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import interleaved_median_seconds

StepFunction = Callable[[], object]
GEMM_SIZE = 1024


@dataclass(frozen=True)
class Speed:
    """Units per second, and their limit at the machine's GEMM rate."""

    units_per_second: float
    roofline: float
    gemm_flops_per_second: float

    def table_row(self, what: str, unit: str, goal: float) -> tuple[str, ...]:
        """The row of a benchmark's table."""
        limit = f"{self.roofline:,.0f} at {self.gemm_flops_per_second / 1e9:.0f} GFLOP/s"
        share = f"{self.units_per_second / self.roofline:.2f}"
        return what, f"{self.units_per_second:,.0f} {unit}/s", limit, share, f">= {goal:,}"


def cpu_seconds(variants: Mapping[str, StepFunction], rounds: int) -> dict[str, float]:
    """Median CPU seconds of this process, after one warm-up round."""
    interleaved_median_seconds(variants, 1)
    return interleaved_median_seconds(variants, rounds, time.process_time)


def measure_speeds(
    steps: dict[str, StepFunction], units: int, repeats: int = 1
) -> dict[str, Speed]:
    """Speeds of steps of `units` units each, timed in turn with a matrix product.

    FLOPs of a step are those of its matrix products, two per multiply-add, forward and backward.
    """
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE)

    def repeated(step: StepFunction) -> StepFunction:
        return lambda: [step() for _ in range(repeats)]

    variants = {name: repeated(step) for name, step in (steps | {"gemm": lambda: a @ b}).items()}
    total_seconds = cpu_seconds(variants, rounds=9)
    seconds = {name: total / repeats for name, total in total_seconds.items()}
    gemm_rate = 2 * GEMM_SIZE**3 / seconds["gemm"]
    return {
        name: Speed(units / seconds[name], units * gemm_rate / count_flops(step), gemm_rate)
        for name, step in steps.items()
    }


def count_flops(step: StepFunction) -> int:
    """FLOPs of the matrix products of a step."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())
