"""Laws of rows that start anew: only those, wholly, and once."""

from datetime import date, timedelta

import torch
from hypothesis import given
from hypothesis import strategies as st

from features.inputs import ITEM, USER
from training.loop.expiry import Asked
from training.model.lookup import ItemRows
from training.parallel.mesh import mesh_of
from training.parallel.processes import process_group
from training.parallel.sparse import TorchrecTables, adagrad, renew, shard

TODAY = date(2026, 3, 1)
ROWS, WIDTH = 8, 4


def everything(items: int) -> ItemRows:
    return ItemRows(ROWS, torch.ones(items, dtype=torch.bool))


@given(st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS), st.integers(1, 9))
def test_a_row_is_gone_once_it_was_not_asked_for_in_so_many_days(
    ago: list[int], after_days: int
) -> None:
    asked = Asked.never(lambda ids: ids, {ITEM: ROWS, USER: ROWS + 1})
    for row, days in enumerate(ago):
        asked.today = (TODAY - timedelta(days=days)).toordinal()
        asked({USER: torch.tensor([row, row])})
    none, ring = torch.arange(0), everything(ROWS)
    gone = asked.gone(none, ring, TODAY, after_days)
    assert gone[USER].tolist() == [row for row, days in enumerate(ago) if days > after_days]
    assert not len(gone[ITEM]) and not len(asked.gone(none, ring, TODAY, None)[USER])
    asked.forget(gone)
    assert not len(asked.gone(none, ring, TODAY, after_days)[USER])


def test_an_item_that_takes_the_place_of_an_old_one_starts_anew() -> None:
    """Of the new ones 9 and 10 come round to rows 2 and 3; 7 has a row of its own."""
    asked = Asked.never(lambda ids: ids, {ITEM: ROWS})
    asked.today = TODAY.toordinal() - 1
    asked({ITEM: torch.arange(7)})
    gone = asked.gone(torch.tensor([7, 9, 10]), everything(11), TODAY, None)
    assert gone[ITEM].tolist() == [2, 3]


def test_a_new_row_is_as_one_never_learned_and_the_others_stay_to_the_last_bit() -> None:
    rows = {ITEM: ROWS, USER: ROWS}
    with process_group():
        torch.manual_seed(0)
        tables = shard(TorchrecTables(rows, WIDTH, (USER,)), mesh_of(1), adagrad(0.05))
        ids = {name: torch.arange(ROWS) for name in rows}

        def learn() -> None:
            sum(v.square().sum() + v.sum() for v in tables(ids).values()).backward()

        def told() -> dict[str, torch.Tensor]:
            return {name: v.detach().clone() for name, v in tables(ids).items()}

        for _ in range(3):
            learn()
        before = told()
        gone = {ITEM: torch.tensor([1, 4]), USER: torch.tensor([2])}
        renew(tables, gone)
        after = told()
        for name, here in gone.items():
            changed = (before[name] != after[name]).any(1).nonzero().flatten()
            assert torch.equal(changed, here)
        assert not after[USER][2].any() and after[ITEM][1].any()
        learn()
        first = (told()[USER][2] - after[USER][2]).abs()
        torch.testing.assert_close(first, torch.full((WIDTH,), 0.05))
