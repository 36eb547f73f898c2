"""Sizes of a portfolio's models: the search that Lattice calls Sketch (2512.09200).

Each round tries smaller values of one size of all models at a time, keeps the change that saves the
most FLOPs without a loss beyond noise for any pair, and goes on from there.
"""

from collections.abc import Callable
from dataclasses import replace

from ranking.portfolio.groups import GroupTrials, Portfolio
from ranking.portfolio.partition import Change, compare, daily_flops
from ranking.student.config import StudentConfig

# Sizes that are reduced; widths of embeddings and events are GEM's, so that modules can be shared.
SIZES = ("hidden", "encoded_events", "max_length")
SHARES = (0.5, 0.75)  # of a size that are tried; the second only where the first loses
MIN_SIZE = 8


def reduced(model: StudentConfig, size: str, share: float) -> StudentConfig | None:
    """The sizes with one of them multiplied by a share; None if it becomes too small."""
    value = getattr(model, size)
    widths = value if isinstance(value, tuple) else (value,)
    smaller = tuple(int(share * width) for width in widths)
    if min(smaller) < MIN_SIZE:
        return None
    return model.model_copy(update={size: smaller if isinstance(value, tuple) else smaller[0]})


def search_sizes(
    trials: GroupTrials, portfolio: Portfolio, report: Callable[[Change], None], rounds: int = 3
) -> Portfolio:
    """The portfolio with the smallest models that were found without a loss for any pair."""
    finished: set[str] = set()  # sizes that lose with every share
    for _ in range(rounds):
        candidates = []
        for size in SIZES:
            if size in finished:
                continue
            smaller = _largest_reduction(trials, portfolio, size, report)
            if smaller is None:
                finished.add(size)
            else:
                candidates.append((daily_flops(trials, smaller), smaller))
        if not candidates:
            return portfolio
        _, portfolio = min(candidates, key=lambda candidate: candidate[0])
    return portfolio


def _largest_reduction(
    trials: GroupTrials, portfolio: Portfolio, size: str, report: Callable[[Change], None]
) -> Portfolio | None:
    """The portfolio with the smallest value of a size at which no pair loses; None without one."""
    for share in SHARES:
        smaller = _with_reduced(portfolio, size, share)
        if smaller is None:
            continue
        comparison = compare(trials, portfolio, smaller.designs)
        value = getattr(smaller.designs[0].config.model, size)
        report(Change(f"{size} {value}", comparison, not comparison.losers))
        if not comparison.losers:
            return smaller
    return None


def _with_reduced(portfolio: Portfolio, size: str, share: float) -> Portfolio | None:
    """The portfolio with a size of all models reduced; None if one is too small."""
    designs = []
    for design in portfolio.designs:
        model = reduced(design.config.model, size, share)
        if model is None:
            return None
        config = design.config.model_copy(update={"model": model})
        designs.append(replace(design, config=config))
    return portfolio.with_designs(tuple(designs))
