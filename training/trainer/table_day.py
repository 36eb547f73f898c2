"""What happens to the embedding tables before the first batch of a day."""

import logging
from datetime import date, timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from features.schema import ITEM_TABLE
from training.data.items import ItemTable
from training.distributed.sharding import decay_accumulators, reset_rows
from training.trainer.state import TrainState

log = logging.getLogger(__name__)


def start_table_day(state: TrainState, items: ItemTable, day: date) -> None:
    """Evict and admit items, reset expired rows, and decay AdaGrad's accumulators.

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
        {ITEM_TABLE: _unknown_item(state)},
    )
    if config.embedding_accumulator_decay < 1 and not is_first_day:
        decay_accumulators(
            state.tables, config.embedding_accumulator_decay, state.initial_accumulator
        )


@torch.no_grad()
def _unknown_item(state: TrainState) -> Tensor:
    """The vector (d) of the unknown item, on all processes."""
    nothing = state.item_rows.lookups.new_zeros(0)
    ids = dict.fromkeys(state.last_access.last_days, nothing) | {ITEM_TABLE: nothing.new_zeros(1)}
    vector: Tensor = state.tables(ids)[ITEM_TABLE][0]
    return vector
