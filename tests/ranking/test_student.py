"""The student: what it learns from whom; and a request is scored the same in any company."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from etl.errors import UserError
from ranking.inputs import newest
from ranking.student.adapter import Adapter, imitation
from ranking.student.config import StudentConfig, TransferConfig
from ranking.student.share import share
from ranking.student.teacher import Said
from ranking.student.trained import TrainedStudent, new_student
from ranking.student.transfer import Balance, Transfer
from tests.conftest import LAST
from training.build import build
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened
from training.knowledge.earlier import Earlier
from training.loop.checkpoint import Manifest
from training.model.config import SCALES
from training.parallel.processes import process_group
from training.parallel.sparse import parts_of

SMALL = StudentConfig(row_width=4, event_width=8, hidden=(16, 8), events=8, user_rows=50)
OBJECTIVES = 3


@pytest.fixture(scope="module")
def reader(lake) -> Reader:
    return Reader.newest(lake, "behaviour", 40, ("feed",))


@pytest.fixture(scope="module")
def batch(reader: Reader) -> Batch:
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    return next(reader.batches([LAST], ripened, 40, Shuffle(None)))


@pytest.fixture
def student(reader: Reader) -> TrainedStudent:
    torch.manual_seed(0)
    made = new_student(reader, SMALL, len(reader.items), Earlier.nothing())
    made.student.eval()
    return made


class Certain:
    """A teacher that is sure of everything."""

    versions = ("v1",)

    def look_up(self, impressions: np.ndarray) -> Said:
        n = len(impressions)
        return Said(
            torch.full((n, OBJECTIVES), 9.0),
            torch.ones(n, OBJECTIVES, dtype=torch.bool),
            torch.zeros(n, dtype=torch.long),
        )


def gradients(student: TrainedStudent, batch: Batch, config: TransferConfig) -> dict:
    torch.manual_seed(1)
    transfer = Transfer.of(config, SMALL.hidden[1], torch.zeros(OBJECTIVES), Certain())
    student.student.zero_grad()
    transfer.backward(student.hidden(batch), student.student.head, batch)
    return {n: p.grad.clone() for n, p in student.student.named_parameters() if p.grad is not None}


def test_the_served_head_learns_nothing_from_the_teacher(
    student: TrainedStudent, batch: Batch
) -> None:
    """ExFM, theorem 3.1: what biases the teacher must not reach the served head."""
    alone = gradients(student, batch, TransferConfig(kind="none"))
    told = gradients(student, batch, TransferConfig(ratio=2.0))
    plain = gradients(student, batch, TransferConfig(kind="plain"))
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(told[name], alone[name])
        assert (plain[name] - alone[name]).abs().max() > 1e-3
    assert (told["row_layer.weight"] - alone["row_layer.weight"]).abs().max() > 0


def test_no_ratio_no_gradient(student: TrainedStudent, batch: Batch) -> None:
    alone = gradients(student, batch, TransferConfig(kind="none"))
    told = gradients(student, batch, TransferConfig(ratio=0.0))
    for name, grad in alone.items():
        torch.testing.assert_close(told[name], grad)


@given(st.floats(0.1, 10), st.floats(1e-4, 1e4), st.integers(0, 9))
def test_the_ratio_of_gradients_is_the_one_that_was_asked(
    ratio: float, loud: float, seed: int
) -> None:
    torch.manual_seed(seed)
    labels, told = torch.randn(8, 4), loud * torch.randn(8, 4)
    added = Balance(ratio)(labels, told) - labels
    assert float(added.norm() / labels.norm()) == pytest.approx(ratio, rel=1e-3)


def only(batch: Batch, keep: list[int], reader: Reader) -> Batch:
    """The rows of some requests of a batch, read again alone."""
    wanted = set(batch.requests[keep])
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    for other in reader.batches([LAST], ripened, 1, Shuffle(None)):
        if set(other.requests) <= wanted:
            return other
    raise AssertionError


def test_a_request_is_scored_the_same_alone(
    student: TrainedStudent, reader: Reader, batch: Batch
) -> None:
    with torch.no_grad():
        together = dict(zip(batch.impressions, student.logits(batch), strict=True))
        for place in (0, 3, len(batch.requests) - 1):
            alone = only(batch, [place], reader)
            for name, logits in zip(alone.impressions, student.logits(alone), strict=True):
                torch.testing.assert_close(logits, together[name], rtol=1e-4, atol=1e-5)


def test_without_history_scores_are_numbers(student: TrainedStudent, batch: Batch) -> None:
    none = {f: v[:0] for f, v in vars(batch.history).items() if isinstance(v, torch.Tensor)}
    empty = replace(
        batch.history,
        **(none | {"offsets": torch.zeros_like(batch.history.offsets)}),
        item_ids={n: v[:0] for n, v in batch.history.item_ids.items()},
        item_vectors={n: v[:0] for n, v in batch.history.item_vectors.items()},
    )
    with torch.no_grad():
        assert student.logits(replace(batch, history=empty)).isfinite().all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 4))
def test_the_newest_of_each_group_in_order(sizes: list[int], most: int) -> None:
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    at = newest(offsets, most)
    values = np.arange(offsets[-1])
    placed = at(values, -1)
    for row, there, first, stop in zip(placed, at.there, offsets[:-1], offsets[1:], strict=True):
        assert list(row[there]) == list(values[first:stop][-most:])
        assert (row[~there] == -1).all()


def said(logits: torch.Tensor) -> Said:
    n = len(logits)
    there = torch.ones_like(logits, dtype=torch.bool)
    return Said(logits, there, torch.zeros(n, dtype=torch.long))


def test_the_adapter_finds_what_the_teacher_gets_wrong() -> None:
    torch.manual_seed(0)
    adapter = Adapter(1, 1)
    for _ in range(600):
        truth = torch.randn(256, 1) - 1
        labels = (torch.rand(256, 1) < torch.sigmoid(truth)).float()
        adapter.learn(said(2 * truth + 1), labels, torch.ones_like(labels))
    truth = torch.linspace(-3, 1, 5)[:, None]
    assert (adapter(said(2 * truth + 1)) - truth).abs().max() < 0.25


def test_no_row_is_corrected_by_its_own_label(student: TrainedStudent, batch: Batch) -> None:
    """What a step learns from does not depend on the adapter's fit to that step's labels."""
    found = []
    for labels in (batch.labels, 1 - batch.labels):
        torch.manual_seed(2)
        transfer = Transfer.of(
            TransferConfig(adapter=True), SMALL.hidden[1], torch.zeros(OBJECTIVES), Certain()
        )
        asked = []
        corrected = transfer._corrected
        transfer._corrected = lambda said, f=corrected, out=asked: out.append(f(said)) or out[-1]
        student.student.zero_grad()
        flipped = replace(batch, labels=labels)
        transfer.backward(student.hidden(batch), student.student.head, flipped)
        found.append((asked[0], transfer.adapter.intercept.detach().clone()))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).abs().max() > 0


@settings(max_examples=20)
@given(st.floats(0.02, 0.98), st.floats(0.02, 0.98))
def test_imitation_is_least_where_the_student_agrees(p: float, other: float) -> None:
    logit = torch.logit(torch.tensor([[p]]))
    there = torch.ones(1, 1, dtype=torch.bool)
    agreed = imitation(logit, logit, there)
    assert agreed <= imitation(torch.logit(torch.tensor([[other]])), logit, there) + 1e-6
    assert imitation(logit, logit, ~there) == 0


def test_heads_that_imitate_are_not_served(student: TrainedStudent) -> None:
    heads = [n for n, m in student.student.named_modules() if isinstance(m, nn.Linear)]
    assert [n for n in heads if n.startswith("head")] == ["head"]


@pytest.fixture(scope="module")
def gem(reader: Reader):
    """A GEM of the student's sizes that has learned nothing: only what is copied matters."""
    sizes = {"row_width": 4, "event_width": 8}
    tiny = SCALES["tiny"].model_copy(update=sizes)
    with pytest.MonkeyPatch.context() as patch, process_group():
        patch.setitem(SCALES, "tiny", tiny)
        config = TrainConfig(scale="tiny", item_rows=64, model={"user_rows": 50})
        known = reader.items.known_by(LAST)
        manifest = Manifest(
            spec="", match=(), events=(), training=config, processes=1, versions={},
            trained_from=LAST, trained_until=LAST, complete=True, batches=0, steps=0,
        )  # fmt: skip
        yield build(reader.features, manifest, known)


