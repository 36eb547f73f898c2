"""Statistics of features by day and surface: missing values, distinct ones, and a histogram.

They are computed once for a day, from its examples and from the versions of items that landed on
it, so that days can be compared without reading them again (features/drift.py). A histogram has a
bin for each category, or for each tenth of the logarithm of a number; of a bag, a row is counted in
the bins of all of its values:

    bin(x) = sign(x) * (1 + floor(log(|x| / SMALLEST) / log(BIN_RATIO))),  0 for |x| < SMALLEST

Spark partitions are aggregated in NumPy; a column costs one sort of its values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.array_types import Float64, Int32
from etl.spec.units import DayRange
from etl.tables import feature_schemas, schemas, spark_io
from etl.tables.lake import Lake
from features.schema import FeatureGroup, feature_schema

BIN_RATIO = 1.1
SMALLEST, LARGEST = 1e-6, 1e300
MAX_BINS = 1000  # of one feature, day and surface; the fullest are kept
MISSING_BIN = np.iinfo(np.int32).min
FILLED_BIN = MISSING_BIN + 1  # counts the rows of a bag that have values
PARTIAL_SCHEMA = (
    "day date, surface tinyint, feature int, bin int, count bigint, least double, greatest double"
)
PARTIAL_ROWS = 1_000_000  # from so many rows on, a partition adds up its partial rows


@dataclass(frozen=True)
class FeatureColumns:
    """The columns of a table that are features, by what they hold.

    A category is missing if it is null or 0, a bag if it is null or empty, others if they are null.
    """

    categorical: tuple[str, ...]
    numeric: tuple[str, ...]
    vectors: tuple[str, ...]
    bags: tuple[str, ...]

    @classmethod
    def of_groups(cls, *groups: FeatureGroup, counters: tuple[str, ...] = ()) -> "FeatureColumns":
        """The columns of groups of features, and those of counters."""
        return cls(
            tuple(name for group in groups for name in group.categorical),
            (*(name for group in groups for name in group.numeric), *counters),
            tuple(name for group in groups for name in group.vectors if name not in group.bags),
            tuple(name for group in groups for name in group.bags),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns; the number of a feature is its position here."""
        return (*self.categorical, *self.numeric, *self.vectors, *self.bags)


def build_statistics(lake: Lake, days: DayRange) -> dict[str, int]:
    """Replace the given days of `feature_statistics`."""
    spec, where = lake.spec, spark_io.day_range_predicate(*days)
    versions = {name: lake.version(name) for name in ("examples", "item_versions")}
    features = feature_schema(spec)
    of_examples = FeatureColumns.of_groups(
        features.user, features.context, counters=features.counters
    )
    of_items = FeatureColumns.of_groups(features.item)
    examples = spark_io.read_table(lake, schemas.examples(spec), versions["examples"])
    items = spark_io.read_table(lake, schemas.item_versions(spec), versions["item_versions"])
    items = items.withColumn("surface", F.lit(None).cast("tinyint"))
    rows = statistics_of(examples.filter(where), of_examples)
    if of_items.names:
        rows = rows.unionByName(statistics_of(items.filter(where), of_items))
    schema = feature_schemas.feature_statistics(spec)
    spark_io.replace_partitions(lake, schema, rows, where, versions)
    return {"statistics of features": lake.count_rows(schema.name, days)}


def statistics_of(rows: DataFrame, columns: FeatureColumns) -> DataFrame:
    """One row per day, surface and feature of rows with `day` and `surface`, and features."""
    counting = _Counting(columns)
    partial = rows.select("day", "surface", *columns.names).mapInArrow(
        counting.count_partition, PARTIAL_SCHEMA
    )
    group = ("day", "surface", "feature")
    bins = partial.groupBy(*group, "bin").agg(
        F.sum("count").alias("count"),
        F.min("least").alias("least"),
        F.max("greatest").alias("greatest"),
    )
    counts = {
        name: F.sum(F.when(F.col("bin") == F.lit(number), F.col("count")))
        for name, number in (("missing", MISSING_BIN), ("filled", FILLED_BIN))
    }
    is_value = F.col("bin") > F.lit(FILLED_BIN)
    num_missing = F.coalesce(counts["missing"], F.lit(0))
    num_values = F.coalesce(F.sum(F.when(is_value, F.col("count"))), F.lit(0))
    largest_first = F.struct((-F.col("count")).alias("minus_count"), "bin")
    fullest = F.sort_array(F.collect_list(F.when(is_value, largest_first)))
    kept = F.slice(fullest, 1, MAX_BINS)
    names = F.array(*[F.lit(name) for name in columns.names])
    return (
        bins.groupBy(*group)
        .agg(
            (F.coalesce(counts["filled"], num_values) + num_missing).alias("num_rows"),
            num_missing.alias("num_missing"),
            F.size(fullest).alias("num_bins"),
            F.min("least").alias("least"),
            F.max("greatest").alias("greatest"),
            F.transform(kept, lambda pair: pair["bin"]).alias("bins"),
            F.transform(kept, lambda pair: -pair["minus_count"]).alias("counts"),
        )
        .withColumn("feature", F.element_at(names, F.col("feature") + 1))
    )


