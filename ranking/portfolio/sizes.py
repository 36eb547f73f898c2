"""Sizes of a portfolio's models: the search that Lattice calls Sketch (2512.09200).

Each round tries to halve one size of all models at a time, keeps the change that saves the most
FLOPs without a loss beyond noise for any pair, and goes on from there.
"""

from collections.abc import Callable
from dataclasses import replace

from ranking.portfolio.groups import GroupTrials, Portfolio
from ranking.portfolio.partition import Change, compare, daily_flops
from ranking.student.config import StudentConfig

# Sizes that are halved; widths of embeddings and events are GEM's, so that modules can be shared.
SIZES = ("hidden", "encoded_events", "max_length")
MIN_SIZE = 8


def halved(model: StudentConfig, size: str) -> StudentConfig | None:
    """The sizes with one of them halved; None if it is too small already."""
    value = getattr(model, size)
    smaller = tuple(width // 2 for width in value) if isinstance(value, tuple) else value // 2
    if min(smaller if isinstance(smaller, tuple) else (smaller,)) < MIN_SIZE:
        return None
    return model.model_copy(update={size: smaller})


def search_sizes(
    trials: GroupTrials, portfolio: Portfolio, report: Callable[[Change], None], rounds: int = 2
) -> Portfolio:
    """The portfolio with the smallest models that were found without a loss for any pair."""
    rejected: set[str] = set()
    for _ in range(rounds):
        best = None
        for size in SIZES:
            smaller = _with_halved(portfolio, size)
            if smaller is None or size in rejected:
                continue
            comparison = compare(trials, portfolio, smaller.designs)
            report(Change(f"halve {size}", comparison, not comparison.losers))
            if comparison.losers:
                rejected.add(size)
                continue
            flops = daily_flops(trials, smaller)
            if best is None or flops < best[0]:
                best = flops, smaller
        if best is None:
            return portfolio
        portfolio = best[1]
    return portfolio


def _with_halved(portfolio: Portfolio, size: str) -> Portfolio | None:
    """The portfolio with a size of all models halved; None if one is too small."""
    designs = []
    for design in portfolio.designs:
        model = halved(design.config.model, size)
        if model is None:
            return None
        config = design.config.model_copy(update={"model": model})
        designs.append(replace(design, config=config))
    return Portfolio(tuple(designs))