def item_rows(student: TrainedStudent) -> torch.Tensor:
    return student.tables.state_dict()["tables.item.weight"].clone()


def test_shared_parts_are_gems(student: TrainedStudent, gem, reader: Reader) -> None:
    share(student, gem, TransferConfig())
    items = torch.arange(len(reader.items))
    rows = next(w for k, w in gem.tables.state_dict().items() if ".item." in f".{k}")
    ((_, stored),) = parts_of(rows)
    torch.testing.assert_close(item_rows(student), stored[gem.model.items(items)])
    for mine, theirs in (
        (student.student.events, gem.model.core.history.events),
        (student.student.recency, gem.model.core.history.recency),
    ):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_a_shuffled_share_has_gems_rows_at_other_places(student: TrainedStudent, gem) -> None:
    share(student, gem, TransferConfig())
    right = item_rows(student)
    share(student, gem, TransferConfig(shuffled=True))
    wrong = item_rows(student)
    assert (wrong != right).any(1).float().mean() > 0.5
    torch.testing.assert_close(wrong.sort(0).values, right.sort(0).values)


def test_frozen_parts_learn_nothing(student: TrainedStudent, gem, batch: Batch) -> None:
    share(student, gem, TransferConfig(frozen=True))
    gradients(student, batch, TransferConfig())
    assert all(p.grad is None for p in student.tables.parameters())
    assert all(p.grad is None for p in student.student.events.parameters())
    assert student.student.head.weight.grad is not None


def test_parts_of_another_size_are_refused_where_they_are_named(reader: Reader, gem) -> None:
    wide = SMALL.model_copy(update={"row_width": 8})
    other = new_student(reader, wide, len(reader.items), Earlier.nothing())
    before = item_rows(other)
    share(other, gem, TransferConfig())
    assert torch.equal(item_rows(other), before)
    with pytest.raises(UserError, match="row width 8 cannot share parts of a GEM of 4"):
        share(other, gem, TransferConfig(share=("tables",)))
