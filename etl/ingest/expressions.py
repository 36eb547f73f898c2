"""Expressions of a source on its records: computed columns, and which records are skipped."""

from collections.abc import Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.spec.expressions import parse_column, parse_condition
from etl.spec.sources import Source

IS_SELECTED = "is_selected"  # false for a record that the `where` of its source skips


def logged_columns_of(source: Source, columns: Iterable[str]) -> list[str]:
    """The columns that records contain, of those named, and those that expressions read.

    Raises UserError if names differ only in case, which Spark does not distinguish.
    """
    columns = list(columns)
    expressions = [parse_column(text) for text in source.select.values()]
    expressions += [parse_condition(source.where)] if source.where else []
    read = (name for expression in expressions for name in expression.columns)
    logged = sorted({*(name for name in columns if name not in source.select), *read})
    names = {*logged, *source.select}
    lower = [name.lower() for name in names]
    ambiguous = sorted(name for name in names if lower.count(name.lower()) > 1)
    if ambiguous:
        raise UserError(
            f"{source.location}: the columns {', '.join(ambiguous)} differ only in case, which "
            "Spark does not distinguish: write them alike, or rename a computed column"
        )
    return logged


def with_expressions(source: Source, rows: DataFrame, is_unreadable: Column) -> DataFrame:
    """Records with the source's computed columns in `raw`, and `is_selected`.

    An unreadable record is selected, so that it is quarantined.
    """
    is_selected = F.lit(True)
    if source.where:
        condition = F.expr(parse_condition(source.where).sql)
        is_selected = is_unreadable | F.coalesce(condition, F.lit(False))
    rows = rows.withColumn(IS_SELECTED, is_selected)
    raw = F.col("raw")
    for name, text in source.select.items():
        raw = raw.withField(f"`{name}`", F.expr(parse_column(text).sql))
    return rows.withColumn("raw", raw)
