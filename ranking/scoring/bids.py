"""Bids on items, with campaign goals and advertisers, as of a time."""

from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Float64, Int64
from etl.tables.declared_columns import auction_columns
from etl.tables.lake import Lake
from features.ragged import latest_before
from ranking.inputs.attribute_versions import readable_versions
from ranking.scoring.candidates import NO_ADVERTISER, CandidateBids
from training.data.items import ItemTable

ObjectArray = npt.NDArray[np.object_]


@dataclass(frozen=True)
class BidTable:
    """V versions of bids.

    Attributes:
        item_index: The item of each version (V).
        valid_from: The start of validity of each version (V), in µs.
        bids: The bid of each (V).
        goals: The campaign goal of each, or None (V).
        target_roas: The target return on ad spend of each, 0 for none (V).
        advertisers: Codes of advertisers (V), which are comparable within this object only.
    """

    item_index: Int64
    valid_from: Int64
    bids: Float64
    goals: ObjectArray
    target_roas: Float64
    advertisers: Int64

    def as_of(self, item_index: Int64, request_times: Int64) -> CandidateBids:
        """The bids (B) of items (B) by the latest versions before `request_times` (B, µs).

        An item without a version has no bid, no goal and no advertiser.
        """
        latest = latest_before(self.item_index, self.valid_from, item_index, request_times)
        has_bid = latest >= 0
        version = latest[has_bid]
        bids, target_roas = np.zeros(len(item_index)), np.zeros(len(item_index))
        goals = np.full(len(item_index), None, object)
        advertisers = np.full(len(item_index), NO_ADVERTISER)
        bids[has_bid], target_roas[has_bid] = self.bids[version], self.target_roas[version]
        goals[has_bid], advertisers[has_bid] = self.goals[version], self.advertisers[version]
        return CandidateBids(bids, list(goals), target_roas, advertisers)


def load_bids(lake: Lake, items: ItemTable, first_day: date) -> BidTable:
    """The bids that requests of a day or later can read; none without an auction in the spec.

    A goal that is not in the spec counts as none.
    """
    auction = lake.spec.auction
    if auction is None:
        empty = np.zeros(0, np.int64)
        return BidTable(empty, empty, np.zeros(0), np.zeros(0, object), np.zeros(0), empty)
    # Impressions that land on a day may be requests of days before it. A request at midnight reads
    # what was valid on the day before.
    earliest_request = first_day - timedelta(days=lake.spec.allowed_lateness_days + 1)
    columns = ["item_id", "valid_from", *auction_columns(lake.spec), "day"]
    if auction.advertiser:
        columns.append(f"attr_{auction.advertiser}")
    rows = readable_versions(lake, "item", earliest_request, columns=columns)
    index = pc.index_in(rows["item_id"], items.item_ids)
    rows = rows.append_column("item_index", index).filter(pc.is_valid(index)).sort_by("day")
    is_known_goal = pc.is_in(rows["goal"], pa.array(list(auction.goal_objectives), pa.string()))
    goals = pc.if_else(is_known_goal, rows["goal"], None)
    target_roas = np.zeros(len(rows))
    if auction.target_roas:
        target_roas = rows["target_roas"].fill_null(0.0).to_numpy()
    advertisers = np.full(len(rows), NO_ADVERTISER)
    if auction.advertiser:
        advertisers = _encode_advertisers(rows[f"attr_{auction.advertiser}"])
    return BidTable(
        rows["item_index"].to_numpy().astype(np.int64),
        rows["valid_from"].to_numpy(),
        rows["bid"].fill_null(0.0).to_numpy(),
        np.asarray(goals.combine_chunks(), object),
        target_roas,
        advertisers,
    )


def _encode_advertisers(names: pa.ChunkedArray) -> Int64:
    """A code for each distinct name; NO_ADVERTISER if there is none."""
    codes = names.combine_chunks().dictionary_encode().indices.fill_null(NO_ADVERTISER)
    return np.asarray(codes, np.int64)
