"""A proposal: which pairs share a ranker, which features it reads, and its sizes.

Decisions are made on validation rows; the proposal is then compared with a ranker per surface, and
with a model per pair of surface and objective, on the test days.
"""

from collections.abc import Callable
from dataclasses import dataclass

from etl.errors import UserError
from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from ranking.portfolio.feature_filter import filter_features, kept_share
from ranking.portfolio.groups import (
    GroupDesign,
    GroupTrials,
    Pair,
    Portfolio,
    format_group,
    pairs_of,
    per_surface,
)
from ranking.portfolio.partition import (
    Affinity,
    Change,
    Comparison,
    daily_flops,
    pair_affinities,
    partition,
    rows_of,
)
from ranking.portfolio.sizes import search_sizes
from ranking.student.config import StudentTrainConfig
from training.evaluation.feature_units import optional_units
from training.evaluation.predictions import paired_ne_difference

Print = Callable[[str], None]


@dataclass(frozen=True)
class Proposal:
    """A portfolio, its evidence, and its cost beside others'.

    FLOPs are those of scoring the test rows once. `test` compares the proposal with a ranker per
    surface on the test days.
    """

    portfolio: Portfolio
    changes: tuple[Change, ...]
    affinities: dict[frozenset[Pair], Affinity]
    flops: float
    flops_per_surface: float
    flops_per_pair: float
    kept_features: float
    test: Comparison

    @property
    def dropped(self) -> tuple[str, ...]:
        """The units of features that no ranker needs."""
        return self.portfolio.designs[0].dropped

    @property
    def saved(self) -> float:
        """The share of the FLOPs of a ranker per surface that the proposal saves."""
        return 1 - self.flops / self.flops_per_surface

    @property
    def saved_to_pairs(self) -> float:
        """The share of the FLOPs of a model per pair that the proposal saves."""
        return 1 - self.flops / self.flops_per_pair


def propose(lake: Lake, split: DaySplit, config: StudentTrainConfig, print_line: Print) -> Proposal:
    """Find a portfolio by merges of pairs, then by dropped features, then by smaller sizes.

    Raises UserError if the split has no calibration day.
    """
    if split.calibration is None:
        raise UserError("a portfolio is chosen on a calibration day: name one with --calibration")
    trials = GroupTrials(lake, split, optional_units(lake.spec))
    pairs = pairs_of(lake.spec)
    changes: list[Change] = []

    def report(change: Change) -> None:
        changes.append(change)
        print_line(str(change))

    affinities = affinities_of(trials, pairs, config)
    merged = partition(trials, pairs, config, affinities, report)
    filtered = filter_features(trials, merged, report)
    sized = search_sizes(trials, filtered, report)
    singles = Portfolio(tuple(GroupDesign(frozenset((pair,)), config) for pair in pairs))
    by_surface = Portfolio(tuple(GroupDesign(group, config) for group in per_surface(pairs)))
    return Proposal(
        portfolio=sized,
        changes=tuple(changes),
        affinities=affinities,
        flops=daily_flops(trials, sized),
        flops_per_surface=daily_flops(trials, by_surface),
        flops_per_pair=daily_flops(trials, singles),
        kept_features=kept_share(trials, sized),
        test=compare_on_test_days(trials, sized, by_surface, pairs),
    )


def affinities_of(
    trials: GroupTrials, pairs: list[Pair], config: StudentTrainConfig
) -> dict[frozenset[Pair], Affinity]:
    """Affinities by a probe that is trained on all pairs."""
    probe = trials.train(GroupDesign(frozenset(pairs), config))
    return pair_affinities(probe, trials.batches_of(probe, "validation"), pairs)


def compare_on_test_days(
    trials: GroupTrials, proposal: Portfolio, baseline: Portfolio, pairs: list[Pair]
) -> Comparison:
    """NE of the proposal less that of a baseline, by pair."""
    differences = {}
    for pair in pairs:
        after, before = (
            rows_of(trials, trials.test(portfolio.of(pair)), pair)
            for portfolio in (proposal, baseline)
        )
        differences[pair] = paired_ne_difference([after], [before], pair.objective)
    return Comparison(differences)


def proposal_lines(proposal: Proposal) -> list[str]:
    """What to merge, to drop and to resize, and what it is worth."""
    lines = []
    for design in proposal.portfolio.designs:
        sizes = design.config.model
        lines.append(
            f"one model for {format_group(design.group)}: hidden {sizes.hidden}, "
            f"encoded_events {sizes.encoded_events}, max_length {sizes.max_length}"
        )
    lines.append(f"leave out: {', '.join(proposal.dropped) or 'nothing'}")
    lines.append(
        f"FLOPs per test day: {proposal.flops:.3g}, a ranker per surface "
        f"{proposal.flops_per_surface:.3g}, a model per pair {proposal.flops_per_pair:.3g}"
    )
    lines.append(f"on the test days, less a ranker per surface: {proposal.test}")
    return lines
