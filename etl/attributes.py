"""Attribute files to versions of users and items."""

from datetime import date

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.clock import day_start
from etl.errors import UserError
from etl.quarantine import quarantine
from etl.sources.canonical import SEPARATOR
from etl.sources.places import naming_files, with_lines
from etl.sources.raw import DAY, FAULT, FILE, PAYLOAD, PLACE, raw_value, read_raw
from etl.spec.attributes import Categorical, Clock, Numeric, Vector
from etl.spec.model import DataSpec
from etl.spec.sources import AttributeFile
from etl.spec.units import MICROS
from etl.tables import contracts, delta
from etl.tables.create import create
from etl.tables.lake import Lake

ALWAYS = "1970-01-01"  # the landing day of versions that hold for all time


def load_attributes(lake: Lake, raw: str, days: tuple[date, date]) -> dict[str, int]:
    """Replace what landed on the given days in `attributes_user` and `attributes_item`.

    Files whose path names no day are replaced whole; without a source a table stays empty.
    Raises UserError before anything is written: where files are missing or unreadable, or hold
    nothing in a column that the spec names.
    """
    sources = lake.spec.sources.items()
    files = {s.entity: (name, s) for name, s in sources if isinstance(s, AttributeFile)}
    with naming_files():
        read = {entity: _read(lake, source, raw, days) for entity, (_, source) in files.items()}
        for entity in ("user", "item"):
            create(lake, contracts.attributes(lake.spec, entity))
        for entity, (name, source) in files.items():
            _write(lake, name, source, read[entity], days)
    return {table: lake.rows(table) for table in (f"attributes_{entity}" for entity in files)}


def _write(
    lake: Lake, name: str, source: AttributeFile, rows: DataFrame, days: tuple[date, date]
) -> None:
    bad = with_lines(rows).filter("reasons != ''").withColumn("log", F.lit(name))
    quarantine(lake, [name], bad, days)
    where = delta.days_between(*days) if "{day}" in source.path else f"day = '{ALWAYS}'"
    contract = contracts.attributes(lake.spec, source.entity)
    delta.replace(lake, contract, _newest(rows.filter("reasons = ''")), where, {})
    rows.unpersist()


def _read(lake: Lake, source: AttributeFile, raw: str, days: tuple[date, date]) -> DataFrame:
    """The rows of a source, read to their end and found to hold what the spec names."""
    rows = _versions(lake, source, raw, days).persist(StorageLevel.MEMORY_AND_DISK)
    named = {name: F.count(name).alias(name) for name in rows.columns if name != PLACE}
    found = rows.agg(*named.values(), F.count("*").alias("all")).first()
    assert found is not None
    wanted = {f"{source.entity}_id": source.key, "valid_from": source.valid_from}
    table = contracts.attributes(lake.spec, source.entity).name
    if not lake.exists(table) or not lake.rows(table):  # a day's changes may lack some attribute
        declared = getattr(lake.spec.attributes, source.entity)
        wanted |= {f"x_{name}": a.column or name for name, a in declared.items()}
    for name, column in wanted.items():
        if column and found["all"] and not found[name]:
            raise UserError(
                f"the spec names column {column}, but no record of {raw}/{source.path} has it in a "
                "form that can be read; correct the spec, or take the column out"
            )
    return rows


def _versions(lake: Lake, source: AttributeFile, raw: str, days: tuple[date, date]) -> DataFrame:
    declared = getattr(lake.spec.attributes, source.entity)
    named = {f"x_{name}": a.column or name for name, a in declared.items()}
    typed: dict[str, Column] = {
        name: _typed(declared[name.removeprefix("x_")], column) for name, column in named.items()
    }
    if source.entity == "item":
        auction = contracts.auction_columns(lake.spec)
        kinds = {"bid": "double", "goal": "string"}
        typed |= {name: raw_value(column).try_cast(kinds[name]) for name, column in auction.items()}
        named |= auction
    columns = [source.key, *named.values(), *([source.valid_from] if source.valid_from else [])]
    rows = read_raw(raw, source, columns, days, needed=[source.key])
    key = f"{source.entity}_id"
    rows = rows.select(
        F.nullif(raw_value(source.key), F.lit("")).alias(key),
        _valid_from(lake.spec, source).alias("valid_from"),
        *[column.alias(name) for name, column in typed.items()],
        F.coalesce(DAY, F.lit(ALWAYS).cast("date")).alias("day"),
        *(PAYLOAD, FILE, PLACE, FAULT),
    )
    breaches = contracts.attributes(lake.spec, source.entity).breaches.items()
    said = [F.when(F.expr(condition), F.lit(reason)) for reason, condition in breaches]
    rows = rows.withColumn("reasons", F.coalesce(FAULT, F.concat_ws(SEPARATOR, *said)))
    return rows.withColumn(PAYLOAD, F.when(F.col("reasons") != "", F.col(PAYLOAD)))


def _newest(rows: DataFrame) -> DataFrame:
    """One row a key and time."""
    apart = {"valid_from", "day", "reasons", *(PAYLOAD, FILE, PLACE, FAULT)}
    key, *values = [name for name in rows.columns if name not in apart]
    tie = F.struct(FILE, *values)
    best = rows.groupBy("day", key, "valid_from").agg(F.max_by(F.struct(*values), tie).alias("v"))
    return best.select("day", key, "valid_from", "v.*")


def _typed(attribute: Categorical | Numeric | Vector | Clock, column: str) -> Column:
    if isinstance(attribute, Vector):
        return F.from_json(raw_value(column), "array<float>")
    return raw_value(column).try_cast("double" if isinstance(attribute, Numeric) else "string")


def _valid_from(spec: DataSpec, source: AttributeFile) -> Column:
    """When a version holds from, µs; in files by day never before the day on which it landed."""
    landed = F.coalesce(F.expr(day_start(spec, DAY)) * MICROS["s"], F.lit(0))
    if source.valid_from is None:
        return landed
    own = F.try_multiply(
        raw_value(source.valid_from).try_cast("bigint"), F.lit(MICROS[source.time_unit])
    )
    return F.when(own.isNotNull(), F.greatest(own, landed))


if __name__ == "__main__":
    import sys

    from etl.cli import run
    from etl.commands import attributes as command

    sys.exit(run(command, sys.argv[1:], "etl/attributes.py"))
