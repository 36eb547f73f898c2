"""What each key of a data spec affects: the values of some tables, or later steps only.

The hash of a spec covers the keys that affect tables, and `gemline upgrade` rebuilds the tables
that changed keys affect. A test walks the models of the spec: each new key must be declared here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class KeyEffect:
    """The effect of one key.

    Attributes:
        tables: Tables whose values depend on the key.
        is_immutable: Whether the key cannot be changed in a lake that has tables, because their
            rows hold the codes of surfaces and event types. New names may be added.
        is_layout: Whether only the partitions of rows depend on the key: an upgrade repartitions
            the tables instead of rebuilding them.
    """

    tables: tuple[str, ...] = ()
    is_immutable: bool = False
    is_layout: bool = False

    @property
    def is_hashed(self) -> bool:
        """Whether the hash of a spec covers the key."""
        return bool(self.tables) or self.is_immutable

    @property
    def affects_models(self) -> bool:
        """Whether tables that models read, or codes in their rows, depend on the key."""
        is_read = not ADVERTISER_TABLES.issuperset(self.tables)
        return self.is_immutable or (is_read and not self.is_layout)


NO_EFFECT = KeyEffect()
FUTURE_INGEST = KeyEffect()  # how raw records are read: affects days that are ingested from now on
MODEL_INPUTS = KeyEffect()  # what GEM and rankers read of the tables: affects the next training
MAINTENANCE = KeyEffect()  # affects the next compaction, or the next removal of expired days
SERVING = KeyEffect()  # how candidates compete: affects the next start of the service
IMMUTABLE_CODES = KeyEffect(is_immutable=True)
EXAMPLES = ("examples", "feature_statistics")
LABELS = ("audience_labels", "audience_label_snapshots")  # of data providers
AUDIENCE_COUNTS = ("audience_counts", "audience_quality")  # of impressions, and what is fitted
CAMPAIGN_DAYS = ("campaign_days", "response_curves")  # of outcomes, and what is fitted to them
# Predictions and embeddings of impressions, which GEM made before it learned them. Those of an
# earlier GEM stay valid where the same impressions exist, whatever models read of them now.
TEACHER_TABLES = ("teacher_predictions", "user_teacher_embeddings")
EVENT_TABLES = KeyEffect(
    (
        *("events", "excluded_events", "ingest_metrics", "impressions", "late_retractions"),
        *("history", "user_event_counts", *EXAMPLES),
        *(*TEACHER_TABLES, *AUDIENCE_COUNTS, *CAMPAIGN_DAYS, "forecast_supply"),
    )
)

LABEL_TABLES = KeyEffect(("impressions", "late_retractions", *CAMPAIGN_DAYS))
OBJECTIVE_TABLES = KeyEffect((*LABEL_TABLES.tables, "teacher_predictions"))  # of other labels
AUXILIARY_LABEL_TABLES = KeyEffect(("impressions",))
CONTEXT_TABLES = KeyEffect(("events", "excluded_events", "ingest_metrics", *EXAMPLES))
USER_ATTRIBUTES = ("attributes_user", "attributes_user_snapshots")
ITEM_ATTRIBUTES = ("attributes_item", "attributes_item_snapshots")
ITEM_VERSIONS = ("item_versions", "first_item_versions")
USER_TABLES = KeyEffect((*USER_ATTRIBUTES, *EXAMPLES))
ITEM_TABLES = KeyEffect(  # campaigns are named by attributes of items
    (*ITEM_ATTRIBUTES, *ITEM_VERSIONS, *EXAMPLES, *AUDIENCE_COUNTS, *CAMPAIGN_DAYS)
)
ATTRIBUTE_TABLES = KeyEffect((*USER_TABLES.tables, *ITEM_TABLES.tables))
DAY_TABLES = KeyEffect((*EVENT_TABLES.tables, *USER_ATTRIBUTES, *ITEM_ATTRIBUTES, *ITEM_VERSIONS))
TIME_ZONE_TABLES = KeyEffect((*DAY_TABLES.tables, *LABELS))  # valid from a day's start
BID_TABLES = KeyEffect(ITEM_ATTRIBUTES)
COUNTER_TABLES = KeyEffect((*ITEM_VERSIONS, *EXAMPLES))
EXAMPLE_TABLES = KeyEffect(EXAMPLES)
HISTORY_TABLES = KeyEffect(("history", "user_event_counts"))
EVENT_ATTRIBUTE_TABLES = KeyEffect((*CONTEXT_TABLES.tables, *HISTORY_TABLES.tables))
SCORE_TABLES = KeyEffect(("scores",))
AUDIENCE_TABLES = KeyEffect((*LABELS, "audits", *AUDIENCE_COUNTS))
AUDIENCE_COUNT_TABLES = KeyEffect(AUDIENCE_COUNTS)
AUDIENCE_QUALITY_TABLES = KeyEffect(("audience_quality",))
FORECAST_TABLES = KeyEffect(("forecast_sample", "forecast_margins", "forecast_sketches"))
# Forecasts have a column for the labels of each provider.
PROVIDER_TABLES = KeyEffect((*AUDIENCE_TABLES.tables, *FORECAST_TABLES.tables))
ROI_TABLES = KeyEffect(CAMPAIGN_DAYS)
ROI_SOURCE_TABLES = KeyEffect(("campaign_spend", *ROI_TABLES.tables))
ROI_CURVES = KeyEffect(("response_curves",))
BUCKET_TABLES = KeyEffect(
    (
        *("events", "impressions", "history", "examples"),
        *("late_retractions", *TEACHER_TABLES),
    ),
    is_layout=True,
)
FORECAST_BUILDS = KeyEffect()  # affects the next `gemline forecast build`
ADVERTISER_TABLES = frozenset(  # no model reads them
    (*AUDIENCE_TABLES.tables, *FORECAST_TABLES.tables, *ROI_SOURCE_TABLES.tables)
)

# By key path, where `*` is any name. A key that affects tables covers all keys below it.
KEY_EFFECTS: Mapping[str, KeyEffect] = {
    "name": NO_EFFECT,
    "description": NO_EFFECT,
    "time_zone": TIME_ZONE_TABLES,
    "buckets": BUCKET_TABLES,
    "allowed_lateness": EVENT_TABLES,
    "max_bad_record_rate": FUTURE_INGEST,
    "max_events_per_user_day": EVENT_TABLES,
    "request_session_gap": EVENT_TABLES,
    "shared_event_ids": EVENT_TABLES,
    "surfaces.*.logged_as": FUTURE_INGEST,
    "surfaces.*.ads": IMMUTABLE_CODES,
    "domains.*": MODEL_INPUTS,
    "events.*": IMMUTABLE_CODES,
    "objectives.*": OBJECTIVE_TABLES,
    "objectives.*.label_grace_period": LABEL_TABLES,  # the label that is predicted stays the same
    "objectives.*.extra_windows": LABEL_TABLES,
    "objectives.*.value": LABEL_TABLES,
    "objectives.*.retracted_by.event": EVENT_TABLES,  # its events name the event that they retract
    "auxiliary_objectives.*": AUXILIARY_LABEL_TABLES,
    "attributes.user.*": USER_TABLES,
    "attributes.item.*": ITEM_TABLES,
    "attributes.context.*": CONTEXT_TABLES,
    "attributes.event.*": EVENT_ATTRIBUTE_TABLES,
    "position_bias.attribute": MODEL_INPUTS,
    "position_bias.served_position": MODEL_INPUTS,
    "sequences.*.events": MODEL_INPUTS,
    "sequences.*.max_length": MODEL_INPUTS,
    "history.attributes": HISTORY_TABLES,
    "history.max_events": MODEL_INPUTS,
    "history.max_age": MODEL_INPUTS,
    "history.compact_every": MAINTENANCE,
    "retention.*": MAINTENANCE,
    "similarity_attributes": MODEL_INPUTS,
    "calibration_segments": MODEL_INPUTS,
    "counters.windows": EXAMPLE_TABLES,
    "counters.events": EXAMPLE_TABLES,
    "counters.keys": COUNTER_TABLES,
    "counters.half_lives": EXAMPLE_TABLES,
    "counters.time_since_last": EXAMPLE_TABLES,
    "counters.aggregations": COUNTER_TABLES,
    "rank_by": SERVING,
    "auction.bid": BID_TABLES,
    "auction.goal": BID_TABLES,
    "auction.target_roas": BID_TABLES,
    "auction.advertiser": SERVING,
    "auction.goal_objectives.*": SCORE_TABLES,
    "auction.terms.*.reserve": SERVING,
    "auction.terms.*.quality_objective": SERVING,
    "auction.terms.*.min_quality": SERVING,
    "auction.terms.*.objective_values.*": SERVING,
    "audiences.*.classes": AUDIENCE_TABLES,
    "audiences.*.providers": PROVIDER_TABLES,
    "audiences.*.campaign": AUDIENCE_COUNT_TABLES,
    "audiences.*.window": AUDIENCE_QUALITY_TABLES,
    "audiences.*.min_count": AUDIENCE_QUALITY_TABLES,
    "forecast.attributes": FORECAST_TABLES,
    "forecast.window": FORECAST_BUILDS,
    "forecast.sample_rows": FORECAST_BUILDS,
    "forecast.min_users": FORECAST_BUILDS,
    "sources.*.columns.incremental_share": ROI_SOURCE_TABLES,
    "roi.campaign": ROI_TABLES,
    "roi.objective": ROI_TABLES,
    "roi.currency": ROI_TABLES,
    "roi.groups": ROI_TABLES,
    "roi.window": ROI_CURVES,
    "sources.*.kind": FUTURE_INGEST,
    "sources.*.audience": FUTURE_INGEST,
    "sources.*.format": FUTURE_INGEST,
    "sources.*.path": FUTURE_INGEST,
    "sources.*.table": FUTURE_INGEST,
    "sources.*.partition_column": FUTURE_INGEST,
    "sources.*.owner": NO_EFFECT,
    "sources.*.where": FUTURE_INGEST,
    "sources.*.select.*": FUTURE_INGEST,
    "sources.*.csv.delimiter": FUTURE_INGEST,
    "sources.*.csv.quote": FUTURE_INGEST,
    "sources.*.csv.escape": FUTURE_INGEST,
    "sources.*.csv.null_value": FUTURE_INGEST,
    "sources.*.csv.header": FUTURE_INGEST,
    "sources.*.time_unit": FUTURE_INGEST,
    "sources.*.optional": FUTURE_INGEST,
    "sources.*.success_file": FUTURE_INGEST,
    "sources.*.unchanged_for": FUTURE_INGEST,
    "sources.*.day.column": FUTURE_INGEST,
    "sources.*.day.format": FUTURE_INGEST,
    "sources.*.delay": DAY_TABLES,
    "sources.*.types.*": FUTURE_INGEST,
    "sources.*.event": FUTURE_INGEST,
    "sources.*.touch": FUTURE_INGEST,
    "sources.*.touch_key": FUTURE_INGEST,
    "sources.*.touch_window": FUTURE_INGEST,
    "sources.*.outcomes": FUTURE_INGEST,
    "sources.*.entity": FUTURE_INGEST,
    "sources.*.key": FUTURE_INGEST,
    "sources.*.valid_from": FUTURE_INGEST,
    "sources.*.static": ATTRIBUTE_TABLES,
    **{
        f"sources.*.columns.{column}": FUTURE_INGEST
        for column in (
            "event_id",
            "user",
            "item",
            "surface",
            "event_time",
            "type",
            "ingest_time",
            "request",
            "impression",
            "touch",
            "touch_key",
            "position",
            "dwell",
            "value",
            "propensity",
            "retracts",
            "provider",
            "label",
            "valid_from",
            "campaign",
            "true_class",
            "share",
            "spend",
            "count",
        )
    },
}
# Longest paths first: the first that covers a key applies.
_EFFECTS_BY_SPECIFICITY = sorted(
    ((tuple(key.split(".")), effect) for key, effect in KEY_EFFECTS.items()),
    key=lambda item: -len(item[0]),
)


def effect_of(path: KeyPath) -> KeyEffect:
    """The effect of the longest declared path that covers a key; raises KeyError if none does."""
    for declared, effect in _EFFECTS_BY_SPECIFICITY:
        if _covers(declared, path):
            return effect
    raise KeyError(f"spec key {'.'.join(path)} has no declared effect")


def _covers(declared: KeyPath, path: KeyPath) -> bool:
    parts = zip(declared, path, strict=False)
    return len(declared) <= len(path) and all(part in ("*", name) for part, name in parts)


def flatten_keys(
    spec_dump: Mapping[str, Any], prefix: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Path and value of each key of a dumped spec that has a value.

    None and an empty list are no value: a new key that a spec does not use changes no hash.
    """
    for name, value in spec_dump.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, (*prefix, name))
        elif value is not None and value != []:
            yield (*prefix, name), value


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[KeyPath]:
    """Sorted paths of the keys that differ between two dumped specs, or that only one has."""
    before, after = dict(flatten_keys(old)), dict(flatten_keys(new))
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def model_input_keys(spec_dump: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a dumped spec that affect what models read of tables, but no table, by path."""
    return {
        ".".join(path): value
        for path, value in flatten_keys(spec_dump)
        if effect_of(path) is MODEL_INPUTS
    }
