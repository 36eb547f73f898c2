"""Which impression gets the credit for an outcome: that of the last touch."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.spec.model import DataSpec, Objective
from etl.tables import contracts, delta
from etl.tables.lake import Lake

OUTCOME = ("event_id", "impression_id", "user_id", "touched", "event_ts", "visible_ts", "value")


def credited(lake: Lake, events: DataFrame, objective: Objective) -> DataFrame:
    """Outcomes of an objective, `impression_id` being the impression that gets the credit.

    One that names its impression is credited to it. Any other goes to the last touch (a `credit`
    event, else an impression) of its user at or before it, on the same item or the same value of
    `credit_by`, that could be seen when it could be: a touch that lands later does not move a
    credit that was given.
    """
    spec = lake.spec
    by, rows = F.col("item_id"), events
    if objective.credit_by != "item":
        rows = events.join(_values(lake, objective.credit_by), "item_id", "left")
        by = F.col("of_item")
    parts = (by, F.col("surface")) if objective.credit_same_surface else (by,)
    touched = F.when(by.isNotNull(), F.concat_ws("\x1f", *parts))
    rows = rows.withColumn("touched", touched)
    return _credited(spec, rows, objective.event, objective.credit or spec.impression)


def _values(lake: Lake, attribute: str) -> DataFrame:
    """What an attribute of each item is: `item_id`, `of_item`."""
    versions = delta.read(lake, contracts.attributes(lake.spec, "item"))
    first = F.min_by(f"x_{attribute}", F.struct("valid_from", "day")).alias("of_item")
    return versions.groupBy("item_id").agg(first)


def _credited(spec: DataSpec, events: DataFrame, event: str, touch: str) -> DataFrame:
    mine = events.filter(F.col("type") == spec.event_codes[event]).select(*OUTCOME)
    if event == spec.impression:
        return mine
    touches = _credited(spec, events, touch, spec.impression)
    last = F.struct("event_ts", "event_id", "impression_id").alias("touch")
    touches = touches.select("user_id", "touched", "visible_ts", last)
    unnamed = mine.filter(F.col("impression_id").isNull()).drop("impression_id")
    seen = (F.col("touch.event_ts") <= F.col("e.event_ts")) & (
        F.col("t.visible_ts") <= F.col("e.visible_ts")
    )
    pairs = unnamed.alias("e").join(touches.alias("t"), ["user_id", "touched"]).filter(seen)
    own = [F.col(f"e.{name}") for name in unnamed.columns if name not in {"user_id", "touched"}]
    found = pairs.groupBy("user_id", "touched", *own).agg(F.max("touch").alias("touch"))
    named = mine.filter(F.col("impression_id").isNotNull())
    return named.unionByName(found.select(*unnamed.columns, "touch.impression_id"))
