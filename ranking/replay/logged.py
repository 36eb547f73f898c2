"""Logged requests whose slots and propensities are all there, beside a ranker's order."""

from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.spec.units import each_day
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from ranking.replay.places import MOST, place_probabilities
from ranking.replay.scored import Scored

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Logged:
    """B ads by request and slot: what was scored, places in the log and otherwise, from 0.

    `chances` (B) are those of the logged places; `left_out` counts requests.
    """

    scored: Scored
    places: Ints
    other: Ints
    chances: Floats
    left_out: int


def logged(lake: Lake, days: tuple[date, date], scored: Scored) -> Logged:
    """The requests that can be put in another order.

    Those of which the log lacks a slot, a propensity or a final label, or with more ads than can be
    gone through, are left out. Raises UserError where none is left.
    """
    position, propensity = _slots(lake, days, scored.impressions)
    order = np.lexsort((position, scored.request))
    scored = scored.at(order)
    position, propensity = position[order], propensity[order]
    _, first, size = np.unique(scored.request, return_index=True, return_counts=True)
    places = np.arange(len(order)) - np.repeat(first, size)
    whole = (position - position.min() == places) & np.isfinite(propensity) & scored.final
    whole &= np.repeat(size <= MOST, size)
    kept = np.repeat(np.logical_and.reduceat(whole, first), size)
    if not kept.any():
        raise UserError("no request has all its slots, propensities and labels in the log")
    left_out = len(first) - int(kept[first].sum())
    return _of(scored.at(kept), propensity[kept], left_out)


def _of(scored: Scored, propensity: Floats, left_out: int) -> Logged:
    _, first, size = np.unique(scored.request, return_index=True, return_counts=True)
    start = np.repeat(first, size)
    order = np.lexsort((-scored.values, scored.out, scored.request))
    other = np.empty(len(order), np.int64)
    other[order] = np.arange(len(order)) - start
    chances = np.empty(len(order))
    for ads in np.unique(size):
        at = first[size == ads][:, None] + np.arange(ads)
        chances[at] = np.diagonal(place_probabilities(propensity[at]), axis1=1, axis2=2)
    return Logged(scored, np.arange(len(order)) - start, other, chances, left_out)


def _slots(
    lake: Lake, days: tuple[date, date], impressions: npt.NDArray[np.object_]
) -> tuple[Ints, Floats]:
    """Positions and propensities (B) of impressions, as they were logged."""
    stored = arrow.snapshot(lake, contracts.impressions(lake.spec))
    rows = stored.read(["impression_id", "position", "propensity"], day=list(each_day(*days)))
    at = pc.index_in(pa.array(impressions, pa.string()), rows["impression_id"].combine_chunks())
    found = rows.take(at)
    if found["position"].null_count or found["propensity"].null_count == len(found):
        raise UserError(f"the logs of {lake.spec.name} tell no positions and propensities of ads")
    return found["position"].to_numpy().astype(np.int64), found["propensity"].to_numpy()
