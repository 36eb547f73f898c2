"""Attribution: the impression to which an outcome, such as a click or a conversion, belongs."""

import functools
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.attribute_versions import with_item_key
from etl.spec.model import DataSpec
from etl.spec.sections import OutcomeLabel, Touchpoint
from etl.spec.units import MICROS
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
    outcome is, so that touches that land later do not change attributions; and so must be the
    attributes of items that are the `key` of a touchpoint. Outcomes without a touch are left out,
    and so may be those that follow their impression too late for any label.

    `events` are those that landed from `DataSpec.attribution_lookback_days` before the impressions
    on; with fewer, outcomes that belong to earlier touches would be attributed to later ones.

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
    longest_window = max(objective.window for objective in objectives)
    attributed = _attribute_to_touches(lake, events, unnamed, touchpoints, longest_window)
    return named.unionByName(attributed)


def attribution_groups(spec: DataSpec) -> list[list[str]]:
    """The names of the objectives, auxiliary ones included, that attribute their outcomes alike.

    The outcomes of a group are attributed together: a further objective of the group costs no
    further join.
    """
    groups: dict[object, list[str]] = {}
    for name, objective in spec.all_objectives.items():
        touches = spec.attribution_touches(objective)
        unknown = objective.unknown_impression
        named_window = objective.window if unknown == "last_touch" else None
        rule = objective.event == spec.impression_type, touches, unknown, named_window
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

    With `unknown_impression: last_touch`, an outcome is attributed to a touch if the impression
    that it names is unknown, not yet visible when the outcome is, or longer ago than the window of
    the objective.
    """
    named = outcomes.filter("impression_id IS NOT NULL")
    unnamed = outcomes.filter("impression_id IS NULL")
    if objective.unknown_impression == "drop":
        return named.select(*OUTCOME_COLUMNS), unnamed
    window = objective.window * MICROS["s"]

    def may_be_named(impression: Column) -> Column:
        is_visible = impression["visible_ts"] <= F.col("visible_ts")
        return is_visible & (F.col("event_ts") - impression["event_ts"] <= window)

    # Impressions of two days may have the same id.
    by_id = _impression_events(spec, events).groupBy("impression_id")
    impressions = by_id.agg(F.collect_list(F.struct("event_ts", "visible_ts")).alias("impressions"))
    named = named.join(impressions, "impression_id", "left")
    is_known = F.coalesce(F.exists("impressions", may_be_named), F.lit(False))
    unknown = named.filter(~is_known).drop("impressions")
    return named.filter(is_known).select(*OUTCOME_COLUMNS), unnamed.unionByName(unknown)


def _attribute_to_touches(
    lake: Lake,
    events: DataFrame,
    outcomes: DataFrame,
    touchpoints: tuple[Touchpoint, ...],
    longest_window: int,
) -> DataFrame:
    """Outcomes with the impression of their best touch; outcomes without a touch are left out.

    Where the last touchpoint is the impression itself, it needs no window beyond `longest_window`
    seconds: later outcomes count for no label.
    """
    windows = [longest_window if t.window is None else t.window for t in touchpoints]
    if touchpoints[-1].touch == lake.spec.impression_type:
        windows[-1] = min(windows[-1], longest_window)
    candidates = [
        _candidate_touches(lake, events, outcomes, touchpoint, window)
        .withColumn("preference", F.lit(-position))
        for position, (touchpoint, window) in enumerate(zip(touchpoints, windows, strict=True))
    ]  # fmt: skip
    pairs = functools.reduce(DataFrame.unionByName, candidates)
    order = F.struct("preference", "touch_ts", "touch_id")
    impression_id = F.max_by("touch_impression", order).alias("impression_id")
    attributed = pairs.groupBy(*_OUTCOME_VALUES).agg(impression_id)
    return attributed.select(*OUTCOME_COLUMNS)


def _candidate_touches(
    lake: Lake, events: DataFrame, outcomes: DataFrame, touchpoint: Touchpoint, window: int
) -> DataFrame:
    """All pairs of an outcome and a touch at most `window` seconds before it.

    Time is cut into periods of that length, so that an outcome is only joined with the touches of
    its period and of the one before, and not with all touches of its user.
    """
    length = max(window, 1) * MICROS["s"]
    period = F.floor(F.col("event_ts") / length)
    touches = _touch_events(lake, events, touchpoint, window).select(
        "user_id",
        "touch_key",
        F.explode(F.array(period, period + 1)).alias("period"),
        F.col("event_ts").alias("touch_ts"),
        F.struct(*reversed(EVENT_KEY)).alias("touch_id"),
        F.greatest("visible_ts", "touch_key_since").alias("touch_visible"),
        F.col("impression_id").alias("touch_impression"),
    )
    keyed = _with_touch_key(lake, outcomes, touchpoint).filter("touch_key_since <= visible_ts")
    keyed = keyed.select("user_id", "touch_key", period.alias("period"), *_OUTCOME_VALUES)
    elapsed = F.col("event_ts") - F.col("touch_ts")
    is_candidate = elapsed.between(0, window * MICROS["s"])
    is_candidate &= F.col("touch_visible") <= F.col("visible_ts")
    pairs = keyed.join(touches, ["user_id", "touch_key", "period"]).filter(is_candidate)
    return pairs.select(*_OUTCOME_VALUES, "touch_ts", "touch_id", "touch_impression")


def _touch_events(lake: Lake, events: DataFrame, touchpoint: Touchpoint, window: int) -> DataFrame:
    """Events of a touchpoint with their impressions.

    An event that names no impression gets the latest one of its user with the same key, at most
    `window` seconds before it; without one it is no touch.
    """
    spec = lake.spec
    touches = _with_touch_key(lake, events, touchpoint)
    touches = touches.filter(F.col("type") == spec.event_codes[touchpoint.touch])
    if touchpoint.touch == spec.impression_type:
        return touches
    impression = touchpoint.model_copy(update={"touch": spec.impression_type})
    unnamed = touches.filter("impression_id IS NULL")
    attributed = _attribute_to_touches(lake, events, unnamed, (impression,), window)
    attributed = attributed.select(*EVENT_KEY, "impression_id")
    attributed = unnamed.drop("impression_id").join(attributed, [*EVENT_KEY])
    return touches.filter("impression_id IS NOT NULL").unionByName(attributed)


def _with_touch_key(lake: Lake, events: DataFrame, touchpoint: Touchpoint) -> DataFrame:
    """Events with `touch_key`, which an outcome and its touch have in common.

    `touch_key_since` is the second from which on it is known: an outcome must not be attributed by
    an attribute that lands after it, because its label may be final by then.
    """
    events = with_item_key(lake, events, touchpoint.key)
    parts = ("item_key", "surface") if touchpoint.same_surface else ("item_key",)
    touch_key = F.when(F.col("item_key").isNotNull(), F.concat_ws("\x1f", *parts))
    events = events.withColumns(
        {"touch_key": touch_key, "touch_key_since": F.col("item_key_since")}
    )
    return events.drop("item_key", "item_key_since", "item_key_day")
