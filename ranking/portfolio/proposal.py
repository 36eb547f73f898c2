"""A proposal: which pairs share a ranker, which features it reads, and its sizes.

Decisions are made on validation rows; the proposal is then compared with a ranker per surface, and
with a model per pair of surface and objective, on the test days. A pair with too few labels to be
judged keeps a model of its own, with all features and sizes.
"""

import logging
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
    surfaces_of,
)
from ranking.portfolio.partition import (
    TOO_FEW_LABELS,
    Affinity,
    Change,
    Comparison,
    daily_flops,
    pair_affinities,
    pairs_with_few_labels,
    partition,
    rows_of,
)
from ranking.portfolio.sizes import search_sizes
from ranking.registry.promotion import MIN_POSITIVES
from ranking.student.config import StudentTrainConfig
from training.evaluation.feature_units import optional_units
from training.evaluation.predictions import paired_ne_difference

Print = Callable[[str], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """A portfolio, its evidence, and its cost beside others'.

    FLOPs are those of scoring the test rows once. `test` compares the proposal with a ranker per
    surface on the test days. Pairs that were not judged, for `too_few_labels`, have designs as they
    were.
    """

    portfolio: Portfolio
    changes: tuple[Change, ...]
    affinities: dict[frozenset[Pair], Affinity]
    flops: float
    flops_per_surface: float
    flops_per_pair: float
    kept_features: float
    test: Comparison
    too_few_labels: tuple[Pair, ...] = ()

    @property
    def dropped(self) -> tuple[str, ...]:
        """The units of features that no ranker reads."""
        return () if self.too_few_labels else self.dropped_where_judged

    @property
    def dropped_where_judged(self) -> tuple[str, ...]:
        """The units of features that no ranker of judged pairs reads."""
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

    Raises UserError if the split has no calibration day, no pair has enough labels on it, or the
    test days have no final labels.
    """
    if split.calibration is None:
        raise UserError("a portfolio is chosen on a calibration day: name one with --calibration")
    trials = GroupTrials(lake, split, optional_units(lake.spec))
    pairs = pairs_of(lake.spec)
    unjudged = find_unjudged_pairs(trials, pairs, config)
    judged = [pair for pair in pairs if pair not in unjudged]
    changes: list[Change] = []

    def report(change: Change) -> None:
        changes.append(change)
        print_line(str(change))

    affinities = affinities_of(trials, judged, config)
    merged = partition(trials, judged, config, affinities, report)
    filtered = filter_features(trials, merged, report)
    sized = search_sizes(trials, filtered, report)
    singles = Portfolio(tuple(GroupDesign(frozenset((pair,)), config) for pair in pairs))
    by_surface = Portfolio(tuple(GroupDesign(group, config) for group in per_surface(pairs)))
    proposed = Portfolio((*sized.designs, *map(singles.of, unjudged)))
    return Proposal(
        portfolio=proposed,
        changes=tuple(changes),
        affinities=affinities,
        flops=daily_flops(trials, proposed),
        flops_per_surface=daily_flops(trials, by_surface),
        flops_per_pair=daily_flops(trials, singles),
        kept_features=kept_share(trials, proposed),
        test=compare_on_test_days(trials, proposed, by_surface, pairs),
        too_few_labels=unjudged,
    )


def find_unjudged_pairs(
    trials: GroupTrials, pairs: list[Pair], config: StudentTrainConfig
) -> tuple[Pair, ...]:
    """The pairs with too few validation labels to judge a change, with a warning.

    Raises UserError if these are all pairs, or there are no test rows.
    """
    every, split = GroupDesign(frozenset(pairs), config), trials.split
    if not len(trials.labels(every, "test").impression_ids):
        raise UserError(
            f"{split.test_first} to {split.test_last} have no final labels of "
            f"{', '.join(surfaces_of(every.group))}: name other --test days, or a later "
            "--data-until"
        )
    unjudged = pairs_with_few_labels(trials, trials.labels(every, "validation"), pairs)
    needed = f"{MIN_POSITIVES} positive and {MIN_POSITIVES} negative labels that became final "
    needed += f"between {split.train_last} and {split.calibration}"
    if len(unjudged) == len(pairs):
        raise UserError(
            f"no pair of surface and objective has {needed}: name a later --calibration"
        )
    if unjudged:
        log.warning("not judged without %s: %s", needed, ", ".join(map(str, unjudged)))
    return unjudged


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
    differences, too_few_labels = {}, []
    for pair in pairs:
        after, before = (
            rows_of(trials, trials.test(portfolio.of(pair)), pair)
            for portfolio in (proposal, baseline)
        )
        if pairs_with_few_labels(trials, after, [pair]):
            too_few_labels.append(pair)
        else:
            differences[pair] = paired_ne_difference([after], [before], pair.objective)
    return Comparison(differences, tuple(too_few_labels))


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
    if proposal.too_few_labels:
        pairs, dropped = map(str, proposal.too_few_labels), proposal.dropped_where_judged
        line = f"{TOO_FEW_LABELS}: {', '.join(pairs)}; not merged, with all features and sizes"
        reason = f"; without these, one could leave out {', '.join(dropped)}"
        lines.append(line + reason * bool(dropped))
    lines.append(
        f"FLOPs per test day: {proposal.flops:.3g}, a ranker per surface "
        f"{proposal.flops_per_surface:.3g}, a model per pair {proposal.flops_per_pair:.3g}"
    )
    lines.append(f"on the test days, less a ranker per surface: {proposal.test}")
    return lines
