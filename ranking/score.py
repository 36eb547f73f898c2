"""What a ranker gives the candidates of stored examples, as rows of `scores`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import pyarrow as pa

from etl.errors import UserError
from etl.spec.units import MICROS
from etl.tables import contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from ranking.auction import OUT, Auction
from ranking.offers import Offers, offers_of
from ranking.package.ranker import Ranker
from ranking.student.batches import Assembly
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import TABLES, Reader
from training.data.ripened import EVERYTHING
from training.knowledge.earlier import Earlier, earlier

SCORE_ROWS = 2048


def assembly_of(ranker: Ranker, lake: Lake, versions: Mapping[str, int] | None = None) -> Assembly:
    """What makes a ranker's inputs of a lake's tables: its surface's, request by request.

    Of the newest versions of the tables, if none are given. Raises UserError where they are of
    another spec.
    """
    manifest = ranker.manifest
    if manifest.spec.hash != lake.spec.hash:
        raise UserError(
            f"the ranker of {manifest.surface} was trained under spec {manifest.spec.hash}, "
            f"now it is {lake.spec.hash}: train it again"
        )
    own = replace(lake, spec=manifest.spec)
    pinned = versions or {name: lake.version(name) for name in TABLES}
    reader = Reader(own, pinned, manifest.sequence, manifest.max_length, (manifest.surface,))
    known = earlier(own) if manifest.before else Earlier.nothing()
    return Assembly(reader, known, manifest.reads)


@dataclass(frozen=True)
class Scorer:
    """A ranker on a lake's tables."""

    ranker: Ranker
    auction: Auction
    assembly: Assembly
    offers: Offers

    @classmethod
    def of(cls, ranker: Ranker, lake: Lake, versions: Mapping[str, int] | None = None) -> "Scorer":
        """On the newest versions of the tables, if none are given."""
        assembly = assembly_of(ranker, lake, versions)
        auction = Auction(lake.spec, ranker.manifest.surface)
        return cls(ranker, auction, assembly, offers_of(lake, assembly.reader.items))

    def rows(self, day: date, shard: tuple[int, int]) -> Iterator[pa.Table]:
        """The rows of a day's candidates, of the buckets of a shard (rank, world)."""
        shuffle = Shuffle(None)
        for batch in self.assembly.reader.batches([day], EVERYTHING, SCORE_ROWS, shuffle, shard):
            yield self.of_batch(batch, day)

    def of_batch(self, batch: Batch, day: date) -> pa.Table:
        """Those of a batch; an item's offer may be late or missing."""
        ranker, spec, surface = self.ranker, self.auction.spec, self.auction.surface
        item, inputs, request = batch.item.numpy(), self.assembly(batch), batch.request.numpy()
        state = ranker.state(inputs.requests)
        p = ranker.probabilities(state, inputs.candidates)[inputs.rows.there]
        as_of = batch.as_of.numpy()[request] * MICROS["s"]
        bids, goals, advertisers = self.offers.at(item, as_of)
        result = self.auction(p, bids, list(goals), request, advertisers)
        out = result.places == OUT
        columns = {
            "impression_id": batch.impressions,
            "request_id": batch.requests[request],
            "item_id": self.assembly.reader.items.names[item],
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
