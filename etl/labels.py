"""The labels step: impressions with their requests, attributed outcomes, and labels.

Attribution finds the impression to which an outcome (click, conversion) belongs.
"""

import functools
from collections.abc import Sequence
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.event_time import format_utc
from etl.spec.model import DataSpec
from etl.spec.sections import Objective, OutcomeLabel, Touchpoint
from etl.spec.units import MICROS
from etl.tables import label_schemas, schemas, spark_io
from etl.tables.lake import Lake

OUTCOME_COLUMNS = (
    "log", "event_id", "impression_id", "type", "event_ts", "visible_ts", "value", "dwell_ms",
)  # fmt: skip
EVENT_KEY = ("log", "event_id")
_OUTCOME_VALUES = tuple(name for name in OUTCOME_COLUMNS if name != "impression_id")


def attribute_outcomes(
    lake: Lake, events: DataFrame, objectives: Sequence[OutcomeLabel]
) -> DataFrame:
    """The attributed outcomes of objectives that attribute alike (`attribution_groups`).

    `impression_id` is the impression of each. An outcome that names its impression is attributed to
    that impression. Any other outcome is attributed to its user's latest earlier touch, for the
    first entry of `attribution` that has a touch in its window. A touch must be visible when the
    outcome is, so that touches that land later do not change attributions. Outcomes without a touch
    are left out.

    Returns:
        Rows with `OUTCOME_COLUMNS`.
    """
    spec, objective = lake.spec, objectives[0]
    codes = {spec.event_codes[objective.event] for objective in objectives}
    outcomes = events.filter(F.col("type").isin(codes))
    if objective.event == spec.impression_type:
        return outcomes.select(*OUTCOME_COLUMNS)
    named, unnamed = _split_by_logged_impression(spec, events, outcomes, objective)
    touchpoints = spec.attribution_touches(objective)
    return named.unionByName(_attribute_to_touches(lake, events, unnamed, touchpoints))


def attribution_groups(spec: DataSpec) -> list[list[str]]:
    """The names of the objectives, auxiliary ones included, that attribute their outcomes alike.

    The outcomes of a group are attributed together: a further objective costs no further join.
    """
    groups: dict[object, list[str]] = {}
    for name, objective in spec.all_objectives.items():
        touches = spec.attribution_touches(objective)
        rule = objective.event == spec.impression_type, touches, objective.unknown_impression
        groups.setdefault(rule, []).append(name)
    return list(groups.values())


def outcomes_without_impression(
    spec: DataSpec, events: DataFrame, outcomes: DataFrame
) -> DataFrame:
    """Outcomes that name an impression that is not among the events."""
    known = _impression_events(spec, events).select("impression_id")
    return outcomes.filter("impression_id IS NOT NULL").join(known, "impression_id", "left_anti")


def _impression_events(spec: DataSpec, events: DataFrame) -> DataFrame:
    return events.filter(F.col("type") == spec.event_codes[spec.impression_type])


def _split_by_logged_impression(
    spec: DataSpec, events: DataFrame, outcomes: DataFrame, objective: OutcomeLabel
) -> tuple[DataFrame, DataFrame]:
    """Outcomes to attribute to the impression that they name, and those to attribute to touches.

    With `unknown_impression: last_touch`, an outcome that names an impression that is unknown, or
    not yet visible when the outcome is, is attributed to a touch.
    """
    named = outcomes.filter("impression_id IS NOT NULL")
    unnamed = outcomes.filter("impression_id IS NULL")
    if objective.unknown_impression == "drop":
        return named.select(*OUTCOME_COLUMNS), unnamed
    impressions = _impression_events(spec, events).select(
        "impression_id", F.col("visible_ts").alias("impression_visible_ts")
    )
    named = named.join(impressions, "impression_id", "left")
    is_known = F.col("impression_visible_ts") <= F.col("visible_ts")
    is_known = F.coalesce(is_known, F.lit(False))
    unknown = named.filter(~is_known).drop("impression_visible_ts")
    return named.filter(is_known).select(*OUTCOME_COLUMNS), unnamed.unionByName(unknown)


