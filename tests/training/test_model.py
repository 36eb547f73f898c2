"""Laws of GEM and its blocks, on batches of the small lake."""

import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from etl.errors import UserError
from etl.spec.units import each_day
from etl.tables.contracts import RESERVED_ITEMS
from etl.tables.lake import Lake
from features.inputs import USER
from tests.conftest import FIRST, LAST
from training.data.batch import Batch
from training.data.chunks import hashes
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened
from training.loop.average import averaged
from training.model.config import SCALES, SequenceOptions
from training.model.domains import Heads
from training.model.gem import Gem
from training.model.grouped import GroupedRows
from training.model.interest import PRIOR, Interest
from training.model.lookup import ItemRows, first_items, look_up, table_rows
from training.model.matching import match
from training.model.numeric import NumericRows, RunningScale
from training.model.plain import PlainTables
from training.model.recency import NEVER, PHASES, Recency, phase, rhythm
from training.parallel.sparse import TorchrecTables

USERS = 64
TINY = SCALES["tiny"].model_copy(update={"user_rows": USERS})


@pytest.fixture(scope="module")
def reader(lake: Lake) -> Reader:
    return Reader.newest(lake, "behaviour", 64)


@pytest.fixture(scope="module")
def batch(reader: Reader) -> Batch:
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    return next(reader.batches([LAST], ripened, 64, Shuffle(0)))


MODELS = {
    "default": {},
    "told": {"flow": "int", "cls_rows": 1, "rotary": True, "pooling": "hsp"},
    "families": {
        "flow": "n2s",
        "layer": "hstu",
        "families": {
            "ads": {"events": ["ad_click", "ad_view"], "width": 16, "layers": 2},
            "posts": {"events": ["post_view", "post_like"], "newest": 5},
        },
    },
}


