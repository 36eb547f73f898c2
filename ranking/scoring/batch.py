"""Batch scoring on Spark: a ranker's scores of all candidates of some days, as table `scores`.

A task scores buckets of users in Python (`mapInArrow`). It reads pinned versions of the tables as
training does, so executors need access to the lake and to the ranker's folder, and this package.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from itertools import product

import pyarrow as pa

from etl.runtime.spark import spark_session
from etl.spec import DataSpec
from etl.spec.units import DayRange, date_range
from etl.tables import model_schemas, spark_io
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from ranking.registry.ranker import load_ranker_before, validate_ranker, version_to_evaluate
from ranking.scoring.scorer import Scorer, input_builder


@dataclass(frozen=True)
class ScoreBuckets:
    """Scores buckets of users on an executor."""

    lake_uri: str
    spec: DataSpec
    ranker_folder: StoragePath
    table_versions: Mapping[str, int]
    days: tuple[date, ...]

    def __call__(self, buckets: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of `scores` of the buckets in column `id`."""
        lake = Lake(self.lake_uri, self.spec)
        ranker = load_ranker_before(self.ranker_folder, self.spec.day_start(min(self.days)))
        scorer = Scorer.from_ranker(ranker, lake, min(self.days), self.table_versions)
        bucket_ids = (bucket for batch in buckets for bucket in batch.column("id").to_pylist())
        for bucket, day in product(bucket_ids, self.days):
            for rows in scorer.score_day(day, (bucket, self.spec.buckets)):
                yield from rows.to_batches()


def score_days(lake: Lake, surface: str, days: DayRange) -> int:
    """Replace a surface's `scores` of some days by those of its live ranker.

    Days whose labels the live version has learned are scored by `version_to_evaluate`.

    Returns:
        The number of rows written.

    Raises:
        UserError: The surface has no live ranker, or one of another spec; or a day no examples.
    """
    first_second = lake.spec.day_start(days[0])
    folder = version_to_evaluate(lake.root, surface, first_second, lake.spec).absolute()
    ranker = validate_ranker(load_ranker_before(folder, first_second), lake.root, surface)
    reader = input_builder(ranker, lake).reader
    reader.require_days(*days)
    task = ScoreBuckets(
        lake.root, lake.spec, folder, dict(reader.table_versions), tuple(date_range(*days))
    )
    num_buckets, scores = lake.spec.buckets, model_schemas.scores(lake.spec)
    buckets = spark_session("scores").range(0, num_buckets, numPartitions=num_buckets)
    columns = ", ".join(f"`{name}` {sql_type}" for name, sql_type in scores.columns.items())
    rows = buckets.mapInArrow(task, columns)
    predicate = f"surface = '{surface}' AND {spark_io.day_range_predicate(*days)}"
    inputs = {**task.table_versions, "ranker": folder.name}
    spark_io.replace_partitions(lake, scores, rows, predicate, inputs)
    return int(lake.open(scores.name).history(1)[0]["operationMetrics"]["numOutputRows"])
