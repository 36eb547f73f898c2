"""How much more than the mean the busiest of eight processes has to do in a step.

Requests of uneven users: rows of a request from 1 to 8, histories by a power law up to 2,048
events. Before: batches as they come. After: the costliest requests are dealt with the cheapest.
"""

import numpy as np
import numpy.typing as npt

from benchmarks.result import Result
from training.data.parts import Shuffle

PROCESSES, REQUESTS, ROWS, LONGEST = 8, 20_000, 128, 2048
Int64 = npt.NDArray[np.int64]


def measure(result: Result) -> None:
    """`load_balance_before`, `load_balance_after`: the busiest over the mean, mean of the steps."""
    before, after = zip(*(_loads(seed) for seed in range(PROCESSES)), strict=True)
    found = {"before": _busiest(before), "after": _busiest(after)}
    for when, ratio in found.items():
        result.take(f"load_balance_{when}", ratio, "")
    result.rows.append(
        ("busiest of 8 processes / mean", f"{found['after']:.3f}",
         f"{found['before']:.3f} as they come", "", "1"),
    )  # fmt: skip


def _loads(seed: int) -> tuple[Int64, Int64]:
    """What each batch of a process costs, before and after."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 9, REQUESTS)
    events = np.minimum(rng.pareto(0.7, REQUESTS) * 20, LONGEST).astype(np.int64)
    cost = rows + events
    dealt = Shuffle(0).parts(rows, events, ROWS, seed)
    come = np.array_split(Shuffle(0)(np.arange(REQUESTS), seed), len(dealt))
    before, after = (np.array([cost[part].sum() for part in parts]) for parts in (come, dealt))
    return before, after


def _busiest(loads: tuple[Int64, ...]) -> float:
    steps = min(map(len, loads))
    together = np.stack([of_process[:steps] for of_process in loads])
    return float((together.max(0) / together.mean(0)).mean())
