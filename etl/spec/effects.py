"""What each key of a data spec affects: the tables whose values it determines, or later steps only.

The hash of a spec covers the keys that affect tables, and `gemline upgrade` rebuilds what a changed
key affects. A test walks the model, so that a new key must be declared here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]


@dataclass(frozen=True)
class Effect:
    """`tables` are those whose values a key determines.

    What a `fixed` key says of a surface or an event type cannot be changed in a lake that has
    tables: their rows hold the codes of these names. New names may be added.
    """

    tables: tuple[str, ...] = ()
    fixed: bool = False

    @property
    def is_hashed(self) -> bool:
        """Whether the hash of a spec covers the key."""
        return bool(self.tables) or self.fixed


NONE = Effect()
LATER_INGEST = Effect()  # how raw records are read: days that are ingested again, and later ones
MODELS = Effect()  # what GEM and rankers read of the tables: the next training
SERVING = Effect()  # how candidates compete: the next start of the service
CODES = Effect(fixed=True)
EVENTS = Effect(("events", "parked", "flow", "impressions", "history", "examples"))
DAYS = Effect((*EVENTS.tables, "attributes_user", "attributes_item", "item_versions"))
LABELS = Effect(("impressions",))
CONTEXT = Effect(("events", "parked", "examples"))
USERS = Effect(("attributes_user", "examples"))
ITEMS = Effect(("attributes_item", "item_versions", "examples"))
VERSIONS = Effect((*USERS.tables, *ITEMS.tables))
BIDS = Effect(("attributes_item",))
COUNTERS = Effect(("item_versions", "examples"))
EXAMPLES = Effect(("examples",))
SCORES = Effect(("scores",))

# Keys of a spec; `*` is any name. A key that affects tables covers all keys below it.
EFFECTS: Mapping[str, Effect] = {
    "name": NONE,
    "description": NONE,
    "time_zone": DAYS,
    "buckets": EVENTS,
    "lateness": EVENTS,
    "most_quarantined": LATER_INGEST,
    "most_events_a_day": EVENTS,
    "request_gap": EVENTS,
    "shared_event_ids": EVENTS,
    "surfaces.*.logged_as": LATER_INGEST,
    "surfaces.*.ads": CODES,
    "domains.*": MODELS,
    "events.*": CODES,
    "objectives.*": LABELS,
    "attributes.user.*": USERS,
    "attributes.item.*": ITEMS,
    "attributes.context.*": CONTEXT,
    "sequences.*.events": MODELS,
    "sequences.*.max_length": MODELS,
    "history.most_events": MODELS,
    "history.max_age": MODELS,
    "match": MODELS,
    "calibration_holdout": MODELS,
    "counters.windows": EXAMPLES,
    "counters.events": EXAMPLES,
    "counters.keys": COUNTERS,
    "rank_by": SERVING,
    "auction.bid": BIDS,
    "auction.goal": BIDS,
    "auction.advertiser": SERVING,
    "auction.pays_for.*": SCORES,
    "auction.terms.*.reserve": SERVING,
    "auction.terms.*.quality": SERVING,
    "auction.terms.*.floor": SERVING,
    "auction.terms.*.values.*": SERVING,
    "sources.*.kind": LATER_INGEST,
    "sources.*.format": LATER_INGEST,
    "sources.*.path": LATER_INGEST,
    "sources.*.time_unit": LATER_INGEST,
    "sources.*.sparse": LATER_INGEST,
    "sources.*.complete": LATER_INGEST,
    "sources.*.unchanged_for": LATER_INGEST,
    "sources.*.day.column": LATER_INGEST,
    "sources.*.day.format": LATER_INGEST,
    "sources.*.delay": DAYS,
    "sources.*.types.*": LATER_INGEST,
    "sources.*.event": LATER_INGEST,
    "sources.*.outcomes": LATER_INGEST,
    "sources.*.entity": LATER_INGEST,
    "sources.*.key": LATER_INGEST,
    "sources.*.valid_from": LATER_INGEST,
    "sources.*.static": VERSIONS,
    **{
        f"sources.*.columns.{column}": LATER_INGEST
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
            "position",
            "dwell",
            "value",
            "propensity",
        )
    },
}
# The longest first, so that the first one that covers a path decides.
_DECLARED = sorted(
    ((tuple(key.split(".")), effect) for key, effect in EFFECTS.items()),
    key=lambda declared: -len(declared[0]),
)


def effect_of(path: Path) -> Effect:
    """The effect of the longest declared key that covers a path; raises KeyError without one."""
    for declared, effect in _DECLARED:
        if _covers(declared, path):
            return effect
    raise KeyError(f"spec key {'.'.join(path)} has no declared effect")


def _covers(declared: Path, path: Path) -> bool:
    parts = zip(declared, path, strict=False)
    return len(declared) <= len(path) and all(part in ("*", name) for part, name in parts)


def keys_of(dump: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and value of each key of a dumped spec that is set."""
    for name, value in dump.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, (*above, name))
        elif value is not None:
            yield (*above, name), value


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Path]:
    """Paths that two dumped specs do not share, or whose values differ, in order."""
    before, after = dict(keys_of(old)), dict(keys_of(new))
    return sorted(p for p in {*before, *after} if before.get(p) != after.get(p))
