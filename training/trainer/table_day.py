"""What happens to the embedding tables before the first batch of a day."""

import logging
from collections.abc import Mapping
from datetime import date, timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from etl.spec.attributes import Attribute, Attributes, CategoricalAttribute
from features.encoding.scalar import MISSING_CATEGORY
from features.schema import ITEM_TABLE, USER_TABLE
from training.data.items import ItemTable
from training.distributed.sharding import decay_accumulators, reset_rows
from training.model.embeddings import UNKNOWN_VALUE_ROW
from training.trainer.state import TrainState

log = logging.getLogger(__name__)


def start_table_day(state: TrainState, items: ItemTable, day: date) -> None:
    """Evict and admit items, reset expired rows, and decay AdaGrad's accumulators.

    Rows of new items start as that of the unknown item, expired rows of a vocabulary as that of
    unknown values, those of other attributes as that of missing values, and expired rows of users
    from zero.

    All processes must call this, with the same random seed. Requires the counts of all processes:
    `TrainState.all_reduce_counts`.
    """
    config, last_access = state.manifest.training, state.last_access
    ttl = config.embedding_ttl_days
    expired = last_access.expired_rows(day, ttl)
    item_expired = expired.pop(ITEM_TABLE)
    is_first_day = day == state.manifest.first_training_day
    new_items = items.seen_by(day).nonzero()[0] if is_first_day else items.first_seen_on(day)
    changes = state.item_rows.update(
        torch.from_numpy(new_items),
        last_access.last_days[ITEM_TABLE],
        item_expired,
        (day - timedelta(days=ttl)).toordinal() if ttl else 0,
    )
    if changes.not_admitted and dist.get_rank() == 0:
        log.warning(
            "%s: %d items share the row of the unknown item, because the table of %d rows is full "
            "of items that were read on the last day: raise --item-table-rows",
            day, changes.not_admitted, config.item_table_rows,
        )  # fmt: skip
    last_access.reset(expired | {ITEM_TABLE: changes.evicted})
    last_access.last_days[ITEM_TABLE][changes.assigned] = day.toordinal()
    reset_rows(
        state.tables,
        expired | {ITEM_TABLE: changes.assigned},
        state.initial_accumulator,
        _start_vectors(state),
    )
    if config.embedding_accumulator_decay < 1 and not is_first_day:
        decay_accumulators(
            state.tables, config.embedding_accumulator_decay, state.initial_accumulator
        )


@torch.no_grad()
def _start_vectors(state: TrainState) -> dict[str, Tensor]:
    """The vectors (d) that reset rows start from by table, on all processes.

    Only a vocabulary has a row of unknown values: among hashes and parts of the local time, row 1
    is that of some values. The table of users has no vector: its rows start from zero.
    """
    row = state.item_rows.lookups.new_ones(1)
    ids = dict.fromkeys(state.last_access.last_days, MISSING_CATEGORY * row)
    ids |= dict.fromkeys(_vocabulary_tables(state.manifest.attributes), UNKNOWN_VALUE_ROW * row)
    ids[ITEM_TABLE] = 0 * row
    if USER_TABLE in ids:
        ids[USER_TABLE] = row[:0]
    vectors: dict[str, Tensor] = state.tables(ids)
    return {name: rows[0] for name, rows in vectors.items() if name != USER_TABLE}


def _vocabulary_tables(attributes: Attributes) -> list[str]:
    """The tables of attributes with a vocabulary."""
    groups: dict[str, Mapping[str, Attribute]] = {
        "user": attributes.user, "item": attributes.item, "ctx": attributes.context,
    }  # fmt: skip
    return [
        f"{prefix}_{name}"
        for prefix, group in groups.items()
        for name, attribute in group.items()
        if isinstance(attribute, CategoricalAttribute) and attribute.vocabulary is not None
    ]
