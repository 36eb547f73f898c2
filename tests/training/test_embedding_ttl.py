"""Time-to-live of embedding rows: expired rows are reset, completely and once, and no others."""

from datetime import date, timedelta
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.system.warm_start import manifest_of, trained_gem
from etl.spec import load_spec
from features.encoding.scalar import MISSING_CATEGORY
from features.schema import ITEM_TABLE, USER_TABLE
from training.config import TrainConfig
from training.data.items import ItemTable
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sharding import (
    TorchrecTables,
    local_shards,
    reset_rows,
    rowwise_adagrad_params,
    shard_tables,
)
from training.model.config import GemOptions
from training.model.embeddings import UNKNOWN_VALUE_ROW
from training.trainer.embedding_ttl import NEVER, LastAccess
from training.trainer.table_day import start_table_day

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
        unknown = before[ITEM_TABLE][0]
        reset_rows(tables, expired, 0.0, {ITEM_TABLE: unknown})
        after = embeddings()
        for name, rows_reset in expired.items():
            changed = (before[name] != after[name]).any(1).nonzero().flatten()
            assert torch.equal(changed, rows_reset)
        assert not after[USER_TABLE][2].any() and torch.equal(after[ITEM_TABLE][1], unknown)
        step()
        # AdaGrad's first step on a row is the learning rate itself: its state was reset, too.
        first_step = (embeddings()[USER_TABLE][2] - after[USER_TABLE][2]).abs()
        torch.testing.assert_close(first_step, torch.full((WIDTH,), 0.05))


# Row 1 is that of unknown values in a vocabulary, and of some values in the other two.
START_ROWS = {
    "item_goal": UNKNOWN_VALUE_ROW,
    "user_country": MISSING_CATEGORY,
    "ctx_hour": MISSING_CATEGORY,
}


def test_expired_rows_read_as_unknown_or_missing_values_and_those_of_users_as_zero() -> None:
    model = GemOptions(user_hash_buckets=64)
    config = TrainConfig(scale="tiny", item_table_rows=64, embedding_ttl_days=30, model=model)
    no_items = SimpleNamespace(first_seen_on=lambda _day: np.zeros(0, np.int64))
    with process_group():
        state = trained_gem(manifest_of(load_spec(SIMULATOR_SPEC), config))
        tables = {
            name: local_shards(state.tables.state_dict()[f"collection.embeddings.{name}.weight"])[
                0
            ].rows
            for name in (*START_ROWS, USER_TABLE)
        }
        before = {name: rows.clone() for name, rows in tables.items()}
        expired = {name: state.last_access.last_days[name] > NEVER for name in START_ROWS}
        assert before[USER_TABLE].any() and expired["user_country"].sum() > 10
        start_table_day(state, cast("ItemTable", no_items), TODAY)
        assert not tables[USER_TABLE].any()
    for name, start in START_ROWS.items():
        is_expired = expired[name]
        assert is_expired[1] and is_expired.sum() > 2
        assert (tables[name][is_expired] == before[name][start]).all(), name
        assert torch.equal(tables[name][~is_expired], before[name][~is_expired])
