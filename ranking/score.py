"""Batch scoring: what a surface's ranker gives every candidate of some days, as a table."""

from datetime import date

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from etl.errors import UserError
from etl.spec.units import MICROS, each_day
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from ranking.auction import expected_value
from ranking.offers import Offers, offers_of
from ranking.package.ranker import Ranker, load
from ranking.student.batches import Assembly
from ranking.train import ranker_folder
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING
from training.knowledge.earlier import Earlier, earlier


def score_days(lake: Lake, surface: str, days: tuple[date, date], batch_rows: int = 2048) -> int:
    """Replace a surface's `scores` of the given days; returns the rows written.

    Raises UserError where the surface has no ranker, or one of another spec, or a day no examples.
    """
    ranker = load(ranker_folder(lake.root, surface))
    assembly = assembly_of(ranker, lake)
    reader = assembly.reader
    reader.require(*days)
    offers = offers_of(lake, reader.items)
    contract = contracts.scores(lake.spec)
    parts = []
    for day in tqdm(list(each_day(*days)), desc=f"score {surface}", unit="day", disable=None):
        for batch in reader.batches([day], EVERYTHING, batch_rows, Shuffle(None)):
            parts.append(_rows(ranker, assembly, offers, batch, day))
    schema = arrow_schema(contract)
    rows = pa.concat_tables(parts) if parts else schema.empty_table()
    where = f"surface = '{surface}' AND day >= '{days[0]}' AND day <= '{days[1]}'"
    arrow.replace(
        lake, contract, rows, where, {**reader.versions, "ranker": ranker.manifest.version}
    )
    return rows.num_rows


def assembly_of(ranker: Ranker, lake: Lake) -> Assembly:
    """What makes a ranker's inputs of a lake's tables: its surface's, request by request.

    Raises UserError where the lake's tables are of another spec.
    """
    manifest = ranker.manifest
    if manifest.spec.hash != lake.spec.hash:
        raise UserError(
            f"the ranker of {manifest.surface} was trained under spec {manifest.spec.hash}, "
            f"now it is {lake.spec.hash}: train it again"
        )
    own = Lake(lake.root, manifest.spec)
    reader = Reader.newest(own, manifest.sequence, manifest.max_length, manifest.surface)
    known = earlier(own) if manifest.before else Earlier.nothing()
    return Assembly(reader, known, manifest.events, manifest.before, manifest.user_rows)


def _rows(ranker: Ranker, assembly: Assembly, offers: Offers, batch: Batch, day: date) -> pa.Table:
    """What no campaign pays for is worth nothing: an item's attributes may be late or missing."""
    spec, surface = ranker.manifest.spec, ranker.manifest.surface
    item = batch.item.numpy()
    inputs = assembly(batch)
    p = ranker.probabilities(ranker.state(inputs.requests), inputs.candidates)[inputs.rows.there]
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
        "item_id": assembly.reader.items.names[item],
        "ranker": np.full(len(item), ranker.manifest.version, object),
        **{f"p_{name}": p[:, i] for i, name in enumerate(spec.objectives)},
        "bid": bids,
        "expected_value": value,
        "place": place,
        "surface": np.full(len(item), surface, object),
        "day": np.full(len(item), day, object),
    }
    return pa.table(columns, schema=arrow_schema(contracts.scores(spec)))
