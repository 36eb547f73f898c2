"""What campaigns bid for an item, for which goal, and who advertises, at each time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from ranking.auction import NO_ADVERTISER
from training.data.items import ItemTable

Int64 = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Names = npt.NDArray[np.object_]


@dataclass(frozen=True)
class Offers:
    """V versions of offers: item index, time from which each holds (µs), bid, goal or None.

    `advertisers` are codes that mean something within this object only.
    """

    items: Int64
    valid_from: Int64
    bids: Floats
    goals: Names
    advertisers: Int64

    def at(self, items: Int64, as_of: Int64) -> tuple[Floats, Names, Int64]:
        """Bids, goals and advertisers (B) that held strictly before `as_of` (B, µs).

        0, None and NO_ADVERTISER where no offer held.
        """
        times = np.unique(self.valid_from)
        span = len(times) + 1
        key = self.items * span + np.searchsorted(times, self.valid_from) + 1
        order = np.argsort(key, kind="stable")
        asked = items * span + np.searchsorted(times, as_of)
        found = np.searchsorted(key[order], asked, side="right") - 1
        newest = order[np.maximum(found, 0)] if len(order) else np.zeros(len(items), np.int64)
        held = found >= 0
        held[held] &= self.items[newest[held]] == items[held]
        bids, goals = np.zeros(len(items)), np.full(len(items), None, object)
        advertisers = np.full(len(items), NO_ADVERTISER)
        bids[held], goals[held] = self.bids[newest[held]], self.goals[newest[held]]
        advertisers[held] = self.advertisers[newest[held]]
        return bids, goals, advertisers


def offers_of(lake: Lake, items: ItemTable) -> Offers:
    """The offers in a lake's item attributes; none without an auction in the spec.

    A goal that the spec does not know counts as none.
    """
    if lake.spec.auction is None:
        nothing = np.zeros(0, np.int64)
        return Offers(nothing, nothing, np.zeros(0), np.zeros(0, object), nothing)
    contract = contracts.attributes(lake.spec, "item")
    advertiser = f"x_{lake.spec.auction.advertiser}"
    columns = ["item_id", "valid_from", "bid", "goal", "day"]
    columns += [advertiser] if lake.spec.auction.advertiser else []
    rows = arrow.snapshot(lake, contract).read(columns)
    index = pc.index_in(rows["item_id"], pa.array(items.names, pa.string()))
    rows = rows.append_column("item_ix", index).filter(pc.is_valid(index)).sort_by("day")
    known = pc.is_in(rows["goal"], pa.array(list(lake.spec.auction.pays_for), pa.string()))
    return Offers(
        rows["item_ix"].to_numpy().astype(np.int64),
        rows["valid_from"].to_numpy(),
        rows["bid"].fill_null(0.0).to_numpy(),
        np.asarray(pc.if_else(known, rows["goal"], None).combine_chunks(), object),
        _codes(rows[advertiser]) if advertiser in columns else np.full(len(rows), NO_ADVERTISER),
    )


def _codes(names: pa.ChunkedArray) -> Int64:
    """A number for each different name; NO_ADVERTISER where there is none."""
    indices = names.combine_chunks().dictionary_encode().indices
    return indices.fill_null(NO_ADVERTISER).to_numpy().astype(np.int64)
