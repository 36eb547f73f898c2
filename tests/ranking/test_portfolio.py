"""Portfolios: what groups learn, which merges and features are accepted, and the proposed spec."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.units import DaySplit
from etl.tables import arrow, label_schemas
from etl.tables.lake import Lake
from features.schema import feature_schema
from ranking.portfolio.feature_filter import (
    filter_features,
    kept_share,
    pareto_order,
    permutation_importances,
    select_within_budget,
)
from ranking.portfolio.groups import (
    Group,
    GroupDesign,
    GroupTrainer,
    GroupTrials,
    Pair,
    Portfolio,
    pair_mask,
    pairs_of,
    per_surface,
)
from ranking.portfolio.partition import (
    Affinity,
    Comparison,
    compare,
    cosine,
    daily_flops,
    jaccard,
    merge_priority,
)
from ranking.portfolio.proposal import compare_on_test_days, proposal_lines, propose
from ranking.portfolio.sizes import reduced
from ranking.registry.promotion import MIN_POSITIVES
from ranking.student.config import StudentTrainConfig
from ranking.student.trained import new_student
from tests.conftest import SPEC
from tests.ranking.conftest import SMALL, batch_of, other_inputs
from tests.small_pipeline import DAYS, FIRST
from tests.world import copy_of, link_tables
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.evaluation.feature_units import (
    FeatureUnit,
    correlated_units,
    drop_units,
    optional_units,
    spec_without,
    with_permuted_unit,
    without_units,
)
from training.evaluation.predictions import ConfidenceInterval, Predictions
from training.teacher.embeddings import TeacherEmbeddings

DROPPED = ["counters by item", "user.country"]
CONFIG = StudentTrainConfig(model=SMALL, batch_rows=64)
CLICK, BUY = Pair("feed", "click"), Pair("feed", "conversion")
OTHER = Pair("reels", "click")


@pytest.fixture(scope="module")
def spec() -> DataSpec:
    return load_spec(SPEC)


def test_the_units_that_may_be_dropped_are_those_that_nothing_else_needs(spec: DataSpec) -> None:
    units = optional_units(spec)
    assert {"user.country", "counters by user, category", "context.hour"} <= units.keys()
    needed = {"item.category", "item.advertiser_id", "item.goal", "context.position"}
    assert not needed & units.keys()  # similarity, auction, segments, effects of positions
    with pytest.raises(UserError, match=r"item\.category cannot be left out"):
        spec_without(spec, ["item.category"])


def test_a_spec_without_units_has_all_other_columns(spec: DataSpec) -> None:
    before, after = feature_schema(spec), feature_schema(spec_without(spec, DROPPED))
    gone = set(before.all_numeric_columns) - set(after.all_numeric_columns)
    units = optional_units(spec)
    expected = {before.numeric_columns[i] for i in units["counters by item"].row_numeric}
    assert gone == expected and gone
    assert set(before.user.categorical) - set(after.user.categorical) == {"user_country"}
    assert sum(units[name].num_columns for name in DROPPED) == len(gone) + 1


def test_a_proposed_spec_loads(spec: DataSpec, tmp_path: Path) -> None:
    content = yaml.safe_load(SPEC.read_text())
    path = tmp_path / "proposed.yaml"
    path.write_text(yaml.safe_dump(drop_units(content, DROPPED), sort_keys=False))
    assert feature_schema(load_spec(path)) == feature_schema(spec_without(spec, DROPPED))


WITHOUT_UNITS = """
name: clicks
surfaces: {feed: {}}
events: {shown: {role: impression}, click: {role: outcome}}
objectives: {click: {event: click, window: 1h}}
sequences: {behaviour: {max_length: 16}}
counters: {windows: [1d], events: [shown, click], keys: [[item]]}
rank_by: click
sources:
  log:
    kind: event_log
    format: json
    path: "{day}.json"
    columns: {event_id: id, user: user, item: item, surface: surface, event_time: at, type: type}
