"""The labels step: impressions with their requests, attributed outcomes, and labels."""

import functools
import logging
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.attribution import (
    EVENT_KEY,
    attribute_outcomes,
    attribution_groups,
    outcomes_without_impression,
)
from etl.errors import UserError
from etl.event_time import format_utc, is_in_future
from etl.spec.label_delays import label_delay_warnings
from etl.spec.model import DataSpec
from etl.spec.sections import Objective, OutcomeLabel
from etl.spec.units import MICROS, DayRange
from etl.tables import atomic_io, label_schemas, schemas, spark_io
from etl.tables.lake import Lake
from etl.tables.uri import read_text_if_exists, resolve_uri

DATA_UNTIL_FILE = "_pipeline", "labels_data_until.txt"


def assign_request_ids(spec: DataSpec, impressions: DataFrame) -> DataFrame:
    """Impressions with a `request_id`: as logged, or derived from user, surface and second.

    Impressions of a user on a surface without a logged request are one request while each follows
    the previous one within `request_session_gap`. Requests end with their landing day, so that a
    day's requests do not depend on the days that are processed with it.
    """
    second = F.floor(F.col("event_ts") / MICROS["s"])
    order = Window.partitionBy("day", "user_id", "surface", F.col("request_id").isNull())
    order = order.orderBy("event_ts", "event_id")
    gap = second - F.lag(second).over(order)
    is_first = F.coalesce(gap > spec.request_session_gap, F.lit(True))
    impressions = impressions.withColumn("request_start", F.when(is_first, second))
    start = F.last("request_start", ignorenulls=True).over(order)
    derived_id = F.concat_ws("@", "user_id", "surface", start)
    request_id = F.coalesce("request_id", derived_id)
    return impressions.withColumn("request_id", request_id).drop("request_start")


def label_impressions(lake: Lake, days: DayRange, data_until: int | None = None) -> dict[str, int]:
    """Replace `impressions` of a range of landing days, and of earlier days that mature on them.

    A label is null until it is mature: until its window and grace period have passed and the
    impression is visible. It counts the outcomes that are visible at that time, so that it does not
    change when others land later, and contains no information of later days.

    Args:
        lake: The lake with the events and attributes.
        days: First and last landing day.
        data_until: Epoch second until which all events have landed; by default the end of the last
            ingested day.

    Returns:
        The number of impressions, and of the days' outcomes that name an unknown impression.

    Raises:
        UserError: The data ends before or after the last ingested day, this day is not over and
            `data_until` is not given, or labels were written with later data.
    """
    spec = lake.spec
    for text in label_delay_warnings(spec):
        logging.warning(text)
    names = ("events", "attributes_item") if spec.uses_item_attribute_attribution else ("events",)
    versions = {name: lake.version(name) for name in names}
    events = spark_io.read_table(lake, schemas.events(spec), versions["events"])
    first_day = first_relabeled_day(spec, days)
    data_until = _end_of_data(lake, data_until)
    _record_data_until(lake, data_until)

    first_read = first_day - _lateness(spec) - timedelta(days=spec.attribution_lookback_days)
    last_read = days[1] + timedelta(days=spec.label_maturity_days + spec.visibility_delay_days)
    recent = events.filter(spark_io.day_range_predicate(first_read, last_read))
    impressions = recent.filter(F.col("type") == spec.event_codes[spec.impression_type])
    where = spark_io.day_range_predicate(first_day, days[1])
    impressions = impressions.filter(where)
    outcomes = outcomes_by_impression(lake, recent, impressions)
    rows = assign_request_ids(spec, impressions).join(outcomes, "impression_id", "left")
    for name in spec.label_windows:
        rows = rows.withColumns(_label_columns(spec, name, data_until * MICROS["s"]))
    schema = label_schemas.impressions(spec)
    spark_io.replace_partitions(lake, schema, rows, where, versions)

    types = {spec.event_codes[objective.event] for objective in spec.all_objectives.values()}
    of_days = recent.filter(spark_io.day_range_predicate(*days)).filter(F.col("type").isin(types))
    unknown = outcomes_without_impression(spec, recent, of_days)
    return {
        "impressions": lake.count_rows(schema.name, (first_day, days[1])),
        "outcomes of unknown impressions": unknown.count(),
    }


