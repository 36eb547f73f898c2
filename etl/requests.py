"""Impressions to requests: as the log names them, else by how soon they followed one another."""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from etl.spec.units import MICROS


def with_requests(spec: DataSpec, shown: DataFrame) -> DataFrame:
    """Impressions with the `request_id` of their log, or one made of user, surface and second.

    Impressions of a user on a surface that the log names no request for are of one request while
    each follows the one before within `request_gap`. Requests end with their landing day, so that
    a day gives the same ones whatever it is run with.
    """
    second = F.floor(F.col("event_ts") / MICROS["s"])
    order = Window.partitionBy("day", "user_id", "surface", F.col("request_id").isNull())
    order = order.orderBy("event_ts", "event_id")
    since = second - F.lag(second).over(order)
    first = F.when(F.coalesce(since > spec.request_gap, F.lit(True)), second)
    start = F.last("first_second", ignorenulls=True).over(order)
    own = F.concat_ws("@", "user_id", "surface", start)
    shown = shown.withColumn("first_second", first)
    return shown.withColumn("request_id", F.coalesce("request_id", own)).drop("first_second")