"""


def test_a_spec_without_optional_features_is_proposed_as_it_is(tmp_path: Path) -> None:
    """It has no attributes, and its only counter key cannot be left out."""
    path = tmp_path / "spec.yaml"
    path.write_text(WITHOUT_UNITS)
    spec = load_spec(path)
    trials = GroupTrials(Lake(str(tmp_path), spec), SPLIT, optional_units(spec))
    designs = (GroupDesign(frozenset((CLICK,)), CONFIG),)
    reports: list[object] = []
    filtered = filter_features(trials, Portfolio(designs), reports.append)
    assert filtered == Portfolio(designs) and not reports
    assert kept_share(trials, filtered) == 1
    proposed = drop_units(yaml.safe_load(WITHOUT_UNITS), filtered.designs[0].dropped)
    path.write_text(yaml.safe_dump(proposed, sort_keys=False))
    assert load_spec(path) == spec


def group_trainer(lake: Lake, design: GroupDesign) -> GroupTrainer:
    reader = ExampleReader.latest(lake, "behaviour", SMALL.max_length, ("feed",))
    torch.manual_seed(0)
    student = new_student(reader, SMALL, len(reader.items), TeacherEmbeddings.empty())
    return GroupTrainer(student, design, optional_units(lake.spec))


def test_a_group_learns_the_labels_of_its_own_pairs_alone(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(ExampleReader.latest(lake, "behaviour", SMALL.max_length, ("feed",)), 60)
    objectives = list(lake.spec.objectives)
    changed = batch.labels.clone()
    changed[:, objectives.index("conversion")] = 1 - changed[:, objectives.index("conversion")]
    weights = []
    for labels in (batch.labels, changed):
        trainer = group_trainer(lake, GroupDesign(frozenset((CLICK,)), CONFIG))
        own = replace(batch, labels=labels)
        monkeypatch.setattr(ExampleReader, "batches", lambda *_, own=own: iter([own]))
        trainer.train([FIRST], LabelWindow(0, 1))
        weights.append(trainer.student.student.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    mask = pair_mask(frozenset((CLICK, OTHER)), lake.spec, feature_schema(lake.spec))
    assert int(mask.sum()) == 2 and not mask[0].any()


SPLIT = DaySplit(
    train_first=FIRST, train_last=FIRST, calibration=None, test_first=DAYS[1],
    test_last=DAYS[1], data_until=DAYS[1],
)  # fmt: skip


def test_predictions_with_other_inputs_of_models_are_not_used_again(lake: Lake) -> None:
    design = GroupDesign(frozenset((CLICK,)), CONFIG)
    others = [lake.spec.model_copy(update=update) for update in other_inputs(lake.spec).values()]
    lakes = [lake, *(Lake(lake.root, spec) for spec in others)]
    paths = {str(GroupTrials(of, SPLIT, {}).predictions_path(design, "test")) for of in lakes}
    assert len(paths) == len(lakes) == 4


def test_a_proposal_without_a_calibration_day_is_refused_before_any_training(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupTrials, "train", lambda *_: pytest.fail("a group was trained"))
    with pytest.raises(UserError, match="name one with --calibration"):
        propose(lake, SPLIT, CONFIG, print)


FEW = SPLIT.model_copy(update={"calibration": FIRST})  # no label became final after the training


def never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of groups keep their initial weights."""
    monkeypatch.setattr(GroupTrials, "train", GroupTrials.untrained)


def predictions_of(lake: Lake, surface: str, users: int, positive_users: int) -> Predictions:
    """A row of each user, with the same probability; the first users have all labels."""
    objectives = tuple(lake.spec.objectives)
    shape = users, len(objectives)
    labels = np.zeros(shape, np.float32)
    labels[:positive_users] = 1
    return Predictions(
        objectives=objectives,
        impression_ids=np.arange(users).astype(str).astype(object),
        user_hashes=np.arange(users),
        surface=np.full(users, lake.spec.surface_codes[surface]),
        probabilities=np.full(shape, 0.2),
        labels=labels,
        label_mask=np.ones(shape, bool),
    )


def test_pairs_with_too_few_test_labels_are_named_and_the_others_compared(
    lake: Lake, tmp_path: Path
) -> None:
    trials = GroupTrials(link_tables(lake, tmp_path), FEW, {})
    designs = {pair: GroupDesign(frozenset((pair,)), CONFIG) for pair in (CLICK, OTHER)}
    for pair, positives in ((CLICK, MIN_POSITIVES), (OTHER, MIN_POSITIVES - 1)):
        found = predictions_of(lake, pair.surface, 200, positives)
        found.write(trials.predictions_path(designs[pair], "test"), FEW)
    portfolio = Portfolio(tuple(designs.values()))
    comparison = compare_on_test_days(trials, portfolio, portfolio, [CLICK, OTHER])
    assert set(comparison.differences) == {CLICK} and comparison.too_few_labels == (OTHER,)
    assert str(comparison) == "click on feed: NE +0 [+0, +0]; click on reels: too few labels"