def _end_of_data(lake: Lake, stated: int | None) -> int:
    """The stated end of the data, or that of the last ingested day; see `label_impressions`."""
    spec, last_day = lake.spec, lake.last_ingested_day()
    assert last_day is not None, "ingest writes `ingest_metrics` of each day"
    data_until = spec.day_end(last_day) if stated is None else stated
    if stated is None and is_in_future(data_until):
        raise UserError(
            f"{last_day} is not over: pass --data-until with the time until which its events "
            f"have landed, such as {last_day}T14:00"
        )
    if spec.last_day_before(data_until) != last_day:
        raise UserError(
            f"--data-until is {format_utc(data_until)} UTC, but the last ingested day is "
            f"{last_day}: name a time of that day"
        )
    return data_until


def _record_data_until(lake: Lake, data_until: int) -> None:
    """Record until when data has landed; raises UserError if labels know later data.

    Labels that have become final in between would be null again.
    """
    path = resolve_uri(lake.root, *DATA_UNTIL_FILE)
    recorded = read_text_if_exists(path) if lake.exists("impressions") else None
    if recorded and data_until < int(recorded):
        raise UserError(
            f"--data-until is {format_utc(data_until)} UTC, but labels were written with the data "
            f"until {format_utc(int(recorded))} UTC, and final labels stay: name a later time"
        )
    atomic_io.write_text(path, str(data_until))


def first_relabeled_day(spec: DataSpec, days: DayRange) -> date:
    """The first landing day of impressions whose labels can mature on some days.

    They mature after their window and grace period, and once the impression is visible: the delay
    of impressions counts, too. The impression may have landed late.
    """
    return days[0] - timedelta(days=spec.label_maturity_days) - _lateness(spec)


def _lateness(spec: DataSpec) -> timedelta:
    """How many days an event may land after the day on which it occurred."""
    return timedelta(days=1 + spec.allowed_lateness_days)


def _label_columns(spec: DataSpec, label_name: str, data_until_us: int) -> dict[str, Column]:
    """Maturity time (µs) and label of a label window, and the sum that its objective stores."""
    objective_name, _ = spec.label_windows[label_name]
    objective = spec.all_objectives[objective_name]
    mature_ts, outcomes = counted_outcomes(spec, label_name)
    surfaces = [spec.surface_codes[name] for name in spec.surfaces_of(objective_name)]
    has_label = (mature_ts < data_until_us) & F.col("surface").isin(surfaces)
    columns = {
        f"label_mature_ts_{label_name}": mature_ts,
        f"label_{label_name}": F.when(has_label, (F.size(outcomes) > 0).cast("int")),
    }
    if objective.summed_column:
        total = _sum_of_outcomes(outcomes, objective.summed_column)
        columns[f"{objective.summed_column}_{label_name}"] = F.when(has_label, total)
    return columns


def counted_outcomes(spec: DataSpec, label_name: str) -> tuple[Column, Column]:
    """When the label of an impression with `outcomes` is final (µs), and what it counts.

    An outcome counts if it is in the window, visible at that time, and not retracted by a
    retraction that is visible at that time.
    """
    objective_name, window = spec.label_windows[label_name]
    objective = spec.all_objectives[objective_name]
    window_end = F.col("event_ts") + window * MICROS["s"]
    grace_end = window_end + objective.label_grace_period * MICROS["s"]
    mature_ts = F.greatest(grace_end, F.col("visible_ts") * MICROS["s"])
    groups = enumerate(attribution_groups(spec))
    group = next(number for number, names in groups if objective_name in names)
    code = spec.event_codes[objective.event]

    def is_counted(outcome: Column) -> Column:
        is_of_objective = (outcome["group"] == group) & (outcome["type"] == code)
        is_in_window = outcome["ts"].between(F.col("event_ts"), window_end)
        is_visible = outcome["visible_ts"] * MICROS["s"] <= mature_ts
        first = first_retraction(spec, objective, outcome)
        is_kept = F.lit(True) if first is None else first["visible_ts"] * MICROS["s"] > mature_ts
        return is_of_objective & is_in_window & is_visible & F.coalesce(is_kept, F.lit(True))

    return mature_ts, F.filter(F.coalesce("outcomes", F.array()), is_counted)


