"""Rows of the item table: admission, eviction and the map between, over a simulated year."""

from dataclasses import fields
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from etl.tables.schemas import RESERVED_ITEM_INDICES
from tests.training.many import run
from training.distributed.process_group import process_group
from training.model.embeddings import NO_ITEM
from training.trainer.embedding_ttl import NEVER
from training.trainer.item_rows import ManagedItemRows, RowChanges, WaitingItems

ROWS, TTL = 16, 30
FIRST_ITEM = RESERVED_ITEM_INDICES
START = date(2026, 1, 1).toordinal()


class Table:
    """A table of items that is trained day by day: `read` are items that a day looks up.

    `vectors` (N) stand for the trained vectors of the rows: each look-up writes the item, so that
    a vector shows which item trained its row.
    """

    def __init__(self, num_rows: int, **options: float) -> None:
        self.rows = ManagedItemRows.all_free(num_rows, **options)
        self.last_days = torch.full((num_rows,), NEVER, dtype=torch.int32)
        self.vectors = torch.full((num_rows,), NO_ITEM)
        self.day = START

    def start_day(self, new_items: torch.Tensor, ttl: int = TTL) -> RowChanges:
        self.day += 1
        oldest = self.day - ttl
        expired = (self.last_days > NEVER) & (self.last_days < oldest)
        changes = self.rows.update(new_items, self.last_days, expired.nonzero().flatten(), oldest)
        self.last_days[changes.evicted] = NEVER
        self.last_days[changes.assigned] = self.day
        self.vectors[changes.assigned] = NO_ITEM
        return changes

    def train(self, *batches: torch.Tensor) -> None:
        for items in batches:
            rows = self.rows.for_training(items, False)
            self.last_days[rows] = self.day
            self.vectors[rows[rows > 0]] = items[rows > 0]
        self.rows.all_reduce(self.day)

    def rows_of(self, *items: int) -> list[int]:
        rows: list[int] = self.rows(torch.tensor(items)).tolist()
        return rows


@pytest.fixture
def alone() -> object:
    with process_group() as ranks:
        yield ranks


def items(*numbers: int) -> torch.Tensor:
    return torch.tensor([FIRST_ITEM + n for n in numbers], dtype=torch.int64)


def test_a_year_of_growth_never_lets_an_item_read_the_row_of_another(alone: object) -> None:
    """100 new items a day in a table of 1,400 rows: 36,500 items in all.

    An item is read on its first day, then on fewer and fewer days; some return after months.
    """
    random, table = np.random.default_rng(0), Table(1_400)
    known, returned = 0, 0
    for day in range(365):
        new = FIRST_ITEM + torch.arange(known, known + 100)
        known += 100
        before = table.rows.map
        changes = table.start_day(new)
        row_items = table.rows.map.row_items
        live = row_items[row_items > NO_ITEM]
        assert len(live.unique()) == len(live) and row_items[0] == NO_ITEM, "one row an item"
        everything = torch.arange(FIRST_ITEM + known + 5)
        rows = table.rows(everything)
        assert torch.equal(rows.nonzero().flatten(), live.sort().values), "others read row 0"
        assert torch.equal(row_items[rows[live]], live)
        assert (table.rows(new) > 0).all() and not changes.not_admitted
        moved = (before.row_items > NO_ITEM) & (table.rows(before.row_items) != torch.arange(1_400))
        assert torch.equal(moved.nonzero().flatten(), changes.evicted.sort().values), "none moves"
        age = random.exponential(12, 700).astype(np.int64)
        recent = FIRST_ITEM + (day - age).clip(0) * 100 + random.integers(0, 100, 700)
        old = FIRST_ITEM + random.integers(0, known, 10)
        read = torch.from_numpy(np.concatenate((new.numpy(), recent, old)))
        returned += int((table.rows(read) == 0).any())
        table.train(*read.split(500))
        trained = (table.vectors > NO_ITEM).nonzero().flatten()
        live_rows = trained[table.rows.map.row_items[trained] > NO_ITEM]
        assert torch.equal(table.vectors[live_rows], table.rows.map.row_items[live_rows])
    assert returned > 300 and len(live) > 1_200
    state = table.rows.state_dict()
    assert {len(values) for values in state.values()} == {1_400}, "of constant size"


def test_an_item_that_was_evicted_reads_row_0_and_starts_afresh_when_it_returns(
    alone: object,
) -> None:
    table, only_first = Table(ROWS), items(1, 2)
    table.start_day(items(0, 1, 2))
    table.train(items(0, 1, 2))
    (row,) = table.rows_of(FIRST_ITEM)
    for _ in range(TTL):
        table.start_day(items())
        table.train(only_first)
        assert table.rows_of(FIRST_ITEM) == [row] and table.rows.lookups[row] == 1
    changes = table.start_day(items())
    assert changes.evicted.tolist() == [row] and table.rows_of(FIRST_ITEM) == [0]
    table.train(items(0, 0))
    assert table.rows_of(FIRST_ITEM) == [0], "the map does not change within a day"
    changes = table.start_day(items())
    (row,) = table.rows_of(FIRST_ITEM)
    assert changes.assigned.tolist() == [row] and table.rows.lookups[row] == 0
    assert table.vectors[row] == NO_ITEM


