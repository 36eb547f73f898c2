"""Rows of the item table: assigned to items when they are admitted, and freed by eviction.

The semantics of managed collision (torchrec's MCH), on any device: below the capacity no two items
share a row, and an item without a row reads row 0, that of the unknown item. The map changes at the
start of a day only, from counts of all processes, so that it is the same on each of them. N rows,
n items of a batch.
"""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from etl.tables.schemas import RESERVED_ITEM_INDICES
from training.model.embeddings import NO_ITEM, UNKNOWN_ITEM_ROW, ItemRowMap

COMPACT_EVERY = 64  # steps between summations of the look-ups of items without a row


@dataclass(frozen=True)
class WaitingItems:
    """Items without a row: how often they were looked up, and the ordinal of the last day of that.

    Attributes:
        items: Item indexes (N), each once; NO_ITEM where there are fewer.
        counts: Look-ups (N).
        days: Ordinals of days (N).
    """

    items: Tensor
    counts: Tensor
    days: Tensor

    @classmethod
    def none(cls, capacity: int) -> "WaitingItems":
        """No items yet, and room for `capacity` of them."""
        return cls(torch.full((capacity,), NO_ITEM), *torch.zeros(2, capacity, dtype=torch.int64))

    def add(self, items: Tensor, counts: Tensor, day: int) -> "WaitingItems":
        """Add look-ups of items (n) on a day; the most frequent items are kept, then the newest."""
        all_items, position = torch.unique(torch.cat((self.items, items)), return_inverse=True)
        days = torch.cat((self.days, torch.full_like(items, day)))
        zeros = torch.zeros_like(all_items)
        summed = zeros.index_add(0, position, torch.cat((self.counts, counts)))
        latest = zeros.scatter_reduce(0, position, days, "amax")
        return self._most_frequent(all_items, summed, latest)

    def remove(self, is_removed: Tensor) -> "WaitingItems":
        """Without the items at some positions (N)."""
        keep = ~is_removed
        return self._most_frequent(self.items[keep], self.counts[keep], self.days[keep])

    def _most_frequent(self, items: Tensor, counts: Tensor, days: Tensor) -> "WaitingItems":
        items, by_item = items.sort(descending=True)  # of equal counts the newest items are kept
        is_item = items > NO_ITEM
        order = torch.where(is_item, counts[by_item], -1).argsort(descending=True, stable=True)
        order = order[: len(self.items)]
        order = order[is_item[order]]
        with self.items.device:
            kept = WaitingItems.none(len(self.items))
        kept.items[: len(order)] = items[order]
        kept.counts[: len(order)] = counts[by_item][order]
        kept.days[: len(order)] = days[by_item][order]
        return kept


class RowChanges(NamedTuple):
    """What an update changed.

    Attributes:
        evicted: Rows (n) that were taken from their items.
        assigned: Rows (n) that were given to items.
        not_admitted: Number of items that should have a row, for which the table has no room.
    """

    evicted: Tensor
    assigned: Tensor
    not_admitted: int