def first_retraction(spec: DataSpec, objective: OutcomeLabel, outcome: Column) -> Column | None:
    """The first retraction of an outcome, or null; None if its objective has no `retracted_by`.

    It has `visible_ts`, `day` and `id`.
    """
    if not isinstance(objective, Objective) or objective.retracted_by is None:
        return None
    code = spec.event_codes[objective.retracted_by.event]
    retractions = F.filter(outcome["retractions"], lambda retraction: retraction["type"] == code)
    return F.try_element_at(retractions, F.lit(1))


def _sum_of_outcomes(outcomes: Column, column: str) -> Column:
    """The sum of the values that outcomes have; without any, a `value` is 0 and a dwell null."""
    values = F.transform(outcomes, lambda outcome: outcome[column])
    values = F.filter(values, lambda value: value.isNotNull())
    total = F.aggregate(values, F.lit(0.0), lambda total, value: total + value)
    return F.when(F.size(values) > 0, total) if column == "dwell_ms" else total


def outcomes_by_impression(lake: Lake, events: DataFrame, impressions: DataFrame) -> DataFrame:
    """The attributed outcomes of some impressions, ordered by attribution group, type and time.

    Outcomes of other impressions are left out before they are gathered: a log may name one
    placeholder in all outcomes that have no impression.

    Returns:
        `impression_id` and `outcomes`, an array of structs; no row for an impression without any.
    """
    by_group = [
        attribute_outcomes(lake, events, [lake.spec.all_objectives[name] for name in names])
        .withColumn("group", F.lit(group))
        .withColumnRenamed("event_ts", "ts")
        for group, names in enumerate(attribution_groups(lake.spec))
    ]  # fmt: skip
    rows = functools.reduce(DataFrame.unionByName, by_group)
    rows = rows.join(impressions.select("impression_id"), "impression_id", "left_semi")
    fields = ["group", "type", "ts", "value", "visible_ts", "dwell_ms"]
    if lake.spec.retraction_types:
        retracted = _retractions_by_outcome(lake.spec, events)
        rows = rows.join(retracted, [*EVENT_KEY, "type"], "left")
        fields += ["event_id", "retractions"]
    outcomes = F.sort_array(F.collect_list(F.struct(*fields))).alias("outcomes")
    return rows.groupBy("impression_id").agg(outcomes)


def _retractions_by_outcome(spec: DataSpec, events: DataFrame) -> DataFrame:
    """The retractions of each outcome that is retracted: its key, type and `retractions`, in order.

    A retraction retracts the outcome of its own user that it names: ids may be unique only among
    the events of a type, and those that name no outcome, such as placeholders, are not gathered.
    Outcomes of a wide log may also be named by the id of their record, which begins their own.
    """
    record_id = F.regexp_replace("event_id", ":[^:]*$", "")
    names = F.when(F.col("log").isin(*spec.impression_logs), F.array("event_id", record_id))
    codes = [spec.event_codes[name] for name in spec.retraction_types]
    outcome_codes = {spec.event_codes[o.event] for o in spec.objectives.values() if o.retracted_by}
    retraction = F.struct("visible_ts", "type", "day", F.col("event_id").alias("id"))
    retractions = events.filter(F.col("type").isin(codes)).select(
        "user_id", F.col("retracted_event_id").alias("name"), retraction.alias("retraction")
    )
    outcomes = events.filter(F.col("type").isin(outcome_codes))
    names = F.coalesce(names, F.array("event_id"))
    outcomes = outcomes.select("user_id", *EVENT_KEY, "type", F.explode(names).alias("name"))
    pairs = outcomes.join(retractions, ["user_id", "name"])
    by_outcome = pairs.groupBy(*EVENT_KEY, "type")
    return by_outcome.agg(F.sort_array(F.collect_list("retraction")).alias("retractions"))
