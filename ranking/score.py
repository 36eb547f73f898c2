"""Batch scoring: what a surface's ranker gives every candidate of some days, as a table."""

from datetime import date

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from etl.spec.units import MICROS, each_day
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from ranking import ranker
from ranking.auction import expected_value
from ranking.offers import Offers, offers_of
from ranking.ranker import Ranker
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING


def score_days(lake: Lake, surface: str, days: tuple[date, date], batch_rows: int = 2048) -> int:
    """Replace a surface's `scores` of the given days; returns the rows written.

    Raises UserError where the surface has no ranker, or one of another spec, or a day no examples.
    """
    loaded = ranker.load(ranker.ranker_folder(lake.root, surface))
    reader = loaded.reader(lake)
    reader.require(*days)
    offers = offers_of(lake, reader.items)
    contract = contracts.scores(lake.spec)
    parts = []
    for day in tqdm(list(each_day(*days)), desc=f"score {surface}", unit="day", disable=None):
        for batch in reader.batches([day], EVERYTHING, batch_rows, Shuffle(None)):
            parts.append(_rows(loaded, reader, offers, batch, day))
    schema = arrow_schema(contract)
    rows = pa.concat_tables(parts) if parts else schema.empty_table()
    where = f"surface = '{surface}' AND day >= '{days[0]}' AND day <= '{days[1]}'"
    arrow.replace(
        lake, contract, rows, where, {**reader.versions, "ranker": loaded.manifest.version}
    )
    return rows.num_rows


def _rows(loaded: Ranker, reader: Reader, offers: Offers, batch: Batch, day: date) -> pa.Table:
    """What no campaign pays for is worth nothing: an item's attributes may be late or missing."""
    spec, surface = loaded.manifest.spec, loaded.manifest.surface
    item = batch.item.numpy()
    p = loaded.probabilities(batch)
    request = batch.request.numpy()
    bids, goals = offers.at(item, batch.as_of.numpy()[request] * MICROS["s"])
    known = list(spec.auction.pays_for) if spec.auction else [None]
    paid = np.isin(goals.astype(str), np.array(known, object).astype(str))
    value = np.zeros(len(item))
    value[paid] = expected_value(spec, surface, p[paid], list(bids[paid]), list(goals[paid]))
    best = np.lexsort((-value, request))
    place = np.empty(len(best), np.int32)
    place[best] = np.arange(len(best)) - np.searchsorted(request[best], request[best])
    columns = {
        "impression_id": batch.impressions,
        "request_id": batch.requests[request],
        "item_id": reader.items.names[item],
        "ranker": np.full(len(item), loaded.manifest.version, object),
        **{f"p_{name}": p[:, i] for i, name in enumerate(spec.objectives)},
        "bid": bids,
        "expected_value": value,
        "place": place,
        "surface": np.full(len(item), surface, object),
        "day": np.full(len(item), day, object),
    }
    return pa.table(columns, schema=arrow_schema(contracts.scores(spec)))