@pytest.fixture(scope="module", params=MODELS)
def score(reader: Reader, request: pytest.FixtureRequest):
    """Logits (B, O) of an untrained GEM whose heads differ by surface."""
    torch.manual_seed(0)
    sequence = SequenceOptions.model_validate(MODELS[request.param])
    gem = Gem(reader.features, TINY.model_copy(update={"sequence": sequence})).eval()
    torch.nn.init.normal_(gem.heads.own_weight)
    tables = PlainTables(table_rows(reader.features, len(reader.items), USERS), TINY.row_width)

    def scored(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            found = gem.find(batch)
            items = first_items(len(reader.items))
            vectors = look_up(tables, batch, found.positions, items, users=USERS)
            return gem(batch, found, vectors).logits

    return scored


def rows_of(batch: Batch, rows: torch.Tensor) -> Batch:
    """The same requests with fewer or reordered candidates."""
    per_row = ("request", "surface", "item", "row_numbers", "labels", "known")
    return replace(
        batch,
        **{name: getattr(batch, name)[rows] for name in per_row},
        row_ids={k: v[rows] for k, v in batch.row_ids.items()},
        row_vectors={k: v[rows] for k, v in batch.row_vectors.items()},
        impressions=batch.impressions[rows.numpy()],
    )


def test_a_candidate_is_scored_alone(batch: Batch, score) -> None:
    everything = score(batch)
    some = torch.arange(0, len(batch), 3)
    torch.testing.assert_close(score(rows_of(batch, some)), everything[some], atol=2e-5, rtol=1e-4)


def test_the_surface_and_the_history_matter(batch: Batch, score) -> None:
    other = replace(batch, surface=batch.surface % 3 + 1)
    assert (score(batch) - score(other)).abs().max() > 1e-3
    history = replace(batch.history, types=batch.history.types % 8 + 1)
    assert (score(batch) - score(replace(batch, history=history))).abs().max() > 1e-5


def test_no_history_and_unknown_items_are_defined(reader: Reader, batch: Batch, score) -> None:
    none = Reader(reader.lake, reader.versions, "behaviour", 0)
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    empty = next(none.batches([LAST], ripened, 64, Shuffle(0)))
    assert len(empty.history.items) == 0
    assert score(empty).isfinite().all()
    assert score(replace(batch, item=batch.item + 10**6)).isfinite().all()


@pytest.mark.parametrize("strange", [torch.inf, -torch.inf])
def test_a_number_that_is_none_is_missing(batch: Batch, score, strange: float) -> None:
    def filled(number: float) -> Batch:
        return replace(
            batch,
            row_numbers=torch.full_like(batch.row_numbers, number),
            user_numbers=torch.full_like(batch.user_numbers, number),
        )

    missing = score(filled(torch.nan))
    assert missing.isfinite().all() and torch.equal(score(filled(strange)), missing)


def test_a_history_of_one_event_and_one_row_are_defined(reader: Reader, score) -> None:
    one = Reader(reader.lake, reader.versions, "behaviour", 1)
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    several = next(one.batches([LAST], ripened, 64, Shuffle(0)))
    assert set(several.history.offsets.diff().tolist()) <= {0, 1}
    everything = score(several)
    single = next(one.batches([LAST], ripened, 1, Shuffle(0)))
    assert everything.isfinite().all() and score(single).isfinite().all()


def test_a_surface_that_was_never_trained_has_what_all_share() -> None:
    """Its own weights are where they began: nothing."""
    heads = Heads(3, 2, 8)
    torch.nn.init.normal_(heads.own_weight.data[1:])
    h, surface = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    found = heads(h, surface)
    torch.testing.assert_close(found[surface == 0], heads.shared(h[surface == 0]))
    assert (found[1:3] - heads.shared(h[1:3])).abs().max() > 1e-3


@pytest.mark.parametrize("without", ["vectors", "match", "ids", "numbers"])
def test_gem_needs_no_kind_of_feature(reader: Reader, batch: Batch, without: str) -> None:
    """A spec may declare no vectors, nothing to match on, no attributes of users, no numbers."""
    features, history = reader.features, batch.history
    if without == "vectors":
        features = replace(features, item=replace(features.item, vectors={}))
        batch = replace(batch, row_vectors={}, history=replace(history, item_vectors={}))
    elif without == "match":
        features = replace(features, match=())
    elif without == "ids":
        features = replace(features, user=replace(features.user, ids={}))
        batch = replace(batch, user_ids={})
    else:
        features = replace(features, user=replace(features.user, numbers=()))
        batch = replace(batch, user_numbers=batch.user_numbers[:, :0])
    gem = Gem(features, TINY)
    tables = PlainTables(table_rows(features, len(reader.items), USERS), TINY.row_width)
    found = gem.find(batch)
    items = first_items(len(reader.items))
    output = gem(batch, found, look_up(tables, batch, found.positions, items, users=USERS))
    assert output.logits.shape == batch.labels.shape and output.logits.isfinite().all()


def test_interest_is_the_mean_of_what_the_user_dealt_with(batch: Batch) -> None:
    """By type of event; towards zero where there are few; a candidate of its direction is near."""
    name, given = next(iter(batch.row_vectors.items()))
    interest = Interest(name, given.shape[1], 9, given.shape[1])
    torch.nn.init.eye_(interest.project.weight)
    means = interest.means(batch.history)
    history, offsets = batch.history, batch.history.offsets.tolist()
    for request, (start, stop) in enumerate(itertools.pairwise(offsets)):
        for type_ in range(1, 10):
            of_type = [i for i in range(start, stop) if history.types[i] == type_]
            total = history.item_vectors[name][of_type].sum(0)
            torch.testing.assert_close(means[request, type_ - 1], total / (len(of_type) + PRIOR))
    rows, near = interest(batch)
    assert rows.shape[:2] == near.shape == (len(batch), 9)
    alike = replace(batch, row_vectors={name: means[batch.request, 5]})
    opposed = replace(batch, row_vectors={name: -means[batch.request, 5]})
    some = means[batch.request, 5].abs().sum(1) > 0
    assert some.any() and (interest(alike)[1][some, 5] > 0).all()
    torch.testing.assert_close(interest(alike)[1], -interest(opposed)[1])


def test_new_items_take_the_rows_of_the_oldest_and_unknown_ones_row_0() -> None:
    known = torch.arange(20) > 0
    known[13] = False
    rows = ItemRows(8, known)(torch.arange(25))
    assert rows[0] == rows[13] == 0 and (rows[20:] == 0).all()
    assert rows[1:8].tolist() == [*range(1, 8)] and rows[8:13].tolist() == [*range(1, 6)]
    first = RESERVED_ITEMS
    assert first_items(first + 3)(torch.arange(first + 5)).tolist() == [
        *[0] * first, *range(first, first + 3), 0, 0
    ]  # fmt: skip


def test_running_scale_is_the_mean_and_deviation_of_what_it_saw() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(3000, 2) * torch.tensor([0.1, 50.0]) + torch.tensor([5.0, -3.0])
    numbers[::5, 1] = float("nan")
    scale = RunningScale(2).train()
    for part in numbers.split(61):
        scale(part)
    torch.testing.assert_close(scale.mean, numbers.nanmean(0), rtol=1e-4, atol=1e-4)
    spread = ((numbers - numbers.nanmean(0)) ** 2).nanmean(0)
    torch.testing.assert_close(scale.variance, spread, rtol=1e-3, atol=1e-4)
    scale.eval()
    before = scale.mean.clone()
    assert scale(torch.full((1, 2), float("nan"))).eq(0).all() and scale.mean.equal(before)


def test_batches_hold_every_ripened_row_once_and_resume_anywhere(reader: Reader) -> None:
    days = list(each_day(FIRST, LAST))
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    whole = list(reader.batches(days, ripened, 50, Shuffle(3)))
    ids = np.concatenate([b.impressions for b in whole])
    stored = reader.batches(days, ripened, 50, Shuffle(None))
    assert sorted(ids) == sorted(np.concatenate([b.impressions for b in stored]))
    assert len(set(ids)) == len(ids)
    for skip in (1, len(whole) // 2, len(whole) - 1):
        rest = list(reader.batches(days, ripened, 50, Shuffle(3), skip=skip))
        assert [b.impressions.tolist() for b in rest] == [
            b.impressions.tolist() for b in whole[skip:]
        ]
        assert rest[0].history.ages.equal(whole[skip].history.ages)


def test_each_label_ripens_on_exactly_one_day(reader: Reader) -> None:
    spec, days = reader.lake.spec, list(each_day(FIRST, LAST))
    seen: list[tuple[str, int]] = []
    for day in days:
        span = Ripened(0 if day == FIRST else spec.day_start(day), spec.day_end(day))
        landed = list(each_day(FIRST, day))
        for batch in reader.batches(landed, span, 200, Shuffle(None)):
            rows, objectives = np.nonzero(batch.known.numpy())
            seen += list(zip(batch.impressions[rows], objectives, strict=True))
    assert len(seen) == len(set(seen))
    everything = Ripened(0, spec.day_end(LAST))
    known = sum(int(b.known.sum()) for b in reader.batches(days, everything, 200, Shuffle(None)))
    assert len(seen) == known


def test_histories_hold_nothing_of_the_present(reader: Reader) -> None:
    ripened = Ripened(0, reader.lake.spec.day_end(LAST))
    for batch in reader.batches([LAST], ripened, 200, Shuffle(None)):
        assert (batch.history.ages >= 1).all()


def test_averaged_weights_are_a_weighted_mean_of_those_seen() -> None:
    """Within the hull of the past, at the newest while there is no past, and moved towards it."""
    model = torch.nn.Linear(3, 2, bias=False)
    mean = averaged(model)
    seen = []
    for step in range(50):
        with torch.no_grad():
            model.weight.fill_(float(step))
        mean.update_parameters(model)
        seen.append(mean.module.weight.mean().item())
    assert seen[0] == 0.0
    assert all(a < b < step for step, (a, b) in enumerate(itertools.pairwise(seen), 1))
    steady = averaged(torch.nn.Linear(3, 2))
    before = steady.module.weight.clone()
    for _ in range(5):
        steady.update_parameters(steady.module)
    torch.testing.assert_close(steady.module.weight, before)


def test_bins_make_a_step_where_a_line_cannot() -> None:
    rows = NumericRows(1, 1, 2, 4)
    rows.scale.eval()
    with torch.no_grad():
        for parameter in rows.parameters():
            parameter.zero_()
        rows.out.weight.fill_(1.0)
        rows.bins[8:] = 1.0  # from 0 up
    found = rows(torch.tensor([[-2.0], [-0.01], [0.01], [2.0]]))[0][:, 0, 0]
    assert found[0] == found[1] == 0 and found[2] == found[3] > 0


def test_recency_tells_the_last_time_and_the_share_of_a_usual_gap() -> None:
    """Seven days after, and 7, 7 and 4 days between: due is 7 of 6; one event has no gap."""
    day = 86_400
    ages, types = torch.tensor([25, 18, 11, 7, 3]) * day, torch.tensor([1, 1, 1, 1, 2])
    own, request = torch.tensor([5, 9]), torch.tensor([0, 0])
    matches = match(own, torch.full((5,), 5), request, torch.tensor([0, 5]))
    seen = rhythm(matches, types, ages, 3)
    assert matches.values.tolist() == [5, 9]
    assert seen.last[:, 1:].tolist() == [[7 * day, 3 * day], [NEVER, NEVER]]
    assert seen.span[:, 1:].tolist() == [[18 * day, 0], [0, 0]]
    assert seen.gaps[:, 1:].tolist() == [[3, 0], [0, 0]]
    slower = rhythm(matches, types, 3 * ages, 3)
    bucket = phase(seen.last, seen.span / 3)
    assert torch.equal(phase(slower.last, slower.span / 3), bucket)
    assert bucket[0, 1] == PHASES // 2 + 3 and bucket[0, 2] == bucket[1, 1] == PHASES

    recency = Recency(10, 2, 4)
    torch.nn.init.normal_(recency.usual_phase.weight)
    rows = recency(matches, types, ages)
    assert rows.shape == (2, 2, 4) and recency.usual.gaps[5, 1] == 3
    recency.eval()
    other = match(own, torch.full((1,), 5), request, torch.tensor([0, 1]))
    once = recency(other, types[:1], 7 * day * torch.ones(1, dtype=torch.long))
    torch.testing.assert_close(once[0, 0], rows[0, 0])  # one event of its own: others' gaps
    assert recency.usual.gaps[5, 1] == 3


def test_weak_features_share_rows_and_strong_ones_have_their_own() -> None:
    sizes = {"age": 8, "city": 500, "sex": 3, "device": 5}
    vectors = {name: torch.randn(6, 4) for name in sizes}
    apart = GroupedRows(sizes, 4, 0, 2)
    assert all(r is vectors[n] for r, n in zip(apart(vectors), sizes, strict=True))
    together = GroupedRows(sizes, 4, 100, 2)
    rows = together(vectors)
    assert together.rows == len(rows) == 3 and rows[0] is vectors["city"]
    assert {r.shape for r in rows} == {(6, 4)}
    for name in ("age", "sex", "device"):
        moved = together(vectors | {name: vectors[name] + 1})
        assert not torch.allclose(torch.stack(moved[1:]), torch.stack(rows[1:]))
    assert GroupedRows({"age": 8, "sex": 3}, 4, 100, 2).rows == 2  # nothing is saved


def test_a_family_of_unknown_events_is_refused(reader: Reader) -> None:
    told = SequenceOptions.model_validate({"families": {"ads": {"events": ["ad_click", "zap"]}}})
    with pytest.raises(UserError, match="names zap, which the spec lacks"):
        Gem(reader.features, TINY.model_copy(update={"sequence": told}))


def test_a_user_has_a_row_of_its_own_and_one_never_seen_tells_nothing(
    reader: Reader, batch: Batch
) -> None:
    one, two, again = hashes(pa.array(["u1", "u2", "u1"])).tolist()
    assert one == again != two and min(one, two) >= 0
    items, found = first_items(len(reader.items)), torch.arange(3)
    tables = TorchrecTables(table_rows(reader.features, len(reader.items), USERS), 16, (USER,))
    told = look_up(tables, batch, found, items, users=USERS).users
    assert not told[USER].any() and told["u_country"].any()
    tables.collection.embeddings[USER].weight.data[:, 0] = torch.arange(USERS)
    told = look_up(tables, batch, found, items, users=USERS).users[USER]
    assert torch.equal(told[:, 0], (batch.user % USERS).float())
    assert USER not in look_up(tables_without(reader), batch, found, items).users


def tables_without(reader: Reader) -> PlainTables:
    return PlainTables(table_rows(reader.features, len(reader.items)), 16)
