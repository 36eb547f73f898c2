"""Attribute files to versions of users and items."""

import logging
from datetime import date

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from etl.clock import day_end, day_start
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

STATIC = date(1970, 1, 1)  # the landing day of rows that hold for all time
Days = tuple[date, date]


def load_attributes(lake: Lake, raw: str, days: Days) -> dict[str, int]:
    """Replace what landed on the given days in `attributes_user` and `attributes_item`.

    A file whose path names no day is read as it is now. If it is `static`, rows are added and none
    may change; otherwise changed rows land on the last of the days, and where later days have been
    ingested already the file is not read. Without a source a table stays empty.

    Raises UserError before anything is written: where files are missing or unreadable, too many
    rows are bad, a column that the spec names holds nothing, or a static row changed.
    """
    sources = lake.spec.sources.items()
    files = {n: s for n, s in sources if isinstance(s, AttributeFile)}
    files = {name: source for name, source in files.items() if _is_current(lake, source, days)}
    with naming_files():
        read = {name: _read(lake, source, raw, days) for name, source in files.items()}
        for entity in ("user", "item"):
            create(lake, contracts.attributes(lake.spec, entity))
        for name, source in files.items():
            _write(lake, name, source, read[name], days)
    tables = (contracts.attributes(lake.spec, source.entity).name for source in files.values())
    return {table: lake.rows(table) for table in tables}


def _is_current(lake: Lake, source: AttributeFile, days: Days) -> bool:
    """Whether the state of a source can be of these days; one without days is of the newest."""
    if source.is_by_day or source.static:
        return True
    newest = lake.newest_day("events")
    if newest and newest > days[1]:
        logging.warning(
            "%s is not read: it tells the state of %s or later, not of %s; versions that were "
            "recorded earlier stay", source.path, newest, days[1]
        )  # fmt: skip
        return False
    logging.warning(
        "%s is read as it is now: what changed in it holds from %s on", source.path, days[1]
    )
    return True


def _write(lake: Lake, name: str, source: AttributeFile, rows: DataFrame, days: Days) -> None:
    """Replace what a source has in its table and in quarantine."""
    bad = with_lines(rows).filter("reasons != ''").withColumn("log", F.lit(name))
    quarantine(lake, [name], bad, days)
    contract = contracts.attributes(lake.spec, source.entity)
    versions, where = _newest(rows.filter("reasons = ''")), delta.days_between(*days)
    if source.static:
        where = f"day = '{STATIC}'"
        versions = _with_stored(lake, source, versions)
    elif not source.is_by_day:
        where = f"day = '{days[1]}'"
        versions = _changed(lake, source, versions, days[1])
    delta.replace(lake, contract, versions, where, {})
    rows.unpersist()


def _read(lake: Lake, source: AttributeFile, raw: str, days: Days) -> DataFrame:
    """The rows of a source, read to their end; raises UserError where they are not fit for use."""
    rows = _parsed(lake, source, raw, days).persist(StorageLevel.MEMORY_AND_DISK)
    counts = {name: F.count(name).alias(name) for name in rows.columns if name != PLACE}
    bad = F.count_if(F.expr("reasons != ''")).alias("bad")
    found = rows.agg(*counts.values(), F.count("*").alias("all"), bad).first()
    assert found is not None
    _refuse_unused_columns(lake, source, raw, found)
    if found["bad"] > lake.spec.most_quarantined * found["all"]:
        why = rows.filter("reasons != ''").groupBy("reasons").count().orderBy(F.desc("count"))
        reasons = "; ".join(f"{row['reasons']}: {row['count']:,}" for row in why.take(5))
        raise UserError(
            f"{found['bad']:,} of {found['all']:,} rows of {raw}/{source.path} are bad "
            f"({reasons}); at most {lake.spec.most_quarantined:.0%} may be: correct the spec or "
            "the file, or raise most_quarantined in the spec"
        )
    if source.static:
        _refuse_changed(lake, source, raw, _newest(rows.filter("reasons = ''")))
    return rows


def _refuse_unused_columns(lake: Lake, source: AttributeFile, raw: str, found: Row) -> None:
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


def _parsed(lake: Lake, source: AttributeFile, raw: str, days: Days) -> DataFrame:
    """Rows as the contract has them, with the `reasons` why one is bad, and its `own_time`."""
    typed = _typed_columns(lake, source)
    columns = [source.key, *(column for column, _ in typed.values())]
    columns += [source.valid_from] if source.valid_from else []
    rows = read_raw(raw, source, columns, days, needed=[source.key])
    unread = STATIC if source.static else days[1]
    rows = rows.select(
        F.nullif(raw_value(source.key), F.lit("")).alias(f"{source.entity}_id"),
        _own_time(source).alias("own_time"),
        *[value.alias(name) for name, (_, value) in typed.items()],
        F.coalesce(DAY, F.lit(unread)).alias("day"),
        *("raw", PAYLOAD, FILE, PLACE, FAULT),
    )
    rows = rows.withColumns(_of_their_width(lake, source))
    mistyped = [
        F.when(raw_value(column).isNotNull() & F.col(name).isNull(), F.lit(f"wrong type: {column}"))
        for name, (column, _) in typed.items()
    ]
    rows = rows.withColumn("mistyped", F.concat_ws(SEPARATOR, *mistyped)).drop("raw")
    rows = rows.withColumn("valid_from", _valid_from(lake.spec, source))
    breaches = contracts.attributes(lake.spec, source.entity).breaches.items()
    reasons = [F.when(F.expr(condition), F.lit(reason)) for reason, condition in breaches]
    reasons.append(F.nullif("mistyped", F.lit("")))
    rows = rows.withColumn("reasons", F.coalesce(FAULT, F.concat_ws(SEPARATOR, *reasons)))
    rows = rows.withColumn(PAYLOAD, F.when(F.col("reasons") != "", F.col(PAYLOAD)))
    return rows.drop("mistyped")


