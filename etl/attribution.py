"""Attribution: which impression an outcome is attributed to."""

import functools

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from etl.spec.objectives import Objective, Touch
from etl.spec.units import MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake

OUTCOME = ("log", "event_id", "impression_id", "event_ts", "visible_ts", "value")
ID = ("log", "event_id")


def attribute_outcomes(lake: Lake, events: DataFrame, objective: Objective) -> DataFrame:
    """Outcomes of an objective, `impression_id` being the impression that each is attributed to.

    One that names its impression is attributed to it. Any other goes to a touch of its user at or
    before it: of the first kind in `attribution` that has one within its window, the latest. A
    touch counts if it could be seen when the outcome could be, so that one that lands later does
    not move an outcome that was attributed before.
    """
    spec = lake.spec
    outcomes = events.filter(F.col("type") == spec.event_codes[objective.event])
    if objective.event == spec.impression:
        return outcomes.select(*OUTCOME)
    named, unnamed = _by_name(spec, events, outcomes, objective)
    return named.unionByName(_to_touches(lake, events, unnamed, spec.attribution_of(objective)))


def unknown_impressions(spec: DataSpec, events: DataFrame, outcomes: DataFrame) -> DataFrame:
    """Outcomes that name an impression which is not among the events."""
    shown = _impressions(spec, events).select("impression_id")
    return outcomes.filter("impression_id IS NOT NULL").join(shown, "impression_id", "left_anti")


def _impressions(spec: DataSpec, events: DataFrame) -> DataFrame:
    return events.filter(F.col("type") == spec.event_codes[spec.impression])


def _by_name(
    spec: DataSpec, events: DataFrame, outcomes: DataFrame, objective: Objective
) -> tuple[DataFrame, DataFrame]:
    """Outcomes to attribute to the impressions that they name, and those to attribute to touches.

    With `unknown_impression: last_touch` the latter include those whose impression could not be
    seen when they could be.
    """
    named = outcomes.filter("impression_id IS NOT NULL")
    unnamed = outcomes.filter("impression_id IS NULL")
    if objective.unknown_impression == "drop":
        return named.select(*OUTCOME), unnamed
    shown = _impressions(spec, events).select("impression_id", F.col("visible_ts").alias("shown"))
    known = named.join(shown, "impression_id", "left")
    is_known = F.coalesce(F.col("shown") <= F.col("visible_ts"), F.lit(False))
    return (
        known.filter(is_known).select(*OUTCOME),
        unnamed.unionByName(known.filter(~is_known).drop("shown")),
    )


def _to_touches(
    lake: Lake, events: DataFrame, outcomes: DataFrame, attribution: tuple[Touch, ...]
) -> DataFrame:
    """Each outcome with the impression of its touch; without a touch it is left out."""
    pairs = [
        _pairs(lake, events, outcomes, touch).withColumn("rank", F.lit(-place))
        for place, touch in enumerate(attribution)
    ]
    found = functools.reduce(DataFrame.unionByName, pairs)
    order = F.struct("rank", "touch_ts", "touch_id")
    own = [name for name in OUTCOME if name != "impression_id"]
    best = found.groupBy(*own).agg(F.max_by("touch_impression", order).alias("impression_id"))
    return best.select(*OUTCOME)


def _pairs(lake: Lake, events: DataFrame, outcomes: DataFrame, touch: Touch) -> DataFrame:
    """Every outcome with each touch of a kind to which it may be attributed."""
    touches = _touches(lake, events, touch).select(
        "user_id",
        "touched",
        F.col("event_ts").alias("touch_ts"),
        F.struct(*reversed(ID)).alias("touch_id"),
        F.col("visible_ts").alias("touch_visible"),
        F.col("impression_id").alias("touch_impression"),
    )
    own = [name for name in OUTCOME if name != "impression_id"]
    asked = _touched(lake, outcomes, touch).select("user_id", "touched", *own)
    since = F.col("event_ts") - F.col("touch_ts")
    may = (since >= 0) & (F.col("touch_visible") <= F.col("visible_ts"))
    if touch.window is not None:
        may &= since <= touch.window * MICROS["s"]
    pairs = asked.join(touches, ["user_id", "touched"]).filter(may)
    return pairs.select(*own, "touch_ts", "touch_id", "touch_impression")


def _touches(lake: Lake, events: DataFrame, touch: Touch) -> DataFrame:
    """Events of a kind, each with its impression; one that names none has its last impression."""
    spec = lake.spec
    of_type = _touched(lake, events, touch)
    of_type = of_type.filter(F.col("type") == spec.event_codes[touch.touch])
    if touch.touch == spec.impression:
        return of_type
    shown = touch.model_copy(update={"touch": spec.impression, "window": None})
    unnamed = of_type.filter("impression_id IS NULL")
    found = _to_touches(lake, events, unnamed, (shown,)).select(*ID, "impression_id")
    attributed = unnamed.drop("impression_id").join(found, [*ID])
    return of_type.filter("impression_id IS NOT NULL").unionByName(attributed)


def _touched(lake: Lake, events: DataFrame, touch: Touch) -> DataFrame:
    """Events with `touched`, which an outcome and its touch share."""
    key: Column = F.col("item_id")
    if touch.key != "item":
        events = events.join(_values(lake, touch.key), "item_id", "left")
        key = F.col("of_item")
    parts = (key, F.col("surface")) if touch.same_surface else (key,)
    touched = F.when(key.isNotNull(), F.concat_ws("\x1f", *parts))
    return events.withColumn("touched", touched).drop("of_item")


def _values(lake: Lake, attribute: str) -> DataFrame:
    """What an attribute of each item is: `item_id`, `of_item`."""
    versions = delta.read(lake, contracts.attributes(lake.spec, "item"))
    first = F.min_by(f"x_{attribute}", F.struct("valid_from", "day")).alias("of_item")
    return versions.groupBy("item_id").agg(first)
