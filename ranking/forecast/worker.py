"""A worker of the forecast service: answers queries on one shard of the sample.

It reads a JSON line for each query from its standard input and writes one with the sums to its
standard output, in order: the error, if it cannot answer the query. It ends when its input does.
"""

import sys
import traceback
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from etl.spec import load_spec
from etl.spec.base import StrictModel
from etl.tables.lake import Lake
from ranking.forecast.shard import Query, Shard
from ranking.forecast.sums import SampleSums
from ranking.forecast.tables import SAMPLE, read_domain, read_sample

QUERY = TypeAdapter(Query)


class WorkerSettings(StrictModel):
    """The shard of a worker, and the versions of the tables that it reads."""

    spec: Path
    lake: str
    versions: dict[str, int]
    shard: tuple[int, int]


class SumsMessage(StrictModel):
    """`SampleSums` as JSON."""

    totals: list[float]
    squares: list[float]
    damped_squares: list[float]
    spend_products: list[float]
    damped_spend_products: list[float]
    largest: list[float]
    users: int
    key: int
    spend_curve: list[float]

    def to_sums(self) -> SampleSums:
        """The sums as arrays."""
        return SampleSums(
            np.array(self.totals),
            np.array(self.squares),
            np.array(self.damped_squares),
            np.array(self.spend_products),
            np.array(self.damped_spend_products),
            np.array(self.largest),
            self.users,
            self.key,
            spend_curve=np.array(self.spend_curve),
        )

    @classmethod
    def of(cls, sums: SampleSums) -> "SumsMessage":
        """The message of some sums."""
        return cls(
            totals=sums.totals.tolist(),
            squares=sums.squares.tolist(),
            damped_squares=sums.damped_squares.tolist(),
            spend_products=sums.spend_products.tolist(),
            damped_spend_products=sums.damped_spend_products.tolist(),
            largest=sums.largest.tolist(),
            users=sums.users,
            key=sums.key,
            spend_curve=sums.spend_curve.tolist(),
        )


class ErrorMessage(StrictModel):
    """Why a query has no sums."""

    error: str


ANSWER: TypeAdapter[SumsMessage | ErrorMessage] = TypeAdapter(SumsMessage | ErrorMessage)


def open_shard(settings: WorkerSettings) -> Shard:
    """Load the shard of a worker into memory."""
    lake = Lake(settings.lake, load_spec(settings.spec))
    sample = read_sample(lake, settings.versions[SAMPLE], settings.shard)
    return Shard(lake.spec, sample, read_domain(lake, settings.versions))


def answer(shard: Shard, line: str) -> SumsMessage | ErrorMessage:
    """The answer to a query; one that fails must not end the worker, which all clients share."""
    try:
        return SumsMessage.of(shard.sums(QUERY.validate_json(line)))
    except Exception as error:
        traceback.print_exc()
        return ErrorMessage(error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Load the shard, write a line once it can answer, and answer queries."""
    shard = open_shard(WorkerSettings.model_validate_json(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        print(answer(shard, line).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
