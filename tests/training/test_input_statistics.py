"""Edges of numbers and base rates: of the first day, or of the day after an upgrade."""

import re
from collections.abc import Collection, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.system.warm_start import (
    add_attributes,
    add_counter,
    changed_spec,
    manifest_of,
    trained_gem,
)
from etl.spec import load_spec
from etl.spec.units import DAY, MICROS, DayRange
from etl.tables import arrow, atomic_io, label_schemas, schemas
from etl.tables.lake import Lake
from etl.tables.maintenance import upgrade_lake
from tests.conftest import FIRST, LAST
from tests.dags.test_upgrade import write_changed_spec
from training.config import TrainConfig
from training.data import input_statistics
from training.data.batch import InputStatistics
from training.distributed.process_group import process_group
from training.model.gem import Gem
from training.model.numeric import quantile_edges
from training.teacher.outputs import trained_objectives
from training.trainer import checkpoint
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.number_edges import fit_numbers_of_day
from training.trainer.resume import (
    first_day_statistics,
    label_window_of_day,
    start_new_objectives,
    starting_point,
)
from training.trainer.state import TrainState, build_train_state, latest_reader
from training.trainer.trainer import train_days
from training.trainer.upgrade import (
    TOLERANCE,
    carry_over,
    prediction_difference,
    upgrade_teacher,
    upgraded_manifest,
)

SECOND = FIRST + timedelta(days=1)
CONFIG = TrainConfig(scale="tiny", max_length=8, batch_rows=256)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group, opened after shared folders are built: building them opens their own."""
    with process_group():
        yield


def statistics_of(lake: Lake) -> InputStatistics:
    reader = latest_reader(lake, CONFIG)
    manifest, _ = starting_point(lake, reader, (FIRST, FIRST), CONFIG)
    statistics = first_day_statistics(lake, reader, manifest)
    assert statistics
    return statistics


def change_rows(lake: Lake, days: DayRange) -> None:
    """Double the counters of some days, and flip the labels of their impressions."""
    where = f"day >= '{days[0]}' AND day <= '{days[1]}'"
    selected = [days[0] + timedelta(days=n) for n in range((days[1] - days[0]).days + 1)]
    for schema in (schemas.examples(lake.spec), label_schemas.impressions(lake.spec)):
        rows = arrow.snapshot(lake, schema).read(day=selected)
        for name in rows.column_names:
            is_counter = name.startswith("cnt_") or "decayed" in name
            if is_counter:
                changed = pc.add(pc.multiply(rows[name], 2), 1)
            elif name.startswith("label_") and not name.startswith("label_mature"):
                changed = pc.subtract(1, rows[name])
            else:
                continue
            index = rows.column_names.index(name)
            field = rows.schema.field(index)
            rows = rows.set_column(index, field, pc.cast(changed, field.type))
        arrow.replace_rows(lake, schema, rows, where, {})


def equal(first: InputStatistics, second: InputStatistics) -> bool:
    pairs = zip(vars(first).values(), vars(second).values(), strict=True)
    return all(torch.equal(a.nan_to_num(-7), b.nan_to_num(-7)) for a, b in pairs)


def test_later_days_do_not_change_the_statistics_of_the_first(own: Lake, group: None) -> None:
    before = statistics_of(own)
    change_rows(own, (SECOND, FIRST + timedelta(days=3)))
    assert equal(before, statistics_of(own))
    change_rows(own, (FIRST, FIRST))
    after = statistics_of(own)
    assert not torch.equal(before.row_numeric, after.row_numeric)
    assert not torch.equal(before.base_rates, after.base_rates)


def test_a_model_starts_with_the_quantiles_and_base_rates_of_the_first_day(
    lake: Lake, group: None
) -> None:
    statistics = statistics_of(lake)
    reader = latest_reader(lake, CONFIG)
    manifest, _ = starting_point(lake, reader, (FIRST, FIRST), CONFIG)
    core = build_train_state(manifest, statistics=statistics).model.core
    values, edges = statistics.row_numeric, core.candidate_numeric.encoding.edges
    for feature, column in enumerate(values.unbind(1)):
        finite = column[column.isfinite()].numpy()
        if len(finite):
            assert edges[feature, 0] == finite.min() and edges[feature, -1] == finite.max()
            levels = np.linspace(0, 1, edges.shape[1])
            expected = np.unique(np.quantile(finite.astype(np.float64), levels).astype(np.float32))
            distinct = edges[feature].unique().numpy()
            np.testing.assert_allclose(distinct, expected, rtol=1e-6)
    count = len(reader.features.objectives)
    rates = torch.sigmoid(core.heads.out_bias[:count])
    torch.testing.assert_close(rates, statistics.base_rates)
    assert (statistics.base_rates > 0).all() and (statistics.base_rates < 1).all()


def test_edges_are_quantiles_of_a_bounded_number_of_rows_of_all_buckets(
    lake: Lake, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base rates are of all rows that were read: they need no memory."""
    every = statistics_of(lake)
    rows, users = len(every.row_numeric), len(every.user_numeric)
    monkeypatch.setattr(input_statistics, "SAMPLE_ROWS", rows - 1)
    bounded = statistics_of(lake)
    assert len(bounded.row_numeric) == rows - 1 and len(bounded.user_numeric) == min(
        users, rows - 1
    )
    assert torch.equal(bounded.base_rates, every.base_rates)