def _typed_columns(lake: Lake, source: AttributeFile) -> dict[str, tuple[str, Column]]:
    """Raw column and typed value of each attribute, and of what the auction needs, by name."""
    declared = getattr(lake.spec.attributes, source.entity)
    columns = {f"x_{name}": (a.column or name, a) for name, a in declared.items()}
    typed = {name: (column, _typed(a, column)) for name, (column, a) in columns.items()}
    if source.entity == "item":
        kinds = {"bid": "double", "goal": "string"}
        for name, column in contracts.auction_columns(lake.spec).items():
            typed[name] = column, raw_value(column).try_cast(kinds[name])
    return typed


def _typed(attribute: Categorical | Numeric | Vector | Clock, column: str) -> Column:
    if isinstance(attribute, Vector):
        return F.from_json(raw_value(column), "array<float>")
    return raw_value(column).try_cast("double" if isinstance(attribute, Numeric) else "string")


def _of_their_width(lake: Lake, source: AttributeFile) -> dict[str, Column]:
    """Vectors, null where they have another width than is declared."""
    declared = getattr(lake.spec.attributes, source.entity)
    widths = {f"x_{n}": a.width for n, a in declared.items() if isinstance(a, Vector)}
    return {n: F.when(F.size(n) == width, F.col(n)) for n, width in widths.items()}


def _own_time(source: AttributeFile) -> Column:
    """When a row says that it became true, µs; null where the source does not say."""
    if source.valid_from is None:
        return F.lit(None).cast("bigint")
    time = raw_value(source.valid_from).try_cast("bigint")
    return F.try_multiply(time, F.lit(MICROS[source.time_unit]))


def _valid_from(spec: DataSpec, source: AttributeFile) -> Column:
    """When a version holds from, µs.

    From when its row says, but not before its landing day began; else from the end of that day, as
    it may have been written at any time of it. A static row lands before all time.
    """
    bound = day_start if source.valid_from else day_end
    since = F.lit(0) if source.static else F.expr(f"{bound(spec)} * {MICROS['s']}")
    if source.valid_from:
        since = F.when(F.col("own_time").isNotNull(), F.greatest("own_time", since))
    return (since + source.delay * MICROS["s"]).cast("bigint")


def _newest(rows: DataFrame) -> DataFrame:
    """One row a key and time: what changed last, and of equals what stands last in the files."""
    apart = {"valid_from", "own_time", "day", "reasons", *(PAYLOAD, FILE, PLACE, FAULT)}
    key, *values = [name for name in rows.columns if name not in apart]
    order = F.struct("own_time", FILE, f"{PLACE}.block", f"{PLACE}.row")
    best = rows.groupBy("day", key, "valid_from").agg(F.max_by(F.struct(*values), order).alias("v"))
    return best.select("day", key, "valid_from", "v.*")


def _stored(lake: Lake, source: AttributeFile) -> DataFrame:
    return delta.read(lake, contracts.attributes(lake.spec, source.entity))


def _changed(lake: Lake, source: AttributeFile, versions: DataFrame, landed: date) -> DataFrame:
    """The versions that differ from the one before of their key, stored before `landed` or not."""
    key, *values = [name for name in versions.columns if name not in ("day", "valid_from")]
    before = _stored(lake, source).filter(F.col("day") < F.lit(landed))
    latest = before.groupBy(key).agg(
        F.max_by(F.struct(*values), F.struct("valid_from", "day")).alias("v")
    )
    latest = latest.select(key, F.lit(None).cast("bigint").alias("valid_from"), "v")
    new = versions.select(key, "valid_from", F.struct(*values).alias("v"))
    order = Window.partitionBy(key).orderBy(F.asc_nulls_first("valid_from"))
    pairs = new.unionByName(latest).withColumn("before", F.lag("v").over(order))
    pairs = pairs.filter(F.col("valid_from").isNotNull() & ~F.col("v").eqNullSafe(F.col("before")))
    return pairs.select(F.lit(landed).alias("day"), key, "valid_from", "v.*")


def _with_stored(lake: Lake, source: AttributeFile, versions: DataFrame) -> DataFrame:
    """Static rows, and those that were stored before."""
    stored = _stored(lake, source).filter(F.col("day") == F.lit(STATIC)).select(versions.columns)
    keys = [f"{source.entity}_id", "valid_from"]
    return stored.unionByName(versions.join(stored.select(keys), keys, "left_anti"))


def _refuse_changed(lake: Lake, source: AttributeFile, raw: str, versions: DataFrame) -> None:
    """Raises UserError where a static row is not as it was stored."""
    table = contracts.attributes(lake.spec, source.entity).name
    if not lake.exists(table):
        return
    key, *values = [name for name in versions.columns if name not in ("day", "valid_from")]
    stored = _stored(lake, source).filter(F.col("day") == F.lit(STATIC))
    was = stored.select(key, "valid_from", F.struct(*values).alias("was"))
    both = versions.withColumn("is", F.struct(*values)).join(was, [key, "valid_from"])
    changed = both.filter(~F.col("is").eqNullSafe(F.col("was"))).orderBy(key).first()
    if changed is not None:
        raise UserError(
            f"{raw}/{source.path} is static in the spec, but its row of {source.entity} "
            f"{changed[key]} has changed since it was read: restore it, or take `static` out of "
            "the spec, so that the change holds from the day on which it is read"
        )
