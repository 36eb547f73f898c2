"""Attribute files to versions of users and items."""

from datetime import date

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.sources.raw import DAY, FILE, raw_value, read_raw, readable
from etl.spec.attributes import Categorical, Clock, Numeric, Vector
from etl.spec.model import DataSpec
from etl.spec.sources import AttributeFile
from etl.spec.units import DAY as SECONDS_A_DAY
from etl.spec.units import MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake

ALWAYS = "1970-01-01"  # the landing day of versions that hold for all time


def load_attributes(lake: Lake, raw: str, days: tuple[date, date]) -> dict[str, int]:
    """Replace what landed on the given days in `attributes_user` and `attributes_item`.

    Files whose path names no day are replaced whole; without a source a table stays empty.
    Raises UserError before anything is written: where files are missing or unreadable, or hold
    nothing in a column that the spec names.
    """
    files = {s.entity: s for s in lake.spec.sources.values() if isinstance(s, AttributeFile)}
    counts = {}
    with readable():
        read = {entity: _read(lake, source, raw, days) for entity, source in files.items()}
        for entity in ("user", "item"):
            contract = contracts.attributes(lake.spec, entity)
            delta.create(lake, contract)
            if entity in files:
                dated = "{day}" in files[entity].path
                where = delta.days_between(*days) if dated else f"day = '{ALWAYS}'"
                delta.replace(lake, contract, _newest(read[entity]), where, {})
                counts[contract.name] = lake.rows(contract.name)
                read[entity].unpersist()
    return counts


def _read(lake: Lake, source: AttributeFile, raw: str, days: tuple[date, date]) -> DataFrame:
    """The rows of a source, read to their end and found to hold what the spec names."""
    rows = _versions(lake, source, raw, days).persist(StorageLevel.MEMORY_AND_DISK)
    named = {name: F.count(name).alias(name) for name in rows.columns}
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
    rows = read_raw(raw, source, columns, days)
    key = f"{source.entity}_id"
    return rows.select(
        raw_value(source.key).alias(key),
        _valid_from(lake.spec, source).alias("valid_from"),
        *[column.alias(name) for name, column in typed.items()],
        F.coalesce(DAY, F.lit(ALWAYS).cast("date")).alias("day"),
        FILE,
    )


def _newest(rows: DataFrame) -> DataFrame:
    """One row a key and time; rows without either are left out."""
    key, *values = [name for name in rows.columns if name not in {"valid_from", "day", FILE}]
    kept = rows.filter(F.col(key).isNotNull() & F.col("valid_from").isNotNull())
    tie = F.struct(FILE, *values)
    best = kept.groupBy("day", key, "valid_from").agg(F.max_by(F.struct(*values), tie).alias("v"))
    return best.select("day", key, "valid_from", "v.*")


def _typed(attribute: Categorical | Numeric | Vector | Clock, column: str) -> Column:
    if isinstance(attribute, Vector):
        return F.from_json(raw_value(column), "array<float>")
    return raw_value(column).try_cast("double" if isinstance(attribute, Numeric) else "string")


def _valid_from(spec: DataSpec, source: AttributeFile) -> Column:
    """When a version holds from, µs; in files by day never before the day on which it landed."""
    landed = F.unix_date(DAY).cast("bigint") * SECONDS_A_DAY - spec.utc_offset_hours * 3600
    landed = F.coalesce(landed * MICROS["s"], F.lit(0))
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