def number_bins(values: Float64) -> Int32:
    """The bin of each number (N); MISSING_BIN for NaN."""
    magnitude = np.clip(np.abs(values), SMALLEST, LARGEST)
    with np.errstate(invalid="ignore"):
        level = 1 + np.floor(np.log(magnitude / SMALLEST) / np.log(BIN_RATIO))
        bins = np.where(np.abs(values) < SMALLEST, 0, np.sign(values) * level)
    return np.where(np.isnan(values), MISSING_BIN, bins).astype(np.int32)


@dataclass(frozen=True)
class _Counting:
    """Counting of a partition's rows by day, surface, feature and bin."""

    columns: FeatureColumns

    def count_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of PARTIAL_SCHEMA; those of a group may be several."""
        partial: list[pa.Table] = []
        for batch in batches:
            partial += self._count_batch(pa.Table.from_batches([batch]))
            if sum(map(len, partial)) > PARTIAL_ROWS:
                partial = [_add_up(pa.concat_tables(partial))]
        if partial:
            yield from _add_up(pa.concat_tables(partial)).to_batches()

    def _count_batch(self, table: pa.Table) -> Iterator[pa.Table]:
        groups = table.select(["day", "surface"]).group_by(["day", "surface"]).aggregate([])
        for day, surface in zip(*(groups[n].to_pylist() for n in ("day", "surface")), strict=True):
            is_surface = (
                pc.is_null(table["surface"])
                if surface is None
                else pc.equal(table["surface"], surface)
            )
            rows = table.filter(pc.and_(pc.equal(table["day"], day), is_surface))
            for number, name in enumerate(self.columns.names):
                yield self._count_column(rows[name], day, surface, number)

    def _count_column(
        self, column: pa.ChunkedArray, day: date, surface: int | None, number: int
    ) -> pa.Table:
        """The bins of one feature, for a day and a surface."""
        name, least, greatest = self.columns.names[number], np.nan, np.nan
        if name in self.columns.categorical:
            code = column.fill_null(0).to_numpy().astype(np.int32)
            bins = np.where(code == 0, MISSING_BIN, code)
        elif name in self.columns.bags:
            bins = _bag_bins(column)
        else:
            values = _norms(column) if name in self.columns.vectors else column.to_numpy()
            values = values.astype(np.float64)
            bins = number_bins(values)
            if not np.isnan(values).all():
                least, greatest = np.nanmin(values), np.nanmax(values)
        distinct, counts = np.unique(bins, return_counts=True)
        size = len(distinct)
        return pa.table(
            {
                "day": pa.array([day] * size, pa.date32()),
                "surface": pa.array([surface] * size, pa.int8()),
                "feature": pa.array(np.full(size, number, np.int32)),
                "bin": pa.array(distinct),
                "count": pa.array(counts.astype(np.int64)),
                "least": pa.array(np.full(size, least), from_pandas=True),
                "greatest": pa.array(np.full(size, greatest), from_pandas=True),
            }
        )


def _bag_bins(column: pa.ChunkedArray) -> Int32:
    """The values of the bags of some rows, and for each row FILLED_BIN or MISSING_BIN."""
    is_empty = pc.equal(pc.list_value_length(column).fill_null(0), 0).to_numpy()
    values = pc.list_flatten(column).to_numpy().astype(np.int32)
    return np.concatenate((values, np.where(is_empty, MISSING_BIN, FILLED_BIN).astype(np.int32)))


def _norms(column: pa.ChunkedArray) -> Float64:
    """Euclidean norms of vectors (N); NaN where a vector is missing."""
    vectors = column.combine_chunks()
    is_valid = vectors.is_valid().to_numpy(zero_copy_only=False)
    norms = np.full(len(vectors), np.nan)
    if is_valid.any():
        values = vectors.drop_null().flatten().to_numpy(zero_copy_only=False)
        norms[is_valid] = np.linalg.norm(values.reshape(int(is_valid.sum()), -1), axis=1)
    return norms


def _add_up(partial: pa.Table) -> pa.Table:
    """Partial rows, one for each group and bin."""
    group = ["day", "surface", "feature", "bin"]
    added = partial.group_by(group).aggregate(
        [("count", "sum"), ("least", "min"), ("greatest", "max")]
    )
    return added.rename_columns([*group, "count", "least", "greatest"])
