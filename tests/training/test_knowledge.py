"""Knowledge is told to those who come later, and by a GEM that had not seen it."""

from collections.abc import Iterator
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from features.four_bits import HALF, packed, unpacked
from tests.conftest import FIRST, LAST
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING
from training.knowledge.compress import PREFIXES, Compressor, fit
from training.knowledge.earlier import Earlier, earlier
from training.knowledge.write import write_knowledge
from training.parallel.processes import process_group
from training.trials import aside

DAYS = (FIRST + timedelta(days=1), LAST)


@pytest.fixture
def told(own_gem_lake: Lake) -> Iterator[Lake]:
    """A lake in which a GEM of each day scored the day after it."""
    with process_group():
        yield own_gem_lake


def test_each_day_is_told_by_the_gem_of_the_day_before(told: Lake) -> None:
    for name in ("knowledge", "user_knowledge"):
        contract = getattr(contracts, name)(told.spec)
        rows = arrow.snapshot(told, contract).read()
        until = {row["day"]: row["fm_trained_until"] for row in rows.to_pylist()}
        assert until == {DAYS[0] + timedelta(days=n): FIRST + timedelta(days=n) for n in range(3)}


def test_what_was_shown_on_a_day_is_told_from_its_end_on(told: Lake) -> None:
    spec = told.spec
    rows = arrow.snapshot(told, contracts.user_knowledge(spec)).read().to_pylist()
    assert all(row["visible_ts"] == spec.day_end(row["day"]) for row in rows)
    known = earlier(told)
    reader = Reader.newest(told)
    for batch in reader.batches([LAST], EVERYTHING, 200, Shuffle(None)):
        first, stop = known.newest(batch.users, batch.as_of.numpy(), 8)
        for n, (begin, end) in enumerate(zip(first, stop, strict=True)):
            as_of = int(batch.as_of[n])
            mine = [r for r in rows if r["user_id"] == batch.users[n] and r["visible_ts"] < as_of]
            mine.sort(key=lambda row: (row["visible_ts"], row["shown_ts"]))
            assert list(known.shown[begin:end]) == [row["shown_ts"] for row in mine][-8:]


def test_an_older_gem_tells_the_same_day_when_it_is_to_be_stale(told: Lake) -> None:
    write_knowledge(told, (LAST, LAST), stale=1)
    rows = arrow.snapshot(told, contracts.knowledge(told.spec)).read(day=LAST)
    assert set(rows["fm_trained_until"].to_pylist()) == {LAST - timedelta(days=2)}


def test_a_row_of_a_gem_that_had_seen_it_is_refused(told: Lake) -> None:
    assert len(earlier(told).keys)
    contract = contracts.user_knowledge(told.spec)
    rows = arrow.snapshot(told, contract).read(day=LAST)
    seen = pa.repeat(pa.scalar(LAST), len(rows))
    planted = rows.set_column(
        rows.schema.get_field_index("fm_trained_until"), "fm_trained_until", seen
    )
    arrow.replace(told, contract, planted, f"day = '{LAST}'", {})
    with pytest.raises(UserError, match="had been trained on their day"):
        earlier(told)


ROW = st.tuples(st.sampled_from("abc"), st.integers(0, 9))


@given(st.lists(ROW, max_size=20), st.lists(ROW, min_size=1, max_size=8), st.integers(0, 4))
def test_only_strictly_earlier_ones_are_found(
    rows: list[tuple[str, int]], asked: list[tuple[str, int]], most: int
) -> None:
    rows = sorted(rows)
    users = sorted({user for user, _ in rows})
    shown = np.array([second for _, second in rows], np.int64)
    index = np.array([users.index(user) for user, _ in rows], np.int64)
    known = Earlier(pa.array(users, pa.string()), (index << 33) + shown, shown, shown, shown)
    names, as_of = np.array([u for u, _ in asked], object), np.array([t for _, t in asked])
    for (user, second), begin, end in zip(asked, *known.newest(names, as_of, most), strict=True):
        before = [t for u, t in rows if u == user and t < second]
        assert list(shown[begin:end]) == before[len(before) - min(most, len(before)) :]


@given(st.integers(1, 5), st.integers(0, 9))
def test_four_bits_are_within_half_a_level(n: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).uniform(-1, 1, (n, 6)).astype(np.float32)
    stored = packed(numbers)
    assert stored.nbytes == numbers.size / 2
    assert np.abs(unpacked(stored) - numbers).max() <= 1 / HALF
    assert (packed(unpacked(stored)) == stored).all()


@settings(max_examples=3)
@given(st.integers(0, 3))
def test_each_prefix_tells_more_than_the_one_before(seed: int) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(2000, 12) @ torch.randn(12, 24)
    compressor = Compressor(24)
    fit(compressor, hidden, seed)
    with torch.no_grad():
        kept = torch.from_numpy(unpacked(packed(compressor(hidden).numpy())))
        wanted = compressor.scale(hidden)
        place = torch.arange(kept.shape[1])
        errors = [
            float((compressor.decode(kept * (place < n)) - wanted).square().mean())
            for n in PREFIXES
        ]
    assert errors[0] > errors[1] > errors[2] and errors[0] < 0.7 and errors[2] < 0.3


def test_nothing_is_known_where_no_gem_was_trained_before(lake: Lake) -> None:
    with aside(lake) as own:
        assert write_knowledge(own, (FIRST, date(2026, 1, 2))) == 0
        assert not len(earlier(own).keys)
