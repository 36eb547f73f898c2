"""Which features a portfolio needs: Pareto selection by permutation importance over all pairs.

U units (or groups of correlated ones), P pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean

import numpy as np
import torch

from etl.array_types import Float64
from ranking.portfolio.groups import (
    GroupDesign,
    GroupTrainer,
    GroupTrials,
    Pair,
    Portfolio,
    labels_of,
)
from ranking.portfolio.partition import Change, compare, pairs_with_few_labels, rows_of
from training.data.batch import Batch
from training.evaluation.feature_units import (
    FeatureUnit,
    UnitPermutation,
    correlated_units,
)
from training.evaluation.metrics import ne_by_objective
from training.evaluation.predictions import predict

UnitGroup = tuple[str, ...]
KEPT_SHARES = (0.3, 0.5, 0.7)  # budgets in columns, tried in order
SAMPLE_EVERY = 3  # batches of which one is used for importances


def permutation_importances(
    trials: GroupTrials, design: GroupDesign
) -> dict[UnitGroup, dict[Pair, float]]:
    """How much NE of each pair rises when the values of units are those of other examples.

    Correlated units are permuted together.
    """
    trainer = trials.train(design)
    batches = _sampled_batches(trials, trainer, design)
    numbers = torch.cat([batch.row_numeric for batch in batches])
    groups = correlated_units(trials.units, numbers)

    def ne_of(change: Callable[[Batch], Batch]) -> dict[Pair, float]:
        features = trainer.student.input_builder.reader.features
        changed = (change(batch) for batch in batches)
        predicted = predict(trainer.logits, changed, features.objectives)
        return {
            pair: ne_by_objective(rows_of(trials, predicted, pair))[pair.objective]
            for pair in design.group
        }

    base = ne_of(lambda batch: batch)
    importances = {}
    for group in groups:
        permuted = ne_of(UnitPermutation([trials.units[name] for name in group]))
        importances[group] = {pair: permuted[pair] - base[pair] for pair in design.group}
    return importances


def _sampled_batches(
    trials: GroupTrials, trainer: GroupTrainer, design: GroupDesign
) -> list[Batch]:
    """One of SAMPLE_EVERY validation batches, or all if a pair has too few labels in those."""
    batches = list(trials.batches_of(trainer, "validation"))
    sample = batches[::SAMPLE_EVERY]
    labels = labels_of(sample, trainer.student.input_builder.reader.features.objectives)
    return sample if not pairs_with_few_labels(trials, labels, design.group) else batches


def pareto_order(importances: Float64) -> list[int]:
    """Units (U) in the order of Pareto fronts of their importances (U, P), the best first.

    A unit is in a front if no unit of the same or a later one is at least as important for all
    pairs and more for one. Within a front, units are ordered by the sum of their shares of each
    pair's total importance.
    """
    gains = np.maximum(importances, 0)
    shares = (gains / np.maximum(gains.sum(0), 1e-12)).sum(1)
    remaining, order = list(range(len(importances))), []
    while remaining:
        front = [u for u in remaining if not _is_dominated(gains, u, remaining)]
        order += sorted(front, key=lambda unit: -shares[unit])
        remaining = [u for u in remaining if u not in front]
    return order


def _is_dominated(gains: Float64, unit: int, others: Sequence[int]) -> bool:
    rest = gains[list(others)]
    at_least = (rest >= gains[unit]).all(1)
    more = (rest > gains[unit]).any(1)
    return bool((at_least & more).any())


def select_within_budget(
    order: Sequence[UnitGroup], units: Mapping[str, FeatureUnit], budget: int
) -> set[str]:
    """Unit names in order, as long as their columns fit a budget; later ones that fit are taken."""
    kept: set[str] = set()
    for group in order:
        columns = sum(units[name].num_columns for name in group)
        if columns <= budget:
            budget -= columns
            kept |= set(group)
    return kept


def filter_features(
    trials: GroupTrials, portfolio: Portfolio, report: Callable[[Change], None]
) -> Portfolio:
    """The portfolio with the fewest columns of examples at which no pair loses beyond noise.

    Unchanged if pairs lose with each of the budgets, or if no feature is optional.
    """
    if not trials.units:
        return portfolio
    by_group: dict[UnitGroup, dict[Pair, float]] = {}
    for design in portfolio.designs:
        for group, found in permutation_importances(trials, design).items():
            by_group.setdefault(group, {}).update(found)
    order = importance_order(by_group)
    total = sum(unit.num_columns for unit in trials.units.values())
    for share in KEPT_SHARES:
        kept = select_within_budget(order, trials.units, int(share * total))
        dropped = tuple(sorted(set(trials.units) - kept))
        designs = tuple(replace(design, dropped=dropped) for design in portfolio.designs)
        comparison = compare(trials, portfolio, designs)
        names = ", ".join(dropped)
        text = f"{share:.0%} of {total} columns, without {names}"
        report(Change(text, comparison, not comparison.losers))
        if not comparison.losers:
            return portfolio.with_designs(designs)
    return portfolio


def importance_order(by_group: Mapping[UnitGroup, Mapping[Pair, float]]) -> list[UnitGroup]:
    """Groups of units by Pareto front of their importances, which some pairs may lack."""
    pairs = sorted({pair for found in by_group.values() for pair in found})
    groups = list(by_group)
    matrix = np.array([[by_group[group].get(pair, 0.0) for pair in pairs] for group in groups])
    return [groups[i] for i in pareto_order(matrix)]


def kept_share(trials: GroupTrials, portfolio: Portfolio) -> float:
    """The mean share of columns that the designs of a portfolio read; 1 if none is optional."""
    if not trials.units:
        return 1.0
    total = sum(unit.num_columns for unit in trials.units.values())
    dropped = [
        sum(trials.units[name].num_columns for name in design.dropped)
        for design in portfolio.designs
    ]
    return 1 - mean(dropped) / total
