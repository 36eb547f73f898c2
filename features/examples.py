"""Examples: a pointer into the user's history, and everything else known before an impression."""

from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.requests import with_requests
from etl.spec.attributes import Clock
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake
from features.as_of import as_of_ts
from features.as_of_join import last_before
from features.counters import count
from features.coverage import without_attributes
from features.encoding import clock, encode
from features.history.build import events_before, visible_after_days
from features.history.compact import days_back
from features.item_versions import first_known
from features.items import item_index


def build_examples(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace the given days of `examples`, by the landing day of the impression."""
    spec = lake.spec
    names = ("events", "items", "item_versions", "history", "attributes_user")
    versions = {name: lake.version(name) for name in names}
    events = delta.read(lake, contracts.events(spec), versions["events"])
    items = delta.read(lake, contracts.items(spec), versions["items"]).drop("day")
    items = items.join(first_known(lake, versions["item_versions"]), "item_ix", "left")
    shown = events.filter(F.col("type") == spec.event_codes[spec.impression])
    shown = shown.filter(delta.days_between(*days)).join(items, "item_id", "left")
    shown = with_as_of(spec, with_requests(spec, shown))

    since = days[0] - timedelta(days=days_back(spec))
    landed = delta.days_between(since - timedelta(days=visible_after_days(spec)), days[1])
    recent = events.filter(landed).filter(F.col("visible_ts") >= spec.day_start(since))
    recent = recent.join(items, "item_id", "left")
    counted = count(
        spec,
        recent.select("visible_ts", "type", *_keys(spec, "visible_ts")),
        shown.select("impression_id", "as_of_ts", *_keys(spec, "as_of_ts")),
    )
    rows = shown.join(counted, "impression_id")
    rows = rows.join(events_before(lake, versions["history"], since), "user_id", "left")
    rows = _with_user_attributes(lake, rows, versions["attributes_user"])
    rows = rows.withColumns(
        {
            **_encoded(spec),
            "hist_len": F.coalesce("total", F.lit(0)) + F.col("seen"),
            "history_version": F.lit(versions["history"]),
            "item_ix": item_index(),
            "item_since": F.when(_item_known("as_of_ts"), F.col("item_since")),
        }
    )
    where, contract = delta.days_between(*days), contracts.examples(spec)
    delta.replace(lake, contract, rows, where, versions)
    return {"examples": lake.rows(contract.name, days)} | without_attributes(lake, days)


def with_as_of(spec: DataSpec, shown: DataFrame) -> DataFrame:
    """Impressions with `as_of_ts`: all of a request were ranked as of its first one."""
    request = Window.partitionBy("day", "user_id", "request_id")
    return shown.withColumn("as_of_ts", F.min(F.expr(as_of_ts(spec))).over(request))


def _item_known(ts: str) -> Column:
    return F.col("item_since") < F.col(ts)


def _keys(spec: DataSpec, ts: str) -> list[Column]:
    """The single keys of the counters, as integers; null where unknown at the second `ts`."""
    keys = {
        "k_user": F.xxhash64("user_id"),
        "k_item": F.col("item_ix").cast("bigint"),
        "k_surface": F.col("surface").cast("bigint"),
    }
    keys |= {
        name: F.when(_item_known(ts), F.col(name)) for name in contracts.item_key_columns(spec)
    }
    return [key.alias(name) for name, key in keys.items()]


def _with_user_attributes(lake: Lake, rows: DataFrame, version: int) -> DataFrame:
    """Each row with its user's newest attributes that were valid strictly before its as-of time."""
    names = [f"x_{name}" for name in lake.spec.attributes.user]
    stored = delta.read(lake, contracts.attributes(lake.spec, "user"), version)
    since = F.floor(F.col("valid_from") / MICROS["s"]).alias("user_since")
    versions = stored.select("user_id", "valid_from", F.struct(since, *names).alias("user"))
    as_of = (F.col("as_of_ts") * MICROS["s"]).alias("valid_from")
    asked = rows.select("user_id", as_of, "impression_id")
    rows = rows.join(last_before(asked, versions, "user_id", "valid_from"), "impression_id")
    return rows.withColumn("user_since", F.col("user.user_since"))


def _encoded(spec: DataSpec) -> dict[str, Column]:
    users = {
        f"u_{name}": encode(attribute, F.col(f"user.x_{name}"))
        for name, attribute in spec.attributes.user.items()
    }
    context = {
        f"x_{name}": clock(spec, attribute, F.col("as_of_ts"))
        if isinstance(attribute, Clock)
        else encode(attribute, F.col(f"x_{name}"))
        for name, attribute in spec.attributes.context.items()
    }
    return users | context
