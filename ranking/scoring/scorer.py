"""A ranker's scores of the candidates of stored examples, as rows of table `scores`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import pyarrow as pa

from etl.errors import UserError
from etl.spec.units import MICROS
from etl.tables import model_schemas
from etl.tables.lake import Lake, arrow_schema
from ranking.inputs.from_tables import InputBuilder, load_teacher_history
from ranking.registry.ranker import ExportedRanker
from ranking.scoring.auction import EXCLUDED_RANK, Auction
from ranking.scoring.bids import BidTable, load_bids
from training.data.batch import Batch, Shuffle
from training.data.label_window import ALL_LABELS
from training.data.reader import INPUT_TABLES, ExampleReader

SCORE_ROWS = 2048


def input_builder(ranker: ExportedRanker, lake: Lake) -> InputBuilder:
    """A builder of a ranker's inputs from a lake's tables.

    Raises:
        UserError: The ranker is of another spec than the lake.
    """
    manifest = ranker.manifest
    if manifest.spec.hash != lake.spec.hash:
        raise UserError(
            f"the ranker of {manifest.surface} was trained with spec {manifest.spec.hash}, "
            f"now it is {lake.spec.hash}: run `gemline rank train` again"
        )
    ranker_lake = replace(lake, spec=manifest.spec)
    versions = {name: lake.version(name) for name in INPUT_TABLES}
    reader = ExampleReader(
        ranker_lake, versions, manifest.sequence, manifest.max_length, (manifest.surface,)
    )
    teacher_embeddings = load_teacher_history(
        ranker_lake, manifest.input_limits, manifest.compressor_version
    )
    return InputBuilder(reader, teacher_embeddings, manifest.input_limits)


@dataclass(frozen=True)
class Scorer:
    """A ranker with the inputs and the bids of a lake."""

    ranker: ExportedRanker
    auction: Auction
    input_builder: InputBuilder
    bids: BidTable

    @classmethod
    def from_ranker(cls, ranker: ExportedRanker, lake: Lake, first_day: date) -> "Scorer":
        """A scorer of requests from a day on."""
        inputs = input_builder(ranker, lake)
        auction = Auction(lake.spec, ranker.manifest.surface)
        return cls(ranker, auction, inputs, load_bids(lake, inputs.reader.items, first_day))

    def score_day(self, day: date, shard: tuple[int, int]) -> Iterator[pa.Table]:
        """Rows of a day's candidates, batch by batch, of a shard (rank, world) of the buckets."""
        reader = self.input_builder.reader
        for batch in reader.batches([day], ALL_LABELS, SCORE_ROWS, Shuffle(None), shard):
            yield self.score_batch(batch, day)

    def score_batch(self, batch: Batch, day: date) -> pa.Table:
        """Rows of a batch's candidates; one without a bid does not take part in the auction."""
        ranker, spec, surface = self.ranker, self.auction.spec, self.auction.surface
        inputs = self.input_builder(batch)
        item, request = batch.item_index.numpy(), batch.request_index.numpy()
        user_state = ranker.user_state(inputs.requests)
        mask = inputs.candidate_index.mask
        scores = ranker.score(user_state, inputs.candidates)[mask]
        request_times = batch.as_of.numpy()[request] * MICROS["s"]
        result = self.auction(scores, self.bids.as_of(item, request_times), request)
        is_excluded = result.ranks == EXCLUDED_RANK
        columns = {
            "impression_id": batch.impression_ids,
            "request_id": batch.request_ids[request],
            "item_id": self.input_builder.reader.items.item_ids.take(pa.array(item)),
            "ranker": np.full(len(item), ranker.manifest.version, object),
            **{f"p_{n}": scores.probabilities[:, i] for i, n in enumerate(spec.objectives)},
            **{
                f"value_{name}": pa.array(scores.outcome_values[:, i], from_pandas=True)
                for i, (name, objective) in enumerate(spec.objectives.items())
                if objective.value
            },
            "bid": result.effective_bids,
            "expected_value": result.expected_values,
            "rank": pa.array(result.ranks.astype(np.int32), mask=is_excluded),
            "price": pa.array(result.prices, mask=is_excluded),
            "surface": np.full(len(item), surface, object),
            "day": np.full(len(item), day, object),
        }
        return pa.table(columns, schema=arrow_schema(model_schemas.scores(spec)))
