"""Batch scoring on Spark: a ranker's scores of all candidates of some days, as table `scores`.

A task scores buckets of users in Python (`mapInArrow`). All tasks read the same versions of the
tables, which the driver pins, so executors need access to the lake and to the ranker's folder, and
this package.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from itertools import product

import pyarrow as pa

from etl.runtime.spark import spark_session
from etl.spec.units import DayRange, date_range
from etl.tables import model_schemas, schemas, spark_io
from etl.tables.lake import ABSENT, Lake
from etl.tables.uri import StoragePath
from ranking.registry.ranker import load_ranker_before, validate_ranker, version_to_evaluate
from ranking.scoring.scorer import Scorer, input_builder
from training.data.reader import INPUT_TABLES


@dataclass(frozen=True)
class ScoreBuckets:
    """Scores buckets of users on an executor, from the pinned versions of a lake's tables."""

    lake: Lake
    ranker_folder: StoragePath
    days: tuple[date, ...]

    def __call__(self, buckets: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of `scores` of the buckets in column `id`."""
        spec = self.lake.spec
        ranker = load_ranker_before(self.ranker_folder, spec.day_start(min(self.days)))
        scorer = Scorer.from_ranker(ranker, self.lake, min(self.days))
        bucket_ids = (bucket for batch in buckets for bucket in batch.column("id").to_pylist())
        for bucket, day in product(bucket_ids, self.days):
            for rows in scorer.score_day(day, (bucket, spec.buckets)):
                yield from rows.to_batches()


def scoring_task(lake: Lake, surface: str, days: DayRange) -> ScoreBuckets:
    """The scoring of some days by a surface's live ranker, from the current or pinned versions.

    Days whose labels the live version has learned are scored by `version_to_evaluate`.

    Raises:
        UserError: The surface has no live ranker, or one of another spec; or examples are missing.
    """
    first_second = lake.spec.day_start(days[0])
    folder = version_to_evaluate(lake.root, surface, first_second, lake.spec).absolute()
    ranker = validate_ranker(load_ranker_before(folder, first_second), lake.root, surface)
    pinned = lake.pinned(input_tables(lake))
    input_builder(ranker, pinned).reader.require_days(*days)
    return ScoreBuckets(pinned, folder, tuple(date_range(*days)))


def input_tables(lake: Lake) -> tuple[str, ...]:
    """The tables that scoring reads: inputs of rankers, bids and teacher embeddings."""
    read = (
        schemas.attributes(lake.spec, "item"),
        schemas.attribute_snapshots(lake.spec, "item"),
        model_schemas.user_teacher_embeddings(lake.spec),
    )
    return (*INPUT_TABLES, *(schema.name for schema in read))


def score_days(lake: Lake, surface: str, days: DayRange) -> int:
    """Replace a surface's `scores` of some days by those of its live ranker.

    All rows are scored from the versions of the tables that were current at the start, or pinned.

    Returns:
        The number of rows written.

    Raises:
        UserError: The surface has no live ranker, or one of another spec; or examples are missing.
    """
    task = scoring_task(lake, surface, days)
    num_buckets, scores = lake.spec.buckets, model_schemas.scores(lake.spec)
    buckets = spark_session("scores").range(0, num_buckets, numPartitions=num_buckets)
    columns = ", ".join(f"`{name}` {sql_type}" for name, sql_type in scores.columns.items())
    rows = buckets.mapInArrow(task, columns)
    predicate = f"surface = '{surface}' AND {spark_io.day_range_predicate(*days)}"
    versions = {name: task.lake.pinned_versions[name] for name in input_tables(lake)}
    inputs: dict[str, object] = {name: v for name, v in versions.items() if v != ABSENT}
    spark_io.replace_partitions(
        lake, scores, rows, predicate, inputs | {"ranker": task.ranker_folder.name}
    )
    return int(lake.open(scores.name).history(1)[0]["operationMetrics"]["numOutputRows"])