def _attribute_to_touches(
    lake: Lake, events: DataFrame, outcomes: DataFrame, touchpoints: tuple[Touchpoint, ...]
) -> DataFrame:
    """Outcomes with the impression of their best touch; outcomes without a touch are left out."""
    candidates = [
        _candidate_touches(lake, events, outcomes, touchpoint)
        .withColumn("preference", F.lit(-position))
        for position, touchpoint in enumerate(touchpoints)
    ]  # fmt: skip
    pairs = functools.reduce(DataFrame.unionByName, candidates)
    order = F.struct("preference", "touch_ts", "touch_id")
    impression_id = F.max_by("touch_impression", order).alias("impression_id")
    attributed = pairs.groupBy(*_OUTCOME_VALUES).agg(impression_id)
    return attributed.select(*OUTCOME_COLUMNS)


def _candidate_touches(
    lake: Lake, events: DataFrame, outcomes: DataFrame, touchpoint: Touchpoint
) -> DataFrame:
    """All pairs of an outcome and a touch to which it may be attributed."""
    touches = _touch_events(lake, events, touchpoint).select(
        "user_id",
        "touch_key",
        F.col("event_ts").alias("touch_ts"),
        F.struct(*reversed(EVENT_KEY)).alias("touch_id"),
        F.col("visible_ts").alias("touch_visible"),
        F.col("impression_id").alias("touch_impression"),
    )
    keyed = _with_touch_key(lake, outcomes, touchpoint)
    keyed = keyed.select("user_id", "touch_key", *_OUTCOME_VALUES)
    elapsed = F.col("event_ts") - F.col("touch_ts")
    is_candidate = (elapsed >= 0) & (F.col("touch_visible") <= F.col("visible_ts"))
    if touchpoint.window is not None:
        is_candidate &= elapsed <= touchpoint.window * MICROS["s"]
    pairs = keyed.join(touches, ["user_id", "touch_key"]).filter(is_candidate)
    return pairs.select(*_OUTCOME_VALUES, "touch_ts", "touch_id", "touch_impression")


def _touch_events(lake: Lake, events: DataFrame, touchpoint: Touchpoint) -> DataFrame:
    """Events of a touchpoint with their impressions.

    An event that names no impression gets the latest earlier one of its user with the same key.
    """
    spec = lake.spec
    touches = _with_touch_key(lake, events, touchpoint)
    touches = touches.filter(F.col("type") == spec.event_codes[touchpoint.touch])
    if touchpoint.touch == spec.impression_type:
        return touches
    impression = touchpoint.model_copy(update={"touch": spec.impression_type, "window": None})
    unnamed = touches.filter("impression_id IS NULL")
    attributed = _attribute_to_touches(lake, events, unnamed, (impression,))
    attributed = attributed.select(*EVENT_KEY, "impression_id")
    attributed = unnamed.drop("impression_id").join(attributed, [*EVENT_KEY])
    return touches.filter("impression_id IS NOT NULL").unionByName(attributed)


def _with_touch_key(lake: Lake, events: DataFrame, touchpoint: Touchpoint) -> DataFrame:
    """Events with `touch_key`, which an outcome and its touch have in common."""
    key: Column = F.col("item_id")
    if touchpoint.key != "item":
        events = events.join(item_attribute_values(lake, touchpoint.key), "item_id", "left")
        key = F.col("item_attribute")
    parts = (key, F.col("surface")) if touchpoint.same_surface else (key,)
    touch_key = F.when(key.isNotNull(), F.concat_ws("\x1f", *parts))
    return events.withColumn("touch_key", touch_key).drop("item_attribute")


