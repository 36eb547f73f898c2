import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from etl.tables.lake import Lake
from ranking import ranker
from ranking.auction import expected_value, order
from ranking.calibration import Platt, fit_platt, logit
from ranking.student.model import StudentConfig
from ranking.student.train import DistillConfig, StudentTraining, _loss, new_student
from tests.conftest import LAST
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened

SMALL = StudentConfig(row_width=4, event_width=8, hidden=(16, 8), max_length=16)


@pytest.fixture(scope="module")
def reader(lake: Lake) -> Reader:
    return Reader.newest(lake, "behaviour", 16, "feed")


@pytest.fixture(scope="module")
def batch(reader: Reader) -> Batch:
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    return next(reader.batches([LAST], ripened, 40, Shuffle(None)))


def test_the_served_head_learns_nothing_from_the_teacher_but_through_the_backbone(
    reader: Reader, batch: Batch
) -> None:
    """ExFM: gradients of the serving head are those of the labels alone."""

    class Certain:
        def look_up(self, impressions):
            shape = (len(impressions), len(reader.features.objectives))
            return torch.full(shape, 9.0), torch.ones(len(impressions), dtype=torch.bool)

    torch.manual_seed(0)
    model = new_student(reader, SMALL, len(reader.items))
    model.student.eval()
    grads = []
    for teacher in (None, Certain()):
        model.student.zero_grad()
        _loss(model(batch), batch, teacher, DistillConfig(weight=3.0)).backward()
        grads.append(model.student.serving.weight.grad.clone())
        backbone = model.student.backbone[0].weight.grad.clone()
        grads.append(backbone)
    torch.testing.assert_close(grads[0], grads[2])
    assert (grads[1] - grads[3]).abs().max() > 0


def test_no_gradient_scale_no_gradient(reader: Reader, batch: Batch) -> None:
    torch.manual_seed(0)
    model = new_student(reader, SMALL, len(reader.items))
    config = StudentTraining(model=SMALL, distill=DistillConfig(gradient_scale=0.0))
    model(batch, config).distilled.sum().backward()
    assert model.student.backbone[0].weight.grad.abs().max() == 0
    assert model.student.distilled.weight.grad.abs().max() > 0


def test_a_saved_ranker_scores_as_before(reader: Reader, batch: Batch, tmp_path: Path) -> None:
    model = new_student(reader, SMALL, len(reader.items))
    model.student.eval()
    fitted = {name: Platt(slope=1.1, intercept=-0.2) for name in reader.lake.spec.objectives}
    folder = tmp_path / "feed"
    ranker.save(folder, reader.lake.spec, "feed", "v1", "behaviour", SMALL, model, fitted)
    loaded = ranker.load(folder)
    raw = torch.sigmoid(model(batch).serving).detach().double().numpy()
    expected = 1 / (1 + np.exp(-(1.1 * logit(raw) - 0.2)))
    np.testing.assert_allclose(loaded.probabilities(batch), expected, rtol=1e-6)

    ranked = loaded.rank(batch, [1.0] * len(batch), ["traffic"] * len(batch))
    values = [r.expected_value for r in ranked]
    assert values == sorted(values, reverse=True)
    assert sorted(r.row for r in ranked) == list(range(len(batch)))
    with pytest.raises(UserError, match="unknown campaign goal fame"):
        loaded.rank(batch, [1.0] * len(batch), ["fame"] * len(batch))

    weights = folder / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="not the file that was saved"):
        ranker.load(folder)
    with pytest.raises(UserError, match="holds no ranker"):
        ranker.load(tmp_path / "nowhere")
    assert json.loads((folder / "ranker.json").read_text())["surface"] == "feed"


@settings(max_examples=30)
@given(st.floats(0.3, 3), st.floats(-1.5, 1.5), st.integers(0, 50))
def test_platt_recovers_a_distortion_and_keeps_the_order(a: float, b: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.05, 0.6, 20_000)
    labels = (rng.uniform(size=len(p)) < p).astype(np.float32)
    distorted = Platt(slope=1 / a, intercept=-b / a)(p)
    fitted = fit_platt(distorted, labels)
    assert abs(fitted(distorted).sum() / labels.sum() - 1) < 0.005
    assert (np.argsort(fitted(distorted)) == np.argsort(distorted)).all()


def test_few_positives_or_a_turned_order_leave_probabilities_alone() -> None:
    p = np.linspace(0.01, 0.99, 1000)
    assert fit_platt(p, np.zeros(1000, np.float32)) == Platt()
    assert fit_platt(p, (p < 0.5).astype(np.float32)) == Platt()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.1, 10))
def test_the_ranking_is_by_bid_times_probability(
    lake_spec, chances: list[float], bid: float
) -> None:
    p = np.tile(np.array(chances)[:, None], (1, len(lake_spec.objectives)))
    bids = [bid * (i + 1) for i in range(len(chances))]
    values = expected_value(lake_spec, "feed", p, bids, ["sales"] * len(chances))
    np.testing.assert_allclose(values, np.array(bids) * chances)
    ranked = order(np.array([str(i) for i in range(len(chances))], object), p, values)
    assert [r.place for r in ranked] == list(range(len(chances)))
    assert all(a.expected_value >= b.expected_value for a, b in itertools.pairwise(ranked))
