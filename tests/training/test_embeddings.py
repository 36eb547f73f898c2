"""Embedding tables and the modules that turn features into rows."""

import torch

from etl.tables.schemas import RESERVED_ITEM_INDICES
from features.recency import NO_EVENT_AGE, PHASE_BUCKETS
from features.schema import USER_TABLE
from training.data.batch import Batch
from training.data.matching import match_by_attribute, recency_features
from training.data.reader import ExampleReader
from training.distributed.sharding import TorchrecTables
from training.model.embeddings import (
    NO_ITEM,
    GroupedFeatureRows,
    ItemRowMap,
    TorchEmbeddingTables,
    item_row_map_up_to,
    lookup_embeddings,
    table_sizes,
)
from training.model.history.search import phase_bucket

USERS = 64
DAY = 86_400


def test_items_have_rows_of_their_own_and_others_row_0() -> None:
    rows = ItemRowMap(torch.tensor([NO_ITEM, 9, NO_ITEM, 30, 2]))
    assert rows(torch.tensor([0, 1, 2, 3, 9, 29, 30, 31, 10**9])).tolist() == [
        0, 0, 4, 0, 1, 0, 3, 0, 0
    ]  # fmt: skip
    assert ItemRowMap(torch.full((4,), NO_ITEM))(torch.arange(9)).eq(0).all()
    first = RESERVED_ITEM_INDICES
    assert item_row_map_up_to(first + 3)(torch.arange(first + 5)).tolist() == [
        *[0] * first, *range(first, first + 3), 0, 0
    ]  # fmt: skip


def test_phase_is_the_age_of_the_last_event_relative_to_the_mean_gap() -> None:
    """Events of type 1 were 25, 18, 11 and 7 days ago: phase 7 / 6; one event has no gap."""
    ages, types = torch.tensor([25, 18, 11, 7, 3]) * DAY, torch.tensor([1, 1, 1, 1, 2])
    matches = match_by_attribute(
        torch.tensor([5, 9]), torch.full((5,), 5), torch.tensor([0, 0]), torch.tensor([0, 5])
    )
    recency = recency_features(matches, types, ages, 3)
    assert matches.attribute_values.tolist() == [5, 9]
    assert recency.last_age[:, 1:].tolist() == [[7 * DAY, 3 * DAY], [NO_EVENT_AGE, NO_EVENT_AGE]]
    assert recency.span[:, 1:].tolist() == [[18 * DAY, 0], [0, 0]]
    assert recency.gap_count[:, 1:].tolist() == [[3, 0], [0, 0]]
    bucket = phase_bucket(recency.last_age, recency.span / 3)
    assert bucket[0, 1] == PHASE_BUCKETS // 2 + 3
    assert bucket[0, 2] == bucket[1, 1] == PHASE_BUCKETS
    slower = recency_features(matches, types, 3 * ages, 3)
    assert torch.equal(phase_bucket(slower.last_age, slower.span / 3), bucket)


def test_low_cardinality_features_share_rows_and_others_have_their_own() -> None:
    sizes = {"age": 8, "city": 500, "sex": 3, "device": 5}
    vectors = {name: torch.randn(6, 4) for name in sizes}
    separate = GroupedFeatureRows(sizes, 4, 0, 2)
    assert all(row is vectors[n] for row, n in zip(separate(vectors), sizes, strict=True))
    grouped = GroupedFeatureRows(sizes, 4, 100, 2)
    rows = grouped(vectors)
    assert grouped.rows == len(rows) == 3 and rows[0] is vectors["city"]
    assert {r.shape for r in rows} == {(6, 4)}
    for name in ("age", "sex", "device"):
        changed = grouped(vectors | {name: vectors[name] + 1})
        assert not torch.allclose(torch.stack(changed[1:]), torch.stack(rows[1:]))
    assert not GroupedFeatureRows({"age": 8, "sex": 3}, 4, 100, 2).low_cardinality


def test_users_are_looked_up_by_hash_and_untrained_rows_are_zero(
    reader: ExampleReader, batch: Batch
) -> None:
    items, positions = item_row_map_up_to(len(reader.items)), torch.arange(3)
    tables = TorchrecTables(
        table_sizes(reader.features, len(reader.items), USERS), 16, (USER_TABLE,), device="cpu"
    )
    users = lookup_embeddings(tables, batch, positions, items, user_buckets=USERS).users
    assert not users[USER_TABLE].any() and users["user_country"].any()
    tables.collection.embeddings[USER_TABLE].weight.data[:, 0] = torch.arange(USERS)
    users = lookup_embeddings(tables, batch, positions, items, user_buckets=USERS).users
    assert torch.equal(users[USER_TABLE][:, 0], (batch.user_hash % USERS).float())


def test_without_user_buckets_there_is_no_user_table(reader: ExampleReader, batch: Batch) -> None:
    tables = TorchEmbeddingTables(table_sizes(reader.features, len(reader.items)), 16)
    items = item_row_map_up_to(len(reader.items))
    assert USER_TABLE not in lookup_embeddings(tables, batch, torch.arange(3), items).users
