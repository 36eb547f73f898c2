"""Time-to-live of embedding rows: expired rows are reset, completely and once, and no others."""

from datetime import date, timedelta

import torch
from hypothesis import given
from hypothesis import strategies as st

from features.schema import ITEM_TABLE, USER_TABLE
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sharding import (
    TorchrecTables,
    reset_rows,
    rowwise_adagrad_params,
    shard_tables,
)
from training.trainer.embedding_ttl import LastAccess

TODAY = date(2026, 3, 1)
ROWS, WIDTH = 8, 4


@given(st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS), st.integers(1, 9))
def test_a_row_expires_when_it_was_not_accessed_for_its_time_to_live(
    days_ago: list[int], ttl_days: int
) -> None:
    access = LastAccess.never_accessed(lambda ids: ids, {ITEM_TABLE: ROWS, USER_TABLE: ROWS + 1})
    for row, days in enumerate(days_ago):
        access.today = (TODAY - timedelta(days=days)).toordinal()
        access({USER_TABLE: torch.tensor([row, row])})
    expired = access.expired_rows(TODAY, ttl_days)
    assert expired[USER_TABLE].tolist() == [n for n, days in enumerate(days_ago) if days > ttl_days]
    assert not len(expired[ITEM_TABLE])
    assert not len(access.expired_rows(TODAY, None)[USER_TABLE])
    access.reset(expired)
    assert not len(access.expired_rows(TODAY, ttl_days)[USER_TABLE])


def test_a_reset_row_equals_a_new_one_and_others_do_not_change() -> None:
    rows = {ITEM_TABLE: ROWS, USER_TABLE: ROWS}
    with process_group():
        torch.manual_seed(0)
        tables = shard_tables(
            TorchrecTables(rows, WIDTH, (USER_TABLE,)), build_mesh(1), rowwise_adagrad_params(0.05)
        )
        ids = {name: torch.arange(ROWS) for name in rows}

        def step() -> None:
            losses = [v.square().sum() + v.sum() for v in tables(ids).values()]
            torch.autograd.backward(torch.stack(losses).sum())

        def embeddings() -> dict[str, torch.Tensor]:
            return {name: v.detach().clone() for name, v in tables(ids).items()}

        for _ in range(3):
            step()
        before = embeddings()
        expired = {ITEM_TABLE: torch.tensor([1, 4]), USER_TABLE: torch.tensor([2])}
        reset_rows(tables, expired)
        after = embeddings()
        for name, rows_reset in expired.items():
            changed = (before[name] != after[name]).any(1).nonzero().flatten()
            assert torch.equal(changed, rows_reset)
        assert not after[USER_TABLE][2].any() and after[ITEM_TABLE][1].any()
        step()
        # AdaGrad's first step on a row is the learning rate itself: its state was reset, too.
        first_step = (embeddings()[USER_TABLE][2] - after[USER_TABLE][2]).abs()
        torch.testing.assert_close(first_step, torch.full((WIDTH,), 0.05))
