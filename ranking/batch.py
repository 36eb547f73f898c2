"""Batch scoring on Spark: what a surface's ranker gives every candidate of some days, as a table.

A task takes buckets of users. It reads the pinned versions of the tables as training does, so its
machine needs the lake, the ranker's folder and this package, but no Spark code runs on a row.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date

import pyarrow as pa

from etl.session import spark_session
from etl.spec import DataSpec
from etl.spec.units import each_day
from etl.tables import contracts, delta
from etl.tables.lake import Lake
from etl.tables.place import Place
from ranking.package.ranker import load
from ranking.package.versions import answering, identified
from ranking.score import Scorer, assembly_of


@dataclass(frozen=True)
class Task:
    """Scores buckets of some days, on whatever machine."""

    root: str
    spec: DataSpec
    folder: Place
    versions: Mapping[str, int]
    days: tuple[date, ...]

    def __call__(self, buckets: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of `scores` of the buckets that a column `id` names."""
        scorer = Scorer.of(load(self.folder), Lake(self.root, self.spec), self.versions)
        for batch in buckets:
            for bucket in batch.column("id").to_pylist():
                for day in self.days:
                    for rows in scorer.rows(day, (bucket, self.spec.buckets)):
                        yield from rows.to_batches()


def score_days(lake: Lake, surface: str, days: tuple[date, date]) -> int:
    """Replace a surface's `scores` of the given days; returns the rows written.

    Raises UserError where the surface has no ranker, or one of another spec, or a day no examples.
    """
    folder = answering(lake.root, surface).absolute()
    ranker = identified(load(folder), lake.root, surface)
    reader = assembly_of(ranker, lake).reader
    reader.require(*days)
    task = Task(lake.root, lake.spec, folder, dict(reader.versions), tuple(each_day(*days)))
    spark, contract = spark_session("scores"), contracts.scores(lake.spec)
    buckets = spark.range(0, lake.spec.buckets, numPartitions=lake.spec.buckets)
    schema = ", ".join(f"`{name}` {kind}" for name, kind in contract.columns.items())
    where = f"surface = '{surface}' AND {delta.days_between(*days)}"
    rows = buckets.mapInArrow(task, schema)
    delta.replace(lake, contract, rows, where, {**task.versions, "ranker": folder.name})
    return int(lake.open(contract.name).history(1)[0]["operationMetrics"]["numOutputRows"])