@given(st.integers(0, 5 * input_statistics.SAMPLE_ROWS))
def test_a_sample_of_rows_is_even(rows: int) -> None:
    sample = input_statistics.even_sample(np.arange(rows, dtype=np.float32)[:, None])[:, 0]
    assert len(sample) == min(rows, input_statistics.SAMPLE_ROWS)
    steps = np.diff(sample, append=rows)
    assert not rows or (sample[0] == 0 and steps.min() >= 1 and steps.max() - steps.min() <= 1)


def delay_labels(lake: Lake, objectives: Collection[str]) -> None:
    """Labels of some objectives become final a day later, as with a window of a day."""
    schema = label_schemas.impressions(lake.spec)
    rows = arrow.snapshot(lake, schema).read()
    for name in objectives:
        index = rows.schema.get_field_index(f"label_mature_ts_{name}")
        later = pc.add(rows.column(index), DAY * MICROS["s"]).cast(rows.schema.types[index])
        rows = rows.set_column(index, rows.schema.field(index), later)
    arrow.replace_rows(lake, schema, rows, "true", {})


def started(lake: Lake, days: DayRange, config: TrainConfig) -> TrainState:
    """The state before the first batch of a day."""
    reader = latest_reader(lake, config)
    manifest, path = starting_point(lake, reader, days, config)
    statistics = None if path else first_day_statistics(lake, reader, manifest)
    if statistics:
        manifest = manifest.with_base_rates(statistics.base_rates)
    state = build_train_state(manifest, statistics=statistics)
    if path:
        checkpoint.load_checkpoint(path, state)
    start_new_objectives(lake, reader, state)
    return state


def test_a_slow_objective_starts_from_its_rate_on_its_first_day(own: Lake, group: None) -> None:
    delay_labels(own, ["conversion"])
    column = list(own.spec.objectives).index("conversion")
    others = torch.arange(len(own.spec.objectives)) != column
    first = started(own, (FIRST, FIRST), CONFIG)
    assert set(first.manifest.base_rates) == set(own.spec.objectives) - {"conversion"}
    train_days(own, (FIRST, FIRST), CONFIG)
    trained = build_train_state(first.manifest)
    checkpoint.load_checkpoint(checkpoint.checkpoint_path(own.root, FIRST), trained)

    second = started(own, (SECOND, SECOND), CONFIG)
    rate = second.manifest.base_rates["conversion"]
    assert 0 < rate < 0.05
    assert first.manifest.base_rates.items() <= second.manifest.base_rates.items()
    for before, after in ((trained.model.core, second.model.core), (trained.ema, second.ema)):
        old, new = (m.get_parameter(bias_of(m)) for m in (before, after))
        assert torch.equal(new[: len(others)][others], old[: len(others)][others])
        torch.testing.assert_close(new[column].sigmoid(), torch.tensor(rate))

    joint = CONFIG.model_copy(update={"first_training": "joint"})
    atomic_io.remove_folder(checkpoint.checkpoint_path(own.root, FIRST))
    state = started(own, (FIRST, SECOND), joint)
    assert 0 < state.manifest.base_rates["conversion"] < 0.05


