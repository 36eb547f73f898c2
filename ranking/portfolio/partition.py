"""Which pairs share a model: merges by affinity, accepted only without loss (Lattice, 2512.09200).

P pairs, W weights of the probe.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import nan
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F

from etl.array_types import Float64
from ranking.portfolio.groups import (
    Group,
    GroupDesign,
    GroupTrainer,
    GroupTrials,
    Pair,
    Portfolio,
    flops_per_example,
    format_group,
    surfaces_of,
)
from ranking.registry.promotion import MIN_POSITIVES
from ranking.student.config import StudentTrainConfig
from training.data.batch import Batch
from training.evaluation.predictions import (
    ConfidenceInterval,
    Predictions,
    has_enough_labels,
    paired_ne_difference,
)

PROBE_BATCHES = 8
TOO_FEW_LABELS = "too few labels"


@dataclass(frozen=True)
class Affinity:
    """How much two pairs have in common, each part between 0 and 1 (the cosine: -1 and 1).

    `users` and `items` are the Jaccard overlaps of the ids of their positives; `inputs` the cosine
    of the weights' gradients by input of the first layer; `gradients` the cosine of the gradients
    of all shared weights.
    """

    users: float
    items: float
    inputs: float
    gradients: float

    @property
    def score(self) -> float:
        """The mean of the parts."""
        return mean((self.users, self.items, self.inputs, self.gradients))


def pair_affinities(
    probe: GroupTrainer, batches: Iterable[Batch], pairs: Sequence[Pair]
) -> dict[frozenset[Pair], Affinity]:
    """The affinity of each two pairs, by a model that was trained on all of them."""
    profiles = {pair: _PairProfile.empty() for pair in pairs}
    codes = probe.student.input_builder.reader.lake.spec.surface_codes
    objectives = probe.student.input_builder.reader.features.objectives
    for number, batch in enumerate(batches):
        for pair, profile in profiles.items():
            mask = batch.label_mask[:, objectives.index(pair.objective)]
            mask = mask & (batch.surface == codes[pair.surface])
            labels = batch.labels[:, objectives.index(pair.objective)]
            profile.add_ids(batch, mask & (labels > 0))
            if number < PROBE_BATCHES:
                profile.add_gradient(probe, batch, mask, objectives.index(pair.objective))
    return {
        frozenset((a, b)): _affinity(profiles[a], profiles[b]) for a, b in combinations(pairs, 2)
    }


@dataclass
class _PairProfile:
    """What is compared: the users and items of a pair's positives, and its gradients."""

    users: set[int]
    items: set[int]
    inputs: Float64
    gradient: Float64

    @classmethod
    def empty(cls) -> "_PairProfile":
        return cls(set(), set(), np.zeros(1), np.zeros(1))

    def add_ids(self, batch: Batch, positives: torch.Tensor) -> None:
        self.users |= set(batch.user_hash[batch.request_index[positives]].tolist())
        self.items |= set(batch.item_index[positives].tolist())

    def add_gradient(
        self, probe: GroupTrainer, batch: Batch, mask: torch.Tensor, column: int
    ) -> None:
        """Add the gradient of the pair's loss on a batch, of the averaged student."""
        if not mask.any():
            return
        student = probe.averaged.student
        shared = [student.candidate_layer.weight, student.user_layer.weight]
        shared += [p for p in student.hidden.parameters() if p.dim() > 1]
        with torch.enable_grad():
            logits = probe.logits(batch)[mask, column]
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels[mask, column])
            gradients = torch.autograd.grad(loss, shared)
        first = torch.cat([g.norm(dim=0) for g in gradients[:2]]).double().numpy()
        flat = torch.cat([g.flatten() for g in gradients]).double().numpy()
        self.inputs, self.gradient = self.inputs + first, self.gradient + flat


def _affinity(a: _PairProfile, b: _PairProfile) -> Affinity:
    return Affinity(
        users=jaccard(a.users, b.users),
        items=jaccard(a.items, b.items),
        inputs=cosine(a.inputs, b.inputs),
        gradients=cosine(a.gradient, b.gradient),
    )


def jaccard(a: set[int], b: set[int]) -> float:
    """The share of common elements; 0 for empty sets."""
    return len(a & b) / len(a | b) if a | b else 0.0


def cosine(a: Float64, b: Float64) -> float:
    """The cosine of two vectors; 0 if one is zero."""
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if norm else 0.0


