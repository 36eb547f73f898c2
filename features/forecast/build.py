"""`gemline forecast build`: the tables of a forecast, from the latest scored impressions."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from datetime import date, timedelta
from functools import reduce

import numpy as np
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.attribute_versions import versions_from
from etl.errors import UserError
from etl.label_versions import labels_from
from etl.spec.attributes import CategoricalAttribute, LocalTimeAttribute, NumericAttribute
from etl.spec.model import DataSpec
from etl.spec.sections import UNKNOWN_LABEL
from etl.spec.units import DAY, MICROS
from etl.tables import forecast_schemas, model_schemas, schemas, spark_io
from etl.tables.declared_columns import logged_context_attributes
from etl.tables.forecast_schemas import (
    SURFACE,
    UNKNOWN_VALUE,
    ProviderLabel,
    provider_labels,
    targeting_attributes,
    user_categories,
)
from etl.tables.lake import Lake
from features.encoding.spark import encode_local_time
from features.forecast.sampling import sampling_scale, workload_combinations

SUPPLY_DAYS = 56  # of daily counts, from which trend and weekday effects are fitted
IMPORTANCE_DIGITS = 3  # to which importances are rounded when users are grouped by them
MAX_VALUES = 8192  # of all attributes: readers hold two matrices of pairs, 0.5 GiB each
PAIR_KEY = ("attribute_a", "value_a", "attribute_b", "value_b")
ALL_ROWS = "day IS NOT NULL"  # a build replaces the one before


def build_forecast(lake: Lake, until: date) -> dict[str, int]:
    """Replace the tables of the forecast by those of the latest scored days until a day.

    Returns:
        The number of rows, by table.

    Raises:
        UserError: No day of the window has scores.
    """
    names = ["scores", "events", "attributes_user"]
    names += ["audience_labels"] if lake.spec.audiences and lake.exists("audience_labels") else []
    versions = {name: lake.version(name) for name in names}
    supply = daily_supply(lake, until, versions["events"])
    shown = {(row["day"], row["surface"]) for row in supply.select("day", "surface").collect()}
    days = scored_days(lake, until, shown)
    rows = targeted_impressions(lake, days, versions)
    return write_forecast(lake, rows, supply, days[-1], versions)


def write_forecast(
    lake: Lake, rows: DataFrame, supply: DataFrame, last_day: date, versions: Mapping[str, int]
) -> dict[str, int]:
    """Replace the tables of the forecast.

    Args:
        lake: The lake.
        rows: Impressions of the window, as `targeted_impressions` returns them.
        supply: Impressions by surface and day.
        last_day: The last day of the window.
        versions: The versions of the tables that were read.

    Returns:
        The number of rows, by table.

    Raises:
        UserError: The attributes have more than MAX_VALUES values.
    """
    spec = lake.spec
    day = F.lit(last_day)
    written: dict[str, int] = {}
    with spark_io.cached(rows.withColumn("day", day)) as targeted:
        _require_few_values(spec, targeted)
        frames = {
            forecast_schemas.forecast_margins: margins_of(spec, targeted).withColumn("day", day),
            forecast_schemas.forecast_sketches: sketches_of(spec, targeted).withColumn("day", day),
            forecast_schemas.forecast_supply: supply,
        }
        for schema_of, frame in frames.items():
            schema = schema_of(spec)
            spark_io.replace_partitions(lake, schema, frame, ALL_ROWS, versions)
            written[schema.name] = lake.version(schema.name)
        # The sample is last: its commit names the versions of the others, which readers follow.
        schema = forecast_schemas.forecast_sample(spec)
        sample = targeted.join(sampled_users(spec, targeted), "sampled_user")
        spark_io.replace_partitions(lake, schema, sample, ALL_ROWS, {**versions, **written})
    return {table: lake.count_rows(table) for table in (*written, schema.name)}


def _require_few_values(spec: DataSpec, rows: DataFrame) -> None:
    """Raise UserError if the attributes have more than MAX_VALUES values, about, in all."""
    counts = [F.approx_count_distinct(f"target_{name}").alias(name) for name in _discrete(spec)]
    number = rows.agg(*counts).collect()[0].asDict()
    if sum(number.values()) > MAX_VALUES:
        most = max(number, key=number.__getitem__)
        raise UserError(
            f"the attributes of a targeting have about {sum(number.values()):,} values, {most} "
            f"{number[most]:,} of them, and counts of pairs fit in memory for {MAX_VALUES:,}: "
            f"leave {most} out of forecast.attributes, or log groups of its values"
        )


def _discrete(spec: DataSpec) -> list[str]:
    """The attributes of a targeting that have values: all but numbers."""
    attributes = targeting_attributes(spec).items()
    return [name for name, of in attributes if not isinstance(of, NumericAttribute)]


def scored_days(lake: Lake, until: date, shown: Collection[tuple[date, str]]) -> list[date]:
    """The latest days until a day, as many as the window has, that are scored.

    All ad surfaces with impressions on a day, which `shown` names, must be; on days before those
    of the supply, all ad surfaces.

    Raises:
        UserError: There are none.
    """
    assert lake.spec.forecast
    actions = lake.add_actions("scores")
    partitions = (actions[f"partition.{name}"].to_pylist() for name in ("day", "surface"))
    scored = set(zip(*partitions, strict=True))
    days = {day for day, _ in scored if day <= until}
    earlier = {day for day in days if day < first_supply_day(until)}
    required = {*shown, *itertools.product(earlier, lake.spec.ad_surfaces)}
    complete = sorted(days - {day for day, surface in required if (day, surface) not in scored})
    if not complete:
        raise UserError(
            f"no day until {until} has scores of all ad surfaces: run `gemline rank score` first"
        )
    return complete[-(lake.spec.forecast.window // DAY) :]


def targeted_impressions(lake: Lake, days: Sequence[date], versions: dict[str, int]) -> DataFrame:
    """The scored impressions of some days with what a targeting may name and what they brought.

    Attributes of users are the latest ones that were valid when the last day ended.
    """
    spec = lake.spec
    scores = spark_io.read_table(lake, model_schemas.scores(spec), versions["scores"])
    scores = scores.filter(F.col("day").isin(list(days)) & F.col("rank").isNotNull())
    impressions = _impression_events(lake, days, versions["events"])
    rows = scores.drop("item_id").join(impressions, ["impression_id", "day"])
    request = Window.partitionBy("surface", "day", "user_id", "request_id")
    probabilities = {
        f"p_{name}": F.avg(f"p_{name}").over(request.rowsBetween(*_ALL_ADS_OF_REQUEST))
        for name in spec.objectives
    }
    above = F.lag("expected_value").over(request.orderBy("rank"))
    rows = rows.withColumns({**probabilities, "value_above": above})
    users = _latest_attributes(lake, days[-1], versions["attributes_user"])
    rows = rows.join(users, "user_id", "left")
    if "audience_labels" in versions:
        labels = _latest_labels(lake, days[-1], versions["audience_labels"])
        rows = rows.join(labels, "user_id", "left")
    else:
        rows = rows.withColumns({f"label_{n}": F.lit(None) for n in provider_labels(spec)})
    return rows.select(
        F.xxhash64("user_id").alias("sampled_user"),
        F.col("day").alias("impression_day"),
        *[_target_column(spec, name) for name in targeting_attributes(spec)],
        F.col("expected_value").alias("value"),
        "value_above",
        *probabilities,
    )


_ALL_ADS_OF_REQUEST = Window.unboundedPreceding, Window.unboundedFollowing


def _impression_events(lake: Lake, days: Sequence[date], version: int) -> DataFrame:
    spec = lake.spec
    events = spark_io.read_table(lake, schemas.events(spec), version)
    events = events.filter(F.col("day").isin(list(days)))
    events = events.filter(F.col("type") == spec.event_codes[spec.impression_type])
    context = [f"ctx_{name}" for name in logged_context_attributes(spec)]
    return events.select("impression_id", "day", "user_id", "event_ts", *context)


def _latest_attributes(lake: Lake, day: date, version: int) -> DataFrame:
    """The attributes of users that were valid when a day ended; of equal times, the latest day."""
    stored = versions_from(lake, "user", day, version)
    end_us = lake.spec.day_end(day) * MICROS["s"]
    known = stored.filter((F.col("valid_from") < end_us) & (F.col("day") <= F.lit(day)))
    names = [f"attr_{name}" for name in lake.spec.attributes.user]
    latest = F.max_by(F.struct(*names), F.struct("valid_from", "day")).alias("user")
    return known.groupBy("user_id").agg(latest).select("user_id", "user.*")


def _latest_labels(lake: Lake, day: date, version: int) -> DataFrame:
    """The labels of users when a day ended; of equal times, those of the latest day."""
    stored = labels_from(lake, day, version)
    end_us = lake.spec.day_end(day) * MICROS["s"]
    known = stored.filter((F.col("valid_from") < end_us) & (F.col("day") <= F.lit(day)))
    latest = []
    for name, of in provider_labels(lake.spec).items():
        is_of = (F.col("audience") == of.audience) & (F.col("provider") == of.provider)
        label = F.max_by("label", F.when(is_of, F.struct("valid_from", "day")))
        latest.append(label.alias(f"label_{name}"))
    return known.groupBy("user_id").agg(*latest)


def _target_column(spec: DataSpec, name: str) -> Column:
    """What a targeting compares: a surface, a local time, a number, or a category as logged."""
    attribute = targeting_attributes(spec)[name]
    if name == SURFACE:
        column = F.col("surface")
    elif isinstance(attribute, LocalTimeAttribute):
        first = 1 if attribute.part == "hour" else 0  # hours from 0, weekdays from 1 (Monday)
        seconds = F.floor(F.col("event_ts") / MICROS["s"])
        column = encode_local_time(spec, attribute, seconds) - first
    elif isinstance(attribute, ProviderLabel):
        column = F.coalesce(F.col(f"label_{name}"), F.lit(UNKNOWN_LABEL))
    else:
        prefix = "attr" if name in spec.attributes.user else "ctx"
        column = F.col(f"{prefix}_{name}")
        if isinstance(attribute, CategoricalAttribute):
            column = F.coalesce(column, F.lit(UNKNOWN_VALUE))
    return column.alias(f"target_{name}")


def sampled_users(spec: DataSpec, rows: DataFrame) -> DataFrame:
    """The sampled users with the `probability` of each; a user is sampled by the same hash daily.

    Every step is a Spark aggregation; the driver sees groups of equal importance only.
    """
    assert spec.forecast
    names = [f"target_{name}" for name in user_categories(spec)]
    users = rows.groupBy("sampled_user", *names).agg(F.count("*").alias("num_rows"))
    importance = _profile_importance(users, names, spec.forecast.min_users)
    users = users.join(importance, names) if names else users.crossJoin(importance)
    users = users.withColumn(
        "importance", F.round(F.log(F.col("importance") / F.sqrt("num_rows")), IMPORTANCE_DIGITS)
    ).withColumn("importance", F.exp("importance"))
    groups = users.groupBy("importance").agg(F.sum("num_rows").alias("num_rows")).toPandas()
    scale = sampling_scale(
        groups["importance"].to_numpy(np.float64),
        groups["num_rows"].to_numpy(np.float64),
        float(spec.forecast.sample_rows),
    )
    probability = F.least(F.lit(1.0), F.lit(scale) * F.col("importance"))
    uniform = F.pmod(F.xxhash64("sampled_user", F.lit("forecast")), F.lit(2**53)) / F.lit(2.0**53)
    users = users.withColumn("probability", probability if np.isfinite(scale) else F.lit(1.0))
    return users.filter(uniform < F.col("probability")).select("sampled_user", "probability")


def _profile_importance(users: DataFrame, names: Sequence[str], min_users: int) -> DataFrame:
    """The importance of users by their attributes: sqrt of the sum of 1 / T over their targetings.

    Targetings of fewer than `min_users` users are not answered, so they do not count.
    """
    profiles = users.groupBy(*names).agg(F.count("*").alias("num_users"))
    combinations = workload_combinations(names)
    targetings = [
        F.struct(F.lit(k).alias("combination"), F.xxhash64(F.lit(k), *combination).alias("values"))
        for k, combination in enumerate(combinations)
    ]
    exploded = profiles.withColumn("targeting", F.explode(F.array(*targetings)))
    sizes = exploded.groupBy("targeting").agg(F.sum("num_users").alias("size"))
    is_answered = (F.col("size") >= min_users) | (F.col("targeting.combination") == 0)
    joined = exploded.join(sizes.filter(is_answered), "targeting")
    return joined.groupBy(*names).agg(F.sqrt(F.sum(1 / F.col("size"))).alias("importance"))


def margins_of(spec: DataSpec, rows: DataFrame) -> DataFrame:
    """Impressions by pair of values, and users by pair of values that are attributes of users."""
    impressions = _pair_sums(rows, _discrete(spec), "impressions")
    of_users = user_categories(spec)
    users = rows.select("sampled_user", *[f"target_{name}" for name in of_users]).distinct()
    return impressions.join(_pair_sums(users, of_users, "users"), list(PAIR_KEY), "left")


def _pair_sums(rows: DataFrame, names: Sequence[str], column: str) -> DataFrame:
    """Counts of rows by pair of values of two attributes, or of one attribute and itself."""
    cells = rows.groupBy(*[f"target_{name}" for name in names]).agg(F.count("*").alias(column))
    pairs = [
        F.struct(
            F.lit(a).alias("attribute_a"), F.col(f"target_{a}").cast("string").alias("value_a"),
            F.lit(b).alias("attribute_b"), F.col(f"target_{b}").cast("string").alias("value_b"),
        )
        for i, a in enumerate(names) for b in names[i:]
    ]  # fmt: skip
    exploded = cells.select(F.explode(F.array(*pairs)).alias("pair"), column)
    exploded = exploded.select("pair.*", column)
    return exploded.groupBy(*PAIR_KEY).agg(F.sum(column).alias(column))


def sketches_of(spec: DataSpec, rows: DataFrame) -> DataFrame:
    """A theta sketch of the users with impressions of each value."""
    frames = [
        rows.groupBy(F.col(f"target_{name}").cast("string").alias("value"))
        .agg(F.theta_sketch_agg("sampled_user").alias("sketch"))
        .withColumn("attribute", F.lit(name))
        for name in _discrete(spec)
    ]
    return reduce(DataFrame.unionByName, frames)


def first_supply_day(until: date) -> date:
    """The first day of the daily counts of impressions until a day."""
    return until - timedelta(days=SUPPLY_DAYS - 1)


def daily_supply(lake: Lake, until: date, version: int) -> DataFrame:
    """Impressions of each ad surface by day, over the last weeks."""
    spec = lake.spec
    events = spark_io.read_table(lake, schemas.events(spec), version)
    events = events.filter(spark_io.day_range_predicate(first_supply_day(until), until))
    events = events.filter(F.col("type") == spec.event_codes[spec.impression_type])
    counts = events.groupBy("surface", "day").agg(F.count("*").alias("impressions"))
    names = {spec.surface_codes[name]: name for name in spec.ad_surfaces}
    mapping = F.create_map(*[F.lit(x) for pair in names.items() for x in pair])
    return counts.withColumn("surface", mapping[F.col("surface").cast("int")]).filter(
        "surface IS NOT NULL"
    )