def rename_objectives(spec: dict[str, Any]) -> None:
    """Objectives of other names, which are others for GEM, though their labels are the same."""
    spec["objectives"] = {f"new_{name}": value for name, value in spec["objectives"].items()}
    goals = spec["auction"]["goal_objectives"]
    spec["auction"]["goal_objectives"] = {goal: f"new_{name}" for goal, name in goals.items()}
    spec["roi"]["objective"] = f"new_{spec['roi']['objective']}"


def test_objectives_start_from_their_rates_where_an_upgrade_replaces_all_of_them(
    own_gem_lake: Lake, spec_path: Path, tmp_path: Path, group: None
) -> None:
    """GEM then counts as trained on none of them, so that no logits of theirs are stored."""
    old = own_gem_lake
    rows = arrow.snapshot(old, label_schemas.impressions(old.spec)).read()
    new = load_spec(write_changed_spec(spec_path, tmp_path / "new.yaml", rename_objectives))
    assert not set(new.objectives) & set(old.spec.objectives)
    upgrade_lake(old.root, old.spec, new)
    lake, schema = Lake(old.root, new), label_schemas.impressions(new)
    names = "|".join(old.spec.objectives)
    renamed = [re.sub(f"_({names})$", r"_new_\1", column) for column in rows.column_names]
    rows = rows.rename_columns(renamed).select(list(schema.columns))
    arrow.replace_rows(lake, schema, rows, "true", {})

    (report,) = upgrade_teacher(lake)
    assert f"objective {', '.join(old.spec.objectives)}" in str(report)
    assert "no common objective" in str(report) and report.manifest.steps
    assert not trained_objectives(new, report.manifest)
    state = started(lake, (LAST, LAST), report.manifest.training)
    known = state.manifest.base_rates
    assert set(known) == set(new.objectives)
    rates = torch.tensor([known[name] for name in new.objectives])
    for model in (state.model.core, state.ema):
        bias = model.get_parameter(bias_of(model))[: len(rates)]
        torch.testing.assert_close(bias.sigmoid(), rates)


def item_edges(lake: Lake, day: date) -> Tensor:
    """Edges of the numbers of a candidate, of the GEM that was trained until a day."""
    path = checkpoint.checkpoint_path(lake.root, day)
    manifest = checkpoint.read_manifest(path, None)
    assert manifest and not manifest.unfitted_numbers
    state = build_train_state(manifest)
    checkpoint.load_weights(path, state)
    return state.model.core.candidate_numeric.encoding.edges


def test_edges_are_those_of_the_first_day_where_it_has_no_final_label(
    own: Lake, group: None
) -> None:
    """No objective is as fast as that; a later day changes no edge of a number that varies."""
    delay_labels(own, own.spec.objectives)
    statistics = statistics_of(own)
    assert len(statistics.row_numeric) > 500 and statistics.base_rates.isnan().all()
    assert statistics.auxiliary_means.isfinite().all()
    train_days(own, (FIRST, SECOND), CONFIG)
    edges = item_edges(own, FIRST)
    expected = quantile_edges(statistics.row_numeric, edges.shape[1] - 1)
    varies = expected[:, 0] < expected[:, -1]
    assert torch.equal(edges, expected) and varies.any()
    assert torch.equal(item_edges(own, SECOND)[varies], expected[varies])


def remove_surface(lake: Lake, name: str, day: date) -> None:
    """Remove the examples of a surface on a day."""
    schema, surface = schemas.examples(lake.spec), lake.spec.surface_codes[name]
    rows = arrow.snapshot(lake, schema).read(day=[day])
    others = rows.filter(pc.not_equal(rows["surface"], surface))
    assert 0 < len(others) < len(rows)
    arrow.replace_rows(lake, schema, others, f"day = '{day}'", {})


