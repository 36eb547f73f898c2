"""The effect of positions is learned apart: served scores do not depend on them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec.load import load_spec
from features.schema import feature_schema
from ranking.registry.export import trace_programs
from ranking.registry.promotion import ranker_predictions
from ranking.registry.ranker import Ranker, load_ranker
from ranking.scoring.calibration import calibrate
from ranking.student.model import TrainedStudent
from ranking.student.position import MAX_POSITIONS, PositionBias
from tests.conftest import SPEC
from tests.ranking.conftest import batch_of
from tests.ranking.test_promote import SPLIT
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader


def random_bias(served_position: int, seed: int = 0) -> PositionBias:
    torch.manual_seed(seed)
    bias = PositionBias(served_position, num_surfaces=2, num_objectives=3)
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    return bias


@given(st.integers(0, 40), st.integers(0, 9))
def test_nothing_is_added_at_the_served_position_or_without_one(served: int, seed: int) -> None:
    bias = random_bias(served, seed)
    surfaces = torch.tensor([0, 1, 2, 1])
    positions = torch.tensor([float(served), float(served), float("nan"), -0.0 + served])
    assert not bias(positions, surfaces).any()
    last = torch.full((4,), float(MAX_POSITIONS - 1))
    assert torch.equal(bias(last + 100, surfaces), bias(last, surfaces))


def test_planted_effects_are_found_where_positions_do_not_depend_on_items() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 200_000
    positions = torch.randint(0, 5, (rows,), generator=generator)
    surfaces = torch.randint(1, 3, (rows,), generator=generator)
    relevance = torch.randn(rows, generator=generator) - 1
    planted = torch.tensor([[0.0, -0.1, -0.4, -0.5, -1.2], [0.0, -0.3, -0.6, -0.9, -1.0]])
    logits = relevance + planted[surfaces - 1, positions]
    labels = torch.bernoulli(torch.sigmoid(logits), generator=generator)
    bias = PositionBias(0, num_surfaces=2, num_objectives=1)
    optimizer = torch.optim.LBFGS(bias.parameters(), max_iter=50)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = relevance + bias(positions.float(), surfaces)[:, 0]
        value = F.binary_cross_entropy_with_logits(found, labels)
        torch.autograd.backward(value)
        return value

    optimizer.step(loss)
    effects = bias.effects()[1:, :5, 0].detach()
    torch.testing.assert_close(effects, planted, atol=0.07, rtol=0)


@pytest.fixture
def biased(student: TrainedStudent) -> Iterator[TrainedStudent]:
    """The student with random effects of positions."""
    bias = student.student.position_bias
    assert bias is not None
    torch.manual_seed(3)
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    yield student
    for parameter in bias.parameters():
        torch.nn.init.zeros_(parameter)


def at_position(batch: Batch, position: float, reader: ExampleReader) -> Batch:
    column = reader.features.numeric_columns.index("ctx_position")
    numeric = batch.row_numeric.clone()
    numeric[:, column] = position
    return replace(batch, row_numeric=numeric)


def test_logits_of_logged_impressions_add_the_effect_and_nothing_else_depends_on_it(
    biased: TrainedStudent, reader: ExampleReader
) -> None:
    batch = batch_of(reader, 40)
    served = biased.student.head(biased.hidden(batch))
    for position in (0.0, 3.0, float("nan")):
        moved = at_position(batch, position, reader)
        assert torch.equal(biased.student.head(biased.hidden(moved)), served)
        effects = biased.position_effects(moved)
        torch.testing.assert_close(biased.logits(moved), served + effects)
        assert bool(effects.any()) == (position == 3)


def ranker_with_effects(biased: TrainedStudent, folder: Path) -> Ranker:
    ranker = load_ranker(folder)
    bias = biased.student.position_bias
    assert bias is not None
    effects = bias.effects()[1 + ranker.feature_schema.surfaces.index("feed")].T.tolist()
    by_objective = dict(zip(ranker.objectives, map(tuple, effects), strict=True))
    manifest = ranker.manifest.model_copy(update={"position_effects": by_objective})
    return replace(ranker, manifest=manifest)


def test_a_ranker_serves_one_position_and_the_gate_evaluates_the_logged_ones(
    biased: TrainedStudent, reader: ExampleReader, folder: Path
) -> None:
    ranker, batch = ranker_with_effects(biased, folder), batch_of(reader, 40)
    names = ranker.objectives

    def scores(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        inputs = biased.input_builder(batch)
        user_state = ranker.user_state(inputs.requests)
        mask = inputs.candidate_index.mask
        served = ranker.probabilities(user_state, inputs.candidates)
        logged = ranker.probabilities_at_logged_positions(user_state, inputs.candidates)
        return served[mask], logged[mask]

    served, logged = scores(batch)
    np.testing.assert_array_equal(scores(at_position(batch, 5, reader))[0], served)
    with torch.no_grad():
        logits = biased.logits(batch).double().numpy()
    np.testing.assert_allclose(
        logged, calibrate(ranker.manifest.calibration, logits, names), atol=1e-5
    )
    evaluated = ranker_predictions(ranker, reader.lake, SPLIT).predictions
    row_of = {name: row for row, name in enumerate(evaluated.impression_ids)}
    window = LabelWindow.for_test(SPLIT, reader.lake.spec)
    for tested in reader.batches([SPLIT.test_first], window, 64, Shuffle(None)):
        rows = [row_of[name] for name in tested.impression_ids]
        np.testing.assert_allclose(evaluated.probabilities[rows], scores(tested)[1], atol=1e-5)


def test_the_exported_programs_do_not_read_positions(
    biased: TrainedStudent, reader: ExampleReader
) -> None:
    batch = batch_of(reader, 10)
    inputs = [biased.input_builder(at_position(batch, p, reader)) for p in (0.0, 7.0)]
    (_, first), (_, second) = (trace_programs(biased, example) for example in inputs)
    assert torch.equal(first.outputs["logits"], second.outputs["logits"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("position_bias: {attribute: position}", "", "known only after ranking"),
        ("position: {type: numeric}", "position: {type: numeric, transform: log}", "transform"),
        ("{attribute: position}", "{attribute: slot}", "not among the numeric context attributes"),
    ],
)
def test_a_position_that_models_would_take_for_known_is_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    text = SPEC.read_text()
    assert old in text
    path = tmp_path / "spec.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        load_spec(path)


def test_the_schema_names_the_position() -> None:
    feature = feature_schema(load_spec(SPEC)).position
    assert feature and (feature.column, feature.served_position) == ("ctx_position", 0)