def item_attribute_values(lake: Lake, attribute: str) -> DataFrame:
    """The first value of an attribute of each item: `item_id`, `item_attribute`."""
    versions = spark_io.read_table(lake, schemas.attributes(lake.spec, "item"))
    first = F.min_by(f"attr_{attribute}", F.struct("valid_from", "day")).alias("item_attribute")
    return versions.groupBy("item_id").agg(first)


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


def label_impressions(
    lake: Lake, days: tuple[date, date], data_until: int | None = None
) -> dict[str, int]:
    """Replace `impressions` of a range of landing days, and of earlier days that mature on them.

    A label is null until it is mature: until its window and grace period have passed and the
    impression is visible. It counts the outcomes that are visible at that time, so that it does not
    change when others land later, and contains no information of later days.

    Args:
        lake: The lake with the events and attributes.
        days: First and last landing day.
        data_until: Epoch second until which all events have landed; by default the end of the last
            day.

    Returns:
        The number of impressions, and of the days' outcomes that name an unknown impression.

    Raises:
        UserError: The data ends before or after the last day with events.
    """
    spec = lake.spec
    names = ("events", "attributes_item") if spec.uses_item_attribute_attribution else ("events",)
    versions = {name: lake.version(name) for name in names}
    events = spark_io.read_table(lake, schemas.events(spec), versions["events"])
    lateness = timedelta(days=1 + spec.allowed_lateness_days)
    first_day = days[0] - timedelta(days=spec.label_maturity_days) - lateness
    last_day = lake.day_range("events")[1]
    if data_until is None:
        data_until = spec.day_end(last_day)
    if spec.last_day_before(data_until) != last_day:
        raise UserError(
            f"--data-until is {format_utc(data_until)} UTC, but the last day with events is "
            f"{last_day}: name a time of that day"
        )

    recent = events.filter(F.col("day") >= F.lit(first_day - lateness))
    impressions = recent.filter(F.col("type") == spec.event_codes[spec.impression_type])
    where = spark_io.day_range_predicate(first_day, days[1])
    impressions = assign_request_ids(spec, impressions.filter(where))
    rows = impressions.join(outcomes_by_impression(lake, recent), "impression_id", "left")
    for name in spec.label_windows:
        rows = rows.withColumns(_label_columns(spec, name, data_until * MICROS["s"]))
    schema = label_schemas.impressions(spec)
    spark_io.replace_partitions(lake, schema, rows, where, versions)

    types = {spec.event_codes[objective.event] for objective in spec.all_objectives.values()}
    outcomes = recent.filter(spark_io.day_range_predicate(*days)).filter(F.col("type").isin(types))
    unknown = outcomes_without_impression(spec, recent, outcomes)
    return {
        "impressions": lake.count_rows(schema.name, (first_day, days[1])),
        "outcomes of unknown impressions": unknown.count(),
    }


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


def outcomes_by_impression(lake: Lake, events: DataFrame) -> DataFrame:
    """The attributed outcomes of each impression, ordered by attribution group, type and time.

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
    fields = ["group", "type", "ts", "value", "visible_ts", "dwell_ms"]
    if lake.spec.retraction_types:
        rows = rows.join(_retractions_by_outcome(lake.spec, events), "event_id", "left")
        fields += ["event_id", "retractions"]
    outcomes = F.sort_array(F.collect_list(F.struct(*fields))).alias("outcomes")
    return rows.groupBy("impression_id").agg(outcomes)


def _retractions_by_outcome(spec: DataSpec, events: DataFrame) -> DataFrame:
    """The retractions of each event that is retracted: `event_id`, `retractions`, in order."""
    codes = [spec.event_codes[name] for name in spec.retraction_types]
    retraction = F.struct("visible_ts", "type", "day", F.col("event_id").alias("id"))
    retractions = events.filter(F.col("type").isin(codes)).groupBy("retracted_event_id")
    by_outcome = retractions.agg(F.sort_array(F.collect_list(retraction)).alias("retractions"))
    return by_outcome.withColumnRenamed("retracted_event_id", "event_id")