def test_edges_are_those_of_the_latest_day_with_rows_where_the_last_day_has_none(
    own: Lake, group: None
) -> None:
    """A surface may pause on the last day of a joint training, or after an upgrade."""
    remove_surface(own, "reels", SECOND)
    config = CONFIG.model_copy(update={"surface": "reels"})
    reader = latest_reader(own, config)
    manifest, _ = starting_point(own, reader, (FIRST, FIRST), config)
    statistics = first_day_statistics(own, reader, manifest)
    assert statistics
    upgraded = build_train_state(manifest.next_day(SECOND, 1).without_edges())
    fit_numbers_of_day(own, reader, upgraded)
    assert not upgraded.manifest.unfitted_numbers
    edges = upgraded.model.core.candidate_numeric.encoding.edges
    assert torch.equal(edges, quantile_edges(statistics.row_numeric, edges.shape[1] - 1))
    joint = config.model_copy(update={"first_training": "joint"})
    train_days(own, (FIRST, SECOND), joint)
    assert torch.equal(item_edges(own, SECOND), edges)


def test_edges_are_those_of_the_first_day_with_rows(own: Lake, group: None) -> None:
    """A surface may start after the first day."""
    remove_surface(own, "reels", FIRST)
    config = CONFIG.model_copy(update={"surface": "reels"})
    reader = latest_reader(own, config)
    manifest, _ = starting_point(own, reader, (SECOND, SECOND), config)
    statistics = first_day_statistics(own, reader, manifest)
    assert statistics and len(statistics.row_numeric)
    train_days(own, (FIRST, SECOND), config)
    edges = item_edges(own, SECOND)
    assert torch.equal(edges, quantile_edges(statistics.row_numeric, edges.shape[1] - 1))


def bias_of(model: torch.nn.Module) -> str:
    (name,) = (n for n, _ in model.named_parameters() if n.endswith("heads.out_bias"))
    return name


def random_statistics(columns: int, users: int) -> InputStatistics:
    generator = torch.Generator().manual_seed(3)
    rows = 5 + 4 * torch.randn(500, columns, generator=generator)
    of_users = 5 + 4 * torch.randn(500, users, generator=generator)
    return InputStatistics(rows, of_users, torch.zeros(0), torch.zeros(0))


def test_edges_of_numbers_that_an_upgrade_added_change_no_prediction(
    group: None, tmp_path: Path
) -> None:
    training = TrainConfig(
        scale="tiny", item_table_rows=256, sequence=next(iter(load_spec(SIMULATOR_SPEC).sequences))
    )
    old = trained_gem(manifest_of(load_spec(SIMULATOR_SPEC), training))
    spec = changed_spec(add_counter, add_attributes)
    new = upgraded_manifest(Lake(str(tmp_path), spec), old.manifest, 256)
    added = new.unfitted_numbers
    assert "user_income" in added and sum("2d" in name for name in added) > 2
    before = set(old.manifest.features.all_numeric_columns)
    assert set(new.features.all_numeric_columns) - before == set(added)
    upgraded, _ = carry_over(old, new)
    core = upgraded.model.core
    columns, users = new.features.numeric_columns, new.features.user.numeric
    statistics = random_statistics(len(columns), len(users))
    earlier = core.candidate_numeric.encoding.edges.clone()
    for model in (core, cast("Gem", upgraded.ema.module)):
        model.fit_numbers(statistics, added)
    edges = core.candidate_numeric.encoding.edges
    expected = quantile_edges(statistics.row_numeric, edges.shape[1] - 1)
    for number, name in enumerate(columns):
        assert torch.equal(edges[number], (expected if name in added else earlier)[number])
    assert prediction_difference(old, upgraded) <= TOLERANCE
    again = upgraded_manifest(Lake(str(tmp_path), spec), upgraded.manifest, 256)
    assert again.unfitted_numbers == added, "they are fitted by training alone"
    fitted = upgraded.manifest.model_copy(update={"unfitted_numbers": ()})
    assert not upgraded_manifest(Lake(str(tmp_path), spec), fitted, 256).unfitted_numbers