def test_a_comparison_without_any_judged_pair_has_no_mean() -> None:
    comparison = Comparison({}, (CLICK,))
    assert np.isnan(comparison.mean) and comparison.worst == "too few labels"
    assert str(comparison) == "click on feed: too few labels" and not comparison.losers


def test_no_flops_are_counted_for_a_surface_without_test_rows(lake: Lake, tmp_path: Path) -> None:
    """A day after those of the logs: the examples have no row of it."""
    later = {"test_first": DAYS[1] + timedelta(days=30), "test_last": DAYS[1] + timedelta(days=30)}
    trials = GroupTrials(link_tables(lake, tmp_path), FEW.model_copy(update=later), {})
    assert daily_flops(trials, Portfolio((GroupDesign(frozenset((CLICK,)), CONFIG),))) == 0


def test_test_rows_of_a_surface_without_validation_rows_are_predicted(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_trained(monkeypatch)
    trials = GroupTrials(link_tables(lake, tmp_path), FEW, {})
    design = GroupDesign(frozenset((CLICK,)), CONFIG)
    predicted, labels = trials.test(design), trials.labels(design, "test")
    assert sorted(predicted.impression_ids) == sorted(labels.impression_ids)
    assert len(labels.impression_ids) and not len(trials.validation(design).impression_ids)


def test_importances_of_a_rare_objective_are_those_on_all_rows(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first batch alone, which has not enough labels, there would be none."""
    never_trained(monkeypatch)
    monkeypatch.setattr("ranking.portfolio.groups.PREDICT_ROWS", 16)
    split = SPLIT.model_copy(update={"calibration": DAYS[1]})
    units = {"context.hour": optional_units(lake.spec)["context.hour"]}
    trials = GroupTrials(link_tables(lake, tmp_path), split, units)
    design = GroupDesign(frozenset((CLICK,)), CONFIG)
    found = []
    for every in (10**6, 1):
        monkeypatch.setattr("ranking.portfolio.feature_filter.SAMPLE_EVERY", every)
        found.append(permutation_importances(trials, design))
    assert found[0] == found[1] and all(
        np.isfinite(v) for v in found[0][("context.hour",)].values()
    )


def test_a_portfolio_that_no_label_can_judge_is_refused_before_any_training(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupTrials, "train", lambda *_: pytest.fail("a group was trained"))
    with pytest.raises(UserError, match="no pair of surface and objective has 10 positive"):
        propose(lake, FEW, CONFIG, print)
    later = DAYS[1] + timedelta(days=30)
    split = FEW.model_copy(update={"test_first": later, "test_last": later})
    with pytest.raises(UserError, match=f"{later} to {later} have no final labels"):
        propose(lake, split, CONFIG, print)


def test_a_dropped_unit_is_not_read(lake: Lake) -> None:
    name = "counters by item"
    trainer = group_trainer(lake, GroupDesign(frozenset((CLICK,)), CONFIG, (name, "user.country")))
    batch = batch_of(trainer.student.input_builder.reader, 60)
    unit = optional_units(lake.spec)[name]
    permuted = with_permuted_unit(batch, unit, torch.Generator().manual_seed(1))
    assert not permuted.row_numeric.equal(batch.row_numeric)
    assert torch.equal(trainer.logits(batch), trainer.logits(permuted))
    reads_all = group_trainer(lake, GroupDesign(frozenset((CLICK,)), CONFIG))
    assert not torch.equal(reads_all.logits(batch), reads_all.logits(permuted))


def test_a_permutation_keeps_all_values_and_all_other_columns(lake: Lake) -> None:
    reader = ExampleReader.latest(lake, "behaviour", SMALL.max_length, ("feed",))
    batch = batch_of(reader, 60)
    units = optional_units(lake.spec)
    for unit in units.values():
        permuted = with_permuted_unit(batch, unit, torch.Generator().manual_seed(1))
        own = list(unit.row_numeric)
        rest = [i for i in range(batch.row_numeric.shape[1]) if i not in own]
        before, after = torch.nan_to_num(batch.row_numeric), torch.nan_to_num(permuted.row_numeric)
        assert torch.equal(before[:, rest], after[:, rest])
        assert torch.equal(before[:, own].sort(0).values, after[:, own].sort(0).values)
        missing = without_units(batch, [unit]).row_numeric
        assert missing[:, own].isnan().all()
        assert torch.equal(torch.nan_to_num(missing[:, rest]), before[:, rest])


matrices = arrays(
    np.float64, st.tuples(st.integers(1, 8), st.integers(1, 3)),
    elements=st.integers(-2, 4).map(float),
)  # fmt: skip


@given(matrices)
def test_no_unit_precedes_one_that_is_more_important_for_all_pairs(importances: np.ndarray) -> None:
    order = pareto_order(importances)
    assert sorted(order) == list(range(len(importances)))
    gains = np.maximum(importances, 0)
    for position, unit in enumerate(order):
        for later in order[position + 1 :]:
            dominates = (gains[later] >= gains[unit]).all() and (gains[later] > gains[unit]).any()
            assert not dominates, (unit, later)


def test_units_are_kept_in_order_as_long_as_they_fit() -> None:
    units = {
        name: FeatureUnit(name, row_numeric=tuple(range(size)))
        for name, size in (("a", 3), ("b", 4), ("c", 2), ("d", 1))
    }
    order = [("b",), ("a", "d"), ("c",)]
    assert select_within_budget(order, units, 10) == set("abcd")
    assert select_within_budget(order, units, 6) == {"b", "c"}  # a and d stay together
    assert select_within_budget(order, units, 0) == set()


def test_columns_that_repeat_others_are_permuted_with_them() -> None:
    numbers = torch.randn(500, 5, generator=torch.Generator().manual_seed(0))
    numbers[:, 2] = numbers[:, 0] + 0.1 * numbers[:, 2]
    numbers[:, 3] = -numbers[:, 1] + 0.1 * numbers[:, 3]
    units = {
        "first": FeatureUnit("first", row_numeric=(0, 1)),
        "copy": FeatureUnit("copy", row_numeric=(2, 3)),
        "own": FeatureUnit("own", row_numeric=(4,)),
        "ids": FeatureUnit("ids", row_categorical=("item_kind",)),
    }
    assert correlated_units(units, numbers) == [("copy", "first"), ("ids",), ("own",)]


def test_groups_that_share_a_surface_are_merged_first() -> None:
    affinities = {
        frozenset((a, b)): Affinity(score, score, score, score)
        for a, b, score in ((CLICK, BUY, 0.1), (CLICK, OTHER, 0.9), (BUY, OTHER, 0.2))
    }

    def priority(*two: Group) -> tuple[int, float]:
        return merge_priority(frozenset(two), affinities)

    click, buy, other = (frozenset((pair,)) for pair in (CLICK, BUY, OTHER))
    assert priority(click, buy) > priority(click, other) > priority(buy, other)
    assert jaccard({1, 2}, {2, 3}) == pytest.approx(1 / 3) and jaccard(set(), set()) == 0
    assert cosine(np.array([1.0, 0]), np.array([2.0, 0])) == pytest.approx(1)


def test_a_change_loses_where_an_interval_is_above_zero() -> None:
    differences = {
        CLICK: ConfidenceInterval(0.001, -0.001, 0.003),
        BUY: ConfidenceInterval(0.002, 0.0005, 0.004),
        OTHER: ConfidenceInterval(-0.002, -0.004, -0.001),
    }
    assert Comparison(differences).losers == [BUY]


def test_losses_within_noise_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Designs are compared with those at present, and with those that the search began with."""
    ne_by_length = {40: 0.8000, 30: 0.8010, 20: 0.8020}

    def difference(after: list[float], before: list[float], _: str) -> ConfidenceInterval:
        value = after[0] - before[0]
        return ConfidenceInterval(value, value - 0.0015, value + 0.0015)

    def design(length: int) -> GroupDesign:
        model = SMALL.model_copy(update={"max_length": length})
        return GroupDesign(frozenset((CLICK,)), CONFIG.model_copy(update={"model": model}))

    monkeypatch.setattr("ranking.portfolio.partition.rows_of", lambda _, found, __: found)
    monkeypatch.setattr("ranking.portfolio.partition.paired_ne_difference", difference)
    lengths = SimpleNamespace(validation=lambda found: ne_by_length[found.config.model.max_length])
    trials, first = cast(GroupTrials, lengths), Portfolio((design(40),))
    assert not compare(trials, first, [design(30)]).losers
    assert not compare(trials, Portfolio((design(30),)), [design(20)]).losers
    assert compare(trials, first.with_designs((design(30),)), [design(20)]).losers == [CLICK]


def test_a_portfolio_has_each_pair_once(spec: DataSpec) -> None:
    pairs = pairs_of(spec)
    assert len(pairs) == len(spec.ad_surfaces) * len(spec.objectives)
    portfolio = Portfolio(tuple(GroupDesign(group, CONFIG) for group in per_surface(pairs)))
    assert [portfolio.of(pair).group for pair in pairs].count(portfolio.designs[0].group) == 3
    a, b = (design.group for design in portfolio.designs[:2])
    merged = portfolio.replaced([a, b], GroupDesign(a | b, CONFIG))
    assert sorted(pair for design in merged.designs for pair in design.group) == sorted(pairs)


def test_sizes_are_reduced_until_they_are_too_small() -> None:
    model, tried = SMALL, 0
    while (smaller := reduced(model, "max_length", 0.5)) is not None:
        assert smaller.max_length == model.max_length // 2
        model, tried = smaller, tried + 1
    assert tried and model.max_length >= 8
    assert reduced(SMALL, "hidden", 0.5) is None  # (16, 8)
    wide = SMALL.model_copy(update={"hidden": (128, 64)})
    found = reduced(wide, "hidden", 0.75)
    assert found and found.hidden == (96, 48)


THREE_DAYS = SPLIT.model_copy(update={"calibration": FIRST + timedelta(days=1)})


@pytest.mark.proof
def test_a_proposal_serves_every_pair_and_resumes(small_lake: Lake, tmp_path: Path) -> None:
    lake = copy_of(small_lake, tmp_path / "lake")
    lines: list[str] = []
    proposal = propose(lake, THREE_DAYS, CONFIG, lines.append)
    pairs = sorted(pair for d in proposal.portfolio.designs for pair in d.group)
    assert pairs == sorted(pairs_of(lake.spec)) and len(lines) == len(proposal.changes) > 3
    # Merges that cost quality are refused, so it may cost more than a ranker per surface.
    assert proposal.flops <= proposal.flops_per_pair
    assert proposal.flops_per_surface <= proposal.flops_per_pair
    assert any("one model for" in line for line in proposal_lines(proposal))
    trained = set(Path(lake.root, "portfolio").iterdir())
    again = propose(lake, THREE_DAYS, CONFIG, lines.append)
    assert again.portfolio == proposal.portfolio
    assert set(Path(lake.root, "portfolio").iterdir()) == trained


@pytest.mark.proof
def test_a_pair_with_too_few_labels_is_named_and_keeps_a_model_of_its_own(
    small_lake: Lake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = copy_of(small_lake, tmp_path / "lake")
    schema, name = label_schemas.impressions(lake.spec), "label_long_view"
    rows = arrow.snapshot(lake, schema).read()
    column = rows.schema.get_field_index(name)
    negative = pc.if_else(pc.is_valid(rows[name]), pa.scalar(0, rows[name].type), rows[name])
    arrow.replace_rows(lake, schema, rows.set_column(column, name, negative), "true", {})
    proposal = propose(lake, THREE_DAYS, CONFIG, print)
    rare, judged = Pair("feed", "long_view"), proposal.portfolio.designs[0]
    assert proposal.portfolio.of(rare) == GroupDesign(frozenset((rare,)), CONFIG)
    assert judged.group == frozenset((CLICK,)) and proposal.changes
    assert {*proposal.affinities} == set() and set(proposal.test.differences) == {CLICK}
    assert proposal.too_few_labels == proposal.test.too_few_labels == (rare,)
    assert proposal.dropped == () and proposal.dropped_where_judged == judged.dropped
    assert "final between 2026-01-01 and 2026-01-02: long_view on feed" in caplog.text
    assert any(line.startswith("too few labels: long_view on") for line in proposal_lines(proposal))
