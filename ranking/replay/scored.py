"""What a ranker says of logged ads, each as if it stood in the first place of its request."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etl.spec.attributes import Numeric
from etl.spec.model import DataSpec
from etl.spec.units import MICROS, each_day
from etl.tables.lake import Lake
from ranking.auction import OUT, Auction
from ranking.inputs import Candidates
from ranking.offers import Offers, offers_of
from ranking.package.ranker import Ranker
from ranking.score import SCORE_ROWS, assembly_of
from ranking.student.batches import Assembly
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.ripened import Ripened

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Scored(NamedTuple):
    """B ads, O objectives: `values` and who is `out` of the auction, by the ranker.

    `labels` (B, O) and whether all are `final`; `paid` is what the campaign paid at its bid.
    """

    impressions: npt.NDArray[np.object_]
    request: Ints
    user: Ints
    values: Floats
    out: npt.NDArray[np.bool_]
    labels: Floats
    paid: Floats
    final: npt.NDArray[np.bool_]

    def at(self, rows: npt.NDArray[np.generic]) -> "Scored":
        """Some of the ads, by their numbers or by a mask."""
        return Scored._make(column[rows] for column in self)


def scored(lake: Lake, ranker: Ranker, days: tuple[date, date], landed: date) -> Scored:
    """All ads of a ranker's surface on some days, with the labels that had landed.

    Raises UserError where a day has no examples.
    """
    assembly, auction = assembly_of(ranker, lake), Auction(lake.spec, ranker.manifest.surface)
    reader, offers = assembly.reader, offers_of(lake, assembly.reader.items)
    reader.require(*days)
    ripened = Ripened(0, lake.spec.day_end(landed), unlabelled=True)
    parts, requests = [], 0
    for batch in reader.batches(list(each_day(*days)), ripened, SCORE_ROWS, Shuffle(None)):
        part = _of(ranker, auction, assembly, offers, batch)
        parts.append(part._replace(request=part.request + requests))
        requests += len(batch.as_of)
    return Scored._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _of(
    ranker: Ranker, auction: Auction, assembly: Assembly, offers: Offers, batch: Batch
) -> Scored:
    inputs, request = assembly(batch), batch.request.numpy()
    columns = positional(auction.spec, assembly.reader.features.row_numbers)
    level = levelled(inputs.candidates, columns)
    p = ranker.probabilities(ranker.state(inputs.requests), level)[inputs.rows.there]
    bids, goals, _ = offers.at(batch.item.numpy(), batch.as_of.numpy()[request] * MICROS["s"])
    result = auction(p, bids, list(goals), request)
    labels = batch.labels.numpy().astype(np.float64)
    return Scored(
        impressions=batch.impressions,
        request=request,
        user=batch.user.numpy()[request],
        values=result.values,
        out=result.places == OUT,
        labels=labels,
        paid=bids * auction.paying(labels, list(goals)),
        final=np.asarray(np.all(batch.known.numpy()[:, auction.served], axis=1)),
    )


def positional(spec: DataSpec, names: Sequence[str]) -> list[int]:
    """Which of the numbers of an ad tell its place: context read from the column of positions."""
    raw = {source.columns.position for source in spec.logs.values()}
    told = {n: a for n, a in spec.attributes.context.items() if isinstance(a, Numeric)}
    return [names.index(f"x_{name}") for name, a in told.items() if (a.column or name) in raw]


def levelled(candidates: Candidates, columns: Sequence[int]) -> Candidates:
    """All candidates of a request with the least of their own numbers in some columns."""
    numbers = candidates.numbers.copy()
    numbers[..., columns] = np.fmin.reduce(numbers[..., columns], axis=1, keepdims=True)
    return replace(candidates, numbers=numbers)