@dataclass
class ManagedItemRows:
    """The map from items to rows, and the counts that its next update depends on.

    Between updates the map is a pure function. Counts of this process are kept apart until
    `all_reduce` adds them to those of all processes.

    Attributes:
        map: The row of each item.
        lookups: Look-ups (N) of each row by the first pass over each day since it was assigned.
        waiting: Items that were looked up without a row.
        admission_count: Look-ups after which an item gets a row; 1: new items get one at once.
        dropout: Probability that training reads an item as the unknown item, which trains row 0
            and keeps the model from relying on ids alone.
        dropout_lookups: Number a of look-ups: an item with n look-ups is dropped with probability
            a / (a + n), if that is more than `dropout`.
    """

    map: ItemRowMap
    lookups: Tensor
    waiting: WaitingItems
    admission_count: int = 1
    dropout: float = 0.0
    dropout_lookups: float = 0.0
    _new_lookups: Tensor = field(init=False)
    _unknown: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._new_lookups = torch.zeros_like(self.lookups)

    @classmethod
    def all_free(cls, num_rows: int, **options: float) -> "ManagedItemRows":
        """A table of which no item has a row yet."""
        rows = ItemRowMap(torch.full((num_rows,), NO_ITEM))
        lookups = torch.zeros(num_rows, dtype=torch.int64)
        return cls(rows, lookups, WaitingItems.none(num_rows), **options)  # type: ignore[arg-type]

    def __call__(self, items: Tensor) -> Tensor:
        """Map item indexes (n) to rows (n)."""
        return self.map(items)

    def for_training(self, items: Tensor, is_repeated: bool) -> Tensor:
        """Map item indexes (n) to rows (n), count the look-ups, and drop some items at random.

        Look-ups that are repeated, in a further pass over a day, do not count.
        """
        rows = self.map(items)
        if not is_repeated:
            self._count(items, rows)
        if not (self.dropout or self.dropout_lookups):
            return rows
        is_dropped = torch.rand(len(rows), device=rows.device) < self.drop_probability(rows)
        return torch.where(is_dropped, UNKNOWN_ITEM_ROW, rows)

    def _count(self, items: Tensor, rows: Tensor) -> None:
        """Count the look-ups of items (n), which have rows (n)."""
        self._new_lookups.index_add_(0, rows, torch.ones_like(rows))
        unknown = torch.where(rows == UNKNOWN_ITEM_ROW, items, NO_ITEM)
        self._unknown.append((unknown, torch.ones_like(items)))
        if len(self._unknown) >= COMPACT_EVERY:
            self._unknown = [self._count_unknown()]

    def drop_probability(self, rows: Tensor) -> Tensor:
        """The probability (n) with which training reads the items of rows (n) as unknown."""
        if not self.dropout_lookups:
            return torch.full(rows.shape, self.dropout, device=rows.device)
        lookups = (self.lookups[rows] + self._new_lookups[rows]).float()
        return (self.dropout_lookups / (self.dropout_lookups + lookups)).clamp(min=self.dropout)

    def _count_unknown(self) -> tuple[Tensor, Tensor]:
        """The items without a row that this process looked up, each once, and their look-ups."""
        items, counts = (torch.cat(parts) for parts in zip(*self._unknown, strict=True))
        unique, position = torch.unique(items, return_inverse=True)
        summed = torch.zeros_like(unique).index_add(0, position, counts)
        is_item = unique >= RESERVED_ITEM_INDICES
        return unique[is_item], summed[is_item]

    def all_reduce(self, day: int) -> None:
        """Add up the look-ups of a day by all processes; a collective call."""
        dist.all_reduce(self._new_lookups)
        self.lookups += self._new_lookups
        self._new_lookups.zero_()
        nothing = self.lookups.new_zeros(0)
        items, counts = self._count_unknown() if self._unknown else (nothing, nothing)
        self._unknown.clear()
        items, counts = _gather(torch.stack((items, counts)))
        self.waiting = self.waiting.add(items, counts, day)

    def update(
        self, new_items: Tensor, last_days: Tensor, expired_rows: Tensor, oldest_day: int
    ) -> RowChanges:
        """Evict and admit items before a day; the same on all processes after `all_reduce`.

        Expired rows are freed. New and waiting items then take free rows, and after that the rows
        with the oldest last access (of these, the fewest look-ups), but none that was accessed on
        the latest day in `last_days`: with too few rows, items would only take turns.

        Args:
            new_items: Items (n) that were seen for the first time; without a row until now.
            last_days: Ordinal of the day of each row's last access (N).
            expired_rows: Rows whose time to live is over.
            oldest_day: Ordinal of the oldest day whose look-ups of waiting items count.
        """
        row_items = self.map.row_items.clone()
        new_items = new_items.to(row_items.device)
        expired = expired_rows[row_items[expired_rows] > NO_ITEM]
        row_items[expired] = NO_ITEM
        self.waiting = self.waiting.remove(self.waiting.days < oldest_day)
        admitted = self._admitted(new_items)
        free = (row_items == NO_ITEM).nonzero().flatten()
        free = free[free > 0]
        is_idle = (row_items > NO_ITEM) & (last_days < last_days.max())
        idle = is_idle.nonzero().flatten()
        idle = idle[torch.argsort(self.lookups[idle], stable=True)]
        idle = idle[torch.argsort(last_days[idle], stable=True)]
        rows = torch.cat((free, idle))[: len(admitted)]
        evicted = torch.cat((expired, rows[row_items[rows] > NO_ITEM]))
        row_items[rows] = admitted[: len(rows)]
        self.map = ItemRowMap(row_items)
        self.lookups[torch.cat((evicted, rows))] = 0
        self.waiting = self.waiting.remove(self.map(self.waiting.items) > 0)
        return RowChanges(evicted, rows, len(admitted) - len(rows))

    def _admitted(self, new_items: Tensor) -> Tensor:
        """Items to give a row to: new items, the newest first, then the most frequent waiting."""
        waiting = self.waiting.items[self.waiting.counts >= self.admission_count]
        waiting = waiting[waiting > NO_ITEM]
        if self.admission_count > 1:
            return waiting
        new_items = new_items[(self.map(new_items) == 0) & (new_items >= RESERVED_ITEM_INDICES)]
        new_items = new_items.sort(descending=True).values
        return torch.cat((new_items, waiting[~torch.isin(waiting, new_items)]))

    def state_dict(self) -> dict[str, Tensor]:
        """All state that the next update depends on, after `all_reduce`."""
        waiting = {f"waiting_{f.name}": getattr(self.waiting, f.name) for f in fields(WaitingItems)}
        return {"row_items": self.map.row_items, "lookups": self.lookups, **waiting}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a state."""
        self.map, self.lookups = ItemRowMap(state["row_items"]), state["lookups"]
        waiting = {f.name: state[f"waiting_{f.name}"] for f in fields(WaitingItems)}
        self.waiting = WaitingItems(**waiting)


def _gather(columns: Tensor) -> Tensor:
    """The columns (2, n) of all processes, one after the other; a collective call."""
    world = dist.get_world_size()
    if world == 1:
        return columns
    sizes = [columns.new_zeros(1) for _ in range(world)]
    dist.all_gather(sizes, columns.new_tensor([columns.shape[1]]))
    longest = int(torch.cat(sizes).max())
    padded = columns.new_full((2, longest), NO_ITEM)
    padded[:, : columns.shape[1]] = columns
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    return torch.cat(
        [part[:, : int(size)] for part, size in zip(gathered, sizes, strict=True)], dim=1
    )
