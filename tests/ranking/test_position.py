"""The effect of positions is learned apart: served scores do not depend on them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec.load import load_spec
from features.schema import feature_schema
from ranking.registry.programs import exportable_programs
from ranking.registry.promotion import ranker_predictions
from ranking.registry.ranker import ExportedRanker, load_ranker
from ranking.scoring.calibration import calibrate
from ranking.student.config import DistillationConfig, StudentTrainConfig
from ranking.student.position import (
    MAX_POSITIONS,
    LearnedPositionBias,
    PositionBias,
    SwapPositionBias,
)
from ranking.student.trained import TrainedStudent
from ranking.trainer.student_trainer import StudentTrainer
from tests.conftest import SPEC
from tests.ranking.conftest import SMALL, batch_of, untrained_student
from tests.ranking.test_promote import SPLIT
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.partition import neighbour_swap_weights
from training.data.reader import ExampleReader

KINDS = st.sampled_from((LearnedPositionBias, SwapPositionBias))
BiasKind = type[LearnedPositionBias] | type[SwapPositionBias]


def random_bias(kind: BiasKind, served_position: int, seed: int = 0) -> PositionBias:
    torch.manual_seed(seed)
    bias = kind(served_position, num_surfaces=2, num_objectives=3)
    for tensor in (*bias.parameters(), *bias.buffers()):
        torch.nn.init.normal_(tensor)
    return bias


@given(KINDS, st.integers(0, 40), st.integers(0, 9))
def test_nothing_is_added_at_the_served_position_or_without_one(
    kind: BiasKind, served: int, seed: int
) -> None:
    bias = random_bias(kind, served, seed)
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
    bias = LearnedPositionBias(0, num_surfaces=2, num_objectives=1)
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


@dataclass(frozen=True)
class LoggedRankings:
    """Rankings of a policy that draws better ads first, and sees more than the model does.

    All have a row per impression; `served` is what the model knows of its logit.
    """

    positions: torch.Tensor
    swap_weights: torch.Tensor
    served: torch.Tensor
    labels: torch.Tensor

    @property
    def surface(self) -> torch.Tensor:
        return torch.ones(len(self.labels)).long()

    @property
    def label_mask(self) -> torch.Tensor:
        return torch.ones(len(self.labels), 1)

    def rows(self, rows: torch.Tensor) -> "LoggedRankings":
        return LoggedRankings(
            self.positions[rows], self.swap_weights[rows], self.served[rows], self.labels[rows]
        )


STEP = -0.3


def confounded_rankings(requests: int, seed: int) -> LoggedRankings:
    rng = np.random.default_rng(seed)
    ads, slots = 6, 4
    known, hidden = rng.normal(-1, 0.7, (requests, ads)), rng.normal(0, 0.7, (requests, ads))
    weights = np.exp(1.2 * (known + hidden))
    order = np.argsort(-np.log(weights) - rng.gumbel(size=weights.shape), 1)[:, :slots]
    in_order = np.take_along_axis(weights, order, 1)
    left = weights.sum(1, keepdims=True) - np.cumsum(in_order, 1) + in_order
    impressions = pa.table(
        {
            "position": np.tile(np.arange(slots), requests),
            "propensity": (in_order / left).flatten(),
        }
    )
    keys = pa.array(np.repeat(np.arange(requests), slots).astype(str))
    z = np.take_along_axis(known + hidden, order, 1) + STEP * np.arange(slots)
    labels = rng.random(z.shape) < 1 / (1 + np.exp(-z))
    return LoggedRankings(
        torch.from_numpy(impressions["position"].to_numpy()).float(),
        torch.from_numpy(neighbour_swap_weights(keys, impressions)),
        torch.from_numpy(np.take_along_axis(known, order, 1).reshape(-1, 1)).float(),
        torch.from_numpy(labels.reshape(-1, 1)).float(),
    )


def effects_from(log: LoggedRankings, swap_weights: torch.Tensor) -> torch.Tensor:
    """Effects of the first positions, learned in batches."""
    bias = SwapPositionBias(0, num_surfaces=1, num_objectives=1)
    log = replace(log, swap_weights=swap_weights)
    for rows in torch.arange(len(log.labels)).split(512):
        part = log.rows(rows)
        bias.update(part.positions, part, part.served)
    return bias.effects()[1, :4, 0]


def test_swaps_find_effects_that_a_policy_that_knows_more_would_hide() -> None:
    log = confounded_rankings(60_000, 0)
    truth = STEP * torch.arange(4)
    found = effects_from(log, log.swap_weights)
    torch.testing.assert_close(found, truth, atol=0.06, rtol=0)
    naive = effects_from(log, (log.swap_weights > 0).float())
    assert (naive[1:] < truth[1:] - 0.1).all()  # relevance is taken for an effect of positions


def test_both_orders_of_neighbours_are_equally_likely_under_the_weights() -> None:
    """All draws of three ads of four, with their exact probabilities."""
    q = np.array([0.5, 0.25, 0.15, 0.1])
    weighted: dict[tuple[int, tuple[int, ...], tuple[int, ...]], float] = {}
    for ads in permutations(range(4), 3):
        left = 1 - np.concatenate(([0], np.cumsum(q[list(ads)])[:-1]))
        p = q[list(ads)] / left
        impressions = pa.table({"position": [2, 0, 1], "propensity": p[[2, 0, 1]]})
        weights = neighbour_swap_weights(pa.array(["r"] * 3), impressions)[[1, 2, 0]]
        assert (weights[:-1, 0] == weights[1:, 1]).all()
        assert weights[0, 1] == weights[2, 0] == 0
        for k in (0, 1):
            before, pair = ads[:k], ads[k : k + 2]
            key = (k, before, pair)
            weighted[key] = weighted.get(key, 0) + p.prod() * weights[k, 0]
    for (k, before, (a, b)), value in weighted.items():
        assert value == pytest.approx(weighted[k, before, (b, a)])


def test_pairs_need_a_neighbour_a_position_and_a_propensity() -> None:
    impressions = pa.table(
        {"position": [0, 1, 3, None, 0, 1], "propensity": [0.2, 0.3, 0.4, 0.5, None, 0.6]}
    )
    weights = neighbour_swap_weights(pa.array(["a"] * 4 + ["b"] * 2), impressions)
    np.testing.assert_allclose(weights[:, 0], [0.8, 0, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(weights[:, 1], [0, 0.8, 0, 0, 0, 0], atol=1e-6)


def test_training_batches_have_the_weights_of_complete_requests(reader: ExampleReader) -> None:
    spec, day = reader.lake.spec, reader.days()[0]
    window = LabelWindow(0, spec.day_end(reader.days()[-1]), includes_swaps=True)
    column = reader.features.numeric_columns.index("ctx_position")
    paired = rows = 0
    for batch in reader.batches([day], window, 64, Shuffle(0)):
        position, request = batch.row_numeric[:, column].numpy(), batch.request_index.numpy()
        upper, lower = batch.swap_weights.numpy().T
        slots = {(r, p): i for i, (r, p) in enumerate(zip(request, position, strict=True))}
        for (r, p), i in slots.items():
            below = slots.get((r, p + 1))
            assert (upper[i] > 0) == (below is not None)
            assert below is None or lower[below] == upper[i] < 1
        paired, rows = paired + int((upper > 0).sum()), rows + len(batch)
    assert 0.2 * rows < paired < rows
    plain = next(reader.batches([day], replace(window, includes_swaps=False), 64, Shuffle(0)))
    assert not plain.swap_weights.any()


def test_an_impression_is_evidence_once_however_many_passes_learn_it(
    reader: ExampleReader,
) -> None:
    def information(epochs: int) -> torch.Tensor:
        student = untrained_student(reader, 0)
        config = StudentTrainConfig(
            model=SMALL,
            distillation=DistillationConfig(kind="none"),
            epochs=epochs,
            dense_lr=0,
            embedding_lr=0,
        )
        window = LabelWindow(0, reader.lake.spec.day_end(reader.days()[-1]))
        StudentTrainer(student, config, None).train(reader.days()[:1], window)
        bias = student.student.position_bias
        assert isinstance(bias, SwapPositionBias)
        return bias.information

    once, twice = information(1), information(2)
    assert once.sum() > 10
    torch.testing.assert_close(twice.sum(), once.sum(), rtol=0.1, atol=0)


@pytest.fixture
def biased(student: TrainedStudent) -> Iterator[TrainedStudent]:
    """The student with random effects of positions."""
    bias = student.student.position_bias
    assert isinstance(bias, SwapPositionBias)
    torch.manual_seed(3)
    torch.nn.init.normal_(bias.coefficients)
    yield student
    torch.nn.init.zeros_(bias.coefficients)


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


def ranker_with_effects(biased: TrainedStudent, folder: Path) -> ExportedRanker:
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
        served = ranker.score(user_state, inputs.candidates).probabilities
        logged = ranker.score_at_logged_positions(user_state, inputs.candidates).probabilities
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
    (_, first), (_, second) = (exportable_programs(biased, example) for example in inputs)
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
