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
from ranking.auction import OUT, Auction
from ranking.offers import Offers, offers_of
from ranking.package.ranker import Ranker, load
from ranking.package.versions import answering
from ranking.student.batches import Assembly
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING
from training.knowledge.earlier import Earlier, earlier

SCORE_ROWS = 2048


def score_days(lake: Lake, surface: str, days: tuple[date, date]) -> int:
    """Replace a surface's `scores` of the given days; returns the rows written.

    Raises UserError where the surface has no ranker, or one of another spec, or a day no examples.
    """
    ranker = load(answering(lake.root, surface))
    assembly = assembly_of(ranker, lake)
    reader = assembly.reader
    reader.require(*days)
    offers, auction = offers_of(lake, reader.items), Auction(lake.spec, surface)
    contract = contracts.scores(lake.spec)
    parts = []
    for day in tqdm(list(each_day(*days)), desc=f"score {surface}", unit="day", disable=None):
        for batch in reader.batches([day], EVERYTHING, SCORE_ROWS, Shuffle(None)):
            parts.append(_rows(ranker, auction, assembly, offers, batch, day))
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
    return Assembly(reader, known, manifest.reads)


def _rows(
    ranker: Ranker, auction: Auction, assembly: Assembly, offers: Offers, batch: Batch, day: date
) -> pa.Table:
    """What a ranker says of a batch; an item's offer may be late or missing."""
    spec, surface = auction.spec, auction.surface
    item, inputs = batch.item.numpy(), assembly(batch)
    p = ranker.probabilities(ranker.state(inputs.requests), inputs.candidates)[inputs.rows.there]
    request = batch.request.numpy()
    bids, goals = offers.at(item, batch.as_of.numpy()[request] * MICROS["s"])
    result = auction(p, bids, list(goals), request)
    out = result.places == OUT
    columns = {
        "impression_id": batch.impressions,
        "request_id": batch.requests[request],
        "item_id": assembly.reader.items.names[item],
        "ranker": np.full(len(item), ranker.manifest.version, object),
        **{f"p_{name}": p[:, i] for i, name in enumerate(spec.objectives)},
        "bid": bids,
        "expected_value": result.values,
        "place": pa.array(result.places.astype(np.int32), mask=out),
        "price": pa.array(result.prices, mask=out),
        "surface": np.full(len(item), surface, object),
        "day": np.full(len(item), day, object),
    }
    return pa.table(columns, schema=arrow_schema(contracts.scores(spec)))