@dataclass(frozen=True)
class Comparison:
    """NE of pairs under a new design less that under earlier ones, on the same rows.

    `too_few_labels` are pairs without enough labels on these rows, which have no difference.
    """

    differences: Mapping[Pair, ConfidenceInterval]
    too_few_labels: tuple[Pair, ...] = ()

    @property
    def losers(self) -> list[Pair]:
        """The pairs that lose beyond noise."""
        return [pair for pair, difference in self.differences.items() if difference.low > 0]

    @property
    def mean(self) -> float:
        """The mean difference over pairs; NaN without one."""
        values = [difference.value for difference in self.differences.values()]
        return mean(values) if values else nan

    @property
    def worst(self) -> str:
        """The pair whose interval begins highest, with its difference in units of 1e-4."""
        if not self.differences:
            return TOO_FEW_LABELS
        pair = max(self.differences, key=lambda pair: self.differences[pair].low)
        return f"{pair} {self.differences[pair]}"

    def __str__(self) -> str:
        """The differences in units of 1e-4."""
        found = [f"{pair}: NE {difference}" for pair, difference in self.differences.items()]
        return "; ".join([*found, *(f"{pair}: {TOO_FEW_LABELS}" for pair in self.too_few_labels)])


@dataclass(frozen=True)
class Change:
    """A change of a portfolio that was tried: what it is, its evidence, and whether it was made."""

    text: str
    comparison: Comparison
    is_accepted: bool

    def __str__(self) -> str:
        """One line of the report."""
        losers = ", ".join(map(str, self.comparison.losers))
        verdict = "accepted" if self.is_accepted else f"rejected, loses beyond noise: {losers}"
        return f"{self.text}: {verdict} ({self.comparison})"


def compare(trials: GroupTrials, present: Portfolio, designs: Sequence[GroupDesign]) -> Comparison:
    """Compare designs with those that serve their pairs at present, and at first.

    Of both differences of a pair the one is reported that loses more, so that losses within noise
    do not add up over accepted changes.
    """
    earlier = [present, *([Portfolio(present.first_designs)] if present.first_designs else [])]
    differences = {}
    for design in designs:
        predicted = trials.validation(design)
        for pair in sorted(design.group):
            after = rows_of(trials, predicted, pair)
            found = [
                paired_ne_difference([after], [rows_of(trials, before, pair)], pair.objective)
                for before in (trials.validation(portfolio.of(pair)) for portfolio in earlier)
            ]
            differences[pair] = max(found, key=lambda difference: difference.low)
    return Comparison(differences)


def rows_of(trials: GroupTrials, predictions: Predictions, pair: Pair) -> Predictions:
    """The rows of a pair's surface."""
    code = trials.lake.spec.surface_codes[pair.surface]
    return predictions.filter(predictions.surface == code)


def pairs_with_few_labels(
    trials: GroupTrials, labels: Predictions, pairs: Iterable[Pair]
) -> tuple[Pair, ...]:
    """The pairs with fewer positive or negative labels than the promotion gate needs."""
    return tuple(
        pair
        for pair in pairs
        if not has_enough_labels(rows_of(trials, labels, pair), pair.objective, MIN_POSITIVES)
    )


def partition(
    trials: GroupTrials,
    pairs: Sequence[Pair],
    config: StudentTrainConfig,
    affinities: Mapping[frozenset[Pair], Affinity],
    report: Callable[[Change], None],
) -> Portfolio:
    """Merge the groups of a portfolio that begins with a model per pair, in the order of affinity.

    Merges that save FLOPs, those of groups with a common surface, come first. A merge is accepted
    if no member loses beyond noise.
    """
    portfolio = Portfolio(tuple(GroupDesign(frozenset((pair,)), config) for pair in pairs))
    rejected: set[frozenset[Group]] = set()
    while True:
        groups = [design.group for design in portfolio.designs]
        candidates = [
            frozenset(two) for two in combinations(groups, 2) if frozenset(two) not in rejected
        ]
        if not candidates:
            return portfolio
        best = max(candidates, key=lambda groups: merge_priority(groups, affinities))
        merged = GroupDesign(frozenset().union(*best), config)
        comparison = compare(trials, portfolio, [merged])
        text = " with ".join(sorted(map(format_group, best)))
        report(Change(f"merge {text}", comparison, not comparison.losers))
        if comparison.losers:
            rejected.add(best)
        else:
            portfolio = portfolio.replaced(best, merged)


def merge_priority(
    two: frozenset[Group], affinities: Mapping[frozenset[Pair], Affinity]
) -> tuple[int, float]:
    """Surfaces in common, whose rows are then scored once, then the mean affinity of members."""
    a, b = sorted(two, key=sorted)
    common = len(set(surfaces_of(a)) & set(surfaces_of(b)))
    return common, mean(affinities[frozenset((x, y))].score for x in a for y in b)


def daily_flops(trials: GroupTrials, portfolio: Portfolio) -> float:
    """Forward FLOPs to score the test rows once: each group scores those of its surfaces."""
    total = 0.0
    for design in portfolio.designs:
        trainer = trials.untrained(design)
        batch = next(iter(trials.batches_of(trainer, "test")), None)
        if batch is not None:
            total += flops_per_example(trainer, batch) * len(trials.test(design).impression_ids)
    return total