def test_the_next_day_of_training_sets_the_edges_of_added_numbers(
    own_gem_lake: Lake, group: None
) -> None:
    """Those of the day's rows; other numbers keep theirs, also on later days."""
    lake, path = own_gem_lake, checkpoint.checkpoint_path(own_gem_lake.root, FIRST)
    manifest = checkpoint.read_manifest(path, None)
    assert manifest
    columns = manifest.features.numeric_columns
    added = columns[-2:]
    state = build_train_state(manifest)
    checkpoint.load_checkpoint(path, state)
    trained_edges = state.model.core.candidate_numeric.encoding.edges.clone()
    state.manifest = manifest.model_copy(update={"unfitted_numbers": added})
    checkpointer = AsyncCheckpointer()
    checkpointer.save(path, state)
    checkpointer.wait()
    later = checkpoint.checkpoint_path(lake.root, SECOND)
    for day in (SECOND, FIRST + timedelta(days=2)):
        atomic_io.remove_folder(checkpoint.checkpoint_path(lake.root, day))
    reader = latest_reader(lake, manifest.training)
    start, _ = starting_point(lake, reader, (SECOND, SECOND), manifest.training)
    assert start.unfitted_numbers == added
    fresh = build_train_state(start.model_copy(update={"trained_until": SECOND}))
    fit_numbers_of_day(lake, reader, fresh)
    expected = fresh.model.core.candidate_numeric.encoding.edges

    train_days(lake, (SECOND, SECOND), manifest.training)
    new_manifest = checkpoint.read_manifest(later, None)
    assert new_manifest and new_manifest.unfitted_numbers == ()
    trained = build_train_state(new_manifest)
    checkpoint.load_weights(later, trained)
    edges = trained.model.core.candidate_numeric.encoding.edges
    varied = trained_edges[:-2, 0] < trained_edges[:-2, -1]
    assert torch.equal(edges[:-2][varied], trained_edges[:-2][varied]) and varied.any()
    assert torch.equal(edges[-2:], expected[-2:])
    assert not torch.equal(edges[-2:], trained_edges[-2:])


def test_edges_follow_counts_that_have_outgrown_them(
    own_gem_lake: Lake, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the second day's first batch, by its rows; the average has the same edges."""
    lake = own_gem_lake
    manifest = checkpoint.read_manifest(checkpoint.checkpoint_path(lake.root, FIRST), None)
    assert manifest
    state = build_train_state(manifest)
    checkpoint.load_checkpoint(checkpoint.checkpoint_path(lake.root, FIRST), state)
    training = manifest.training.model_copy(update={"update_edges": True})
    start = manifest.next_day(SECOND, 1).model_copy(update={"training": training})
    state.manifest = start.model_copy(update={"batches": 1})
    embedding, average = (
        model.candidate_numeric for model in (state.model.core, cast("Gem", state.ema.module))
    )
    first_edges = embedding.encoding.edges.clone()
    change_rows(lake, (SECOND, SECOND))
    reader = latest_reader(lake, manifest.training)
    monkeypatch.setattr("training.model.numeric.MIN_VALUES", 10)
    fit_numbers_of_day(lake, reader, state)
    varied = first_edges[:, 0] < first_edges[:, -1]
    kept = embedding.encoding.edges[varied]
    assert torch.equal(kept, first_edges[varied]), "within a day they are kept"
    state.manifest = start
    fit_numbers_of_day(lake, reader, state)
    statistics = input_statistics.input_statistics(
        reader, SECOND, label_window_of_day(lake, SECOND, start)
    )
    assert statistics
    expected = quantile_edges(statistics.row_numeric, first_edges.shape[1] - 1)
    moved = varied & (embedding.encoding.edges != first_edges).any(1)
    counts = [name.startswith("cnt_") for name in manifest.features.numeric_columns]
    assert moved[torch.tensor(counts)].float().mean() > 0.5
    assert torch.equal(embedding.encoding.edges[moved], expected[moved])
    assert torch.equal(average.encoding.edges, embedding.encoding.edges)
    moments = state.optimizer.state[embedding.piecewise]
    assert moments["exp_avg"][moved].eq(0).all() and moments["exp_avg"][~moved].ne(0).any()
    squares = moments["exp_avg_sq"][moved]
    assert squares.eq(squares[:, :1]).all() and squares.ne(0).any()