def test_a_full_table_makes_room_by_last_access_and_keeps_what_the_last_day_read(
    alone: object,
) -> None:
    table = Table(4)
    table.start_day(items(0, 1, 2))
    table.train(items(0, 1, 2, 2))
    table.start_day(items())
    table.train(items(2))
    changes = table.start_day(items(3))
    rows = table.rows_of(*items(0, 1, 2, 3).tolist())
    assert [row > 0 for row in rows] == [True, False, True, True], "equal: the lower row"
    assert not changes.not_admitted and len(changes.evicted) == 1
    table.train(items(0, 2, 3))
    changes = table.start_day(items(4, 5))
    assert changes.not_admitted == 2 and not len(changes.evicted)
    table.train(items(0, 4, 5, 5))
    table.start_day(items(6))
    rows = table.rows_of(*items(0, 2, 3, 4, 5, 6).tolist())
    assert [row > 0 for row in rows] == [True, False, False, False, True, True]


@given(st.integers(1, 5), st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_items_are_admitted_after_a_number_of_look_ups(count: int, read: list[int]) -> None:
    """With a count of one a new item is admitted at once."""
    with process_group():
        table = Table(ROWS, admission_count=count)
        table.start_day(items(*range(6)))
        assert all(row > 0 for row in table.rows_of(*items(*range(6)).tolist())) == (count == 1)
        table.train(*items(*read).split(7))
        table.start_day(items())
        rows = table.rows_of(*items(*range(6)).tolist())
        expected = [count == 1 or read.count(n) >= count for n in range(6)]
        assert [row > 0 for row in rows] == expected


def test_look_ups_of_waiting_items_are_forgotten_after_the_time_to_live(alone: object) -> None:
    for pause, admitted in ((TTL, True), (TTL + 1, False)):
        table = Table(ROWS, admission_count=2)
        table.start_day(items())
        table.train(items(0))
        table.day += pause - 1
        table.start_day(items())
        table.train(items(0, 1))
        table.start_day(items())
        assert (table.rows_of(FIRST_ITEM) != [0]) == admitted


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=4))
def test_waiting_items_are_counted_and_the_most_frequent_kept(days: list[list[int]]) -> None:
    waiting, capacity = WaitingItems.none(4), 4
    counts: dict[int, int] = {}
    last: dict[int, int] = {}
    for day, read in enumerate(days):
        waiting = waiting.add(
            torch.tensor(read, dtype=torch.int64), torch.ones(len(read)).long(), day
        )
        for item in read:
            counts[item], last[item] = counts.get(item, 0) + 1, day
        kept = sorted(counts, key=lambda item: (-counts[item], -item))[:capacity]
        counts, last = ({item: values[item] for item in kept} for values in (counts, last))
        found = [
            (item, count, when)
            for item, count, when in zip(
                *(getattr(waiting, f.name).tolist() for f in fields(waiting)), strict=True
            )
            if item != NO_ITEM
        ]
        assert found == [(item, counts[item], last[item]) for item in kept]


def test_a_saved_state_continues_to_the_same_map(alone: object) -> None:
    def run_days(table: Table, first: int, last: int) -> None:
        for day in range(first, last):
            random = np.random.default_rng(day)
            table.start_day(items(*range(4 * day, 4 * day + 4)), ttl=5)
            table.train(items(*random.integers(0, 4 * day + 4, 20)))

    uninterrupted, first_half = Table(ROWS), Table(ROWS)
    run_days(uninterrupted, 0, 20)
    run_days(first_half, 0, 10)
    resumed = Table(ROWS)
    state = {name: values.clone() for name, values in first_half.rows.state_dict().items()}
    resumed.rows.load_state_dict(state)
    resumed.last_days, resumed.day = first_half.last_days, first_half.day
    run_days(resumed, 10, 20)
    for name, values in uninterrupted.rows.state_dict().items():
        assert torch.equal(values, resumed.rows.state_dict()[name]), name


def test_rare_items_are_dropped_more_often(alone: object) -> None:
    rows = ManagedItemRows.all_free(ROWS, dropout=0.2, dropout_lookups=9.0)
    nothing = torch.zeros(0, dtype=torch.int64)
    rows.update(items(0, 1, 2), torch.zeros(ROWS), nothing, 0)
    rows.for_training(items(*[0] * 21, *[1] * 9000), False)
    probabilities = rows.drop_probability(rows(items(0, 1, 2)))
    torch.testing.assert_close(probabilities, torch.tensor([0.3, 0.2, 1.0]))
    torch.manual_seed(0)
    dropped = (rows.for_training(items(*[1] * 9000), False) == 0).float().mean()
    assert abs(dropped - 0.2) < 0.02
    equally = ManagedItemRows.all_free(ROWS, dropout=0.1)
    assert equally.drop_probability(torch.arange(3)).tolist() == pytest.approx([0.1] * 3)


def train_shares(rank: int, world: int, folder: str) -> None:
    """Each process reads a share of the same look-ups; all write the resulting state."""
    dist.init_process_group("gloo", f"file://{folder}/{world}", rank=rank, world_size=world)
    table = Table(ROWS, admission_count=2)
    for day in range(6):
        read = np.random.default_rng(day).integers(0, 30, 40)
        table.start_day(items(), ttl=3)
        table.train(items(*read[rank::world]))
        dist.all_reduce(table.last_days, dist.ReduceOp.MAX)
    torch.save(table.rows.state_dict(), f"{folder}/{world}-{rank}.pt")
    dist.destroy_process_group()


def test_the_map_is_the_same_on_each_of_any_number_of_processes(tmp_path: Path) -> None:
    for world in (1, 2):
        run(train_shares, (world, str(tmp_path)), world)
    alone, first, second = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("1-0", "2-0", "2-1")
    )
    assert (alone["row_items"] > NO_ITEM).any()
    for name, values in alone.items():
        assert torch.equal(values, first[name]) and torch.equal(values, second[name]), name
