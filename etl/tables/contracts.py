"""One typed contract a table, derived from the data spec."""

from etl.clock import EARLIEST, SKEW, day_end
from etl.spec.attributes import Categorical, Clock, Numeric, Vector
from etl.spec.model import DataSpec
from etl.spec.units import MICROS, format_duration
from etl.tables.contract import Contract

Attribute = Categorical | Numeric | Vector | Clock


HISTORY_PLANES = (
    *(f"{name}_{k}" for name in ("gaps", "lags", "items") for k in range(4)),
    *("surfaces", "types", "dwells"),
)
DAY_BUCKET = {"day": "date", "bucket": "int"}
RESERVED_ITEMS = 16  # index 0 is no item, 1 to 15 are items without an index, by their hash


def raw_type(attribute: Attribute) -> str:
    """The type that holds an attribute as it was logged."""
    if isinstance(attribute, Vector):
        return "array<float>"
    return "double" if isinstance(attribute, Numeric) else "string"


def encoded_type(attribute: Attribute) -> str:
    """The type that holds an attribute as models read it."""
    return {"string": "int", "double": "float"}.get(raw_type(attribute), "array<float>")


def context_columns(spec: DataSpec) -> dict[str, Categorical | Numeric]:
    """Attributes of an impression that the log holds."""
    context = spec.attributes.context
    return {n: a for n, a in context.items() if not isinstance(a, Clock)}


def auction_columns(spec: DataSpec) -> dict[str, str]:
    """Columns of an item that the auction needs, by their raw name."""
    return {"bid": spec.auction.bid, "goal": spec.auction.goal} if spec.auction else {}


def counter_columns(spec: DataSpec) -> list[str]:
    """`n_user_surface_ad_click_7d`: key, event and window of each counter, in a fixed order."""
    counters = spec.counters
    return [
        f"n_{'_'.join(key)}_{event}_{format_duration(window)}"
        for key in counters.keys
        for window in counters.windows
        for event in counters.events
    ]


def item_key_columns(spec: DataSpec) -> list[str]:
    """Hashes of the item attributes that counters are kept by: `k_author_id`."""
    parts = dict.fromkeys(part for key in spec.counters.keys for part in key)
    return [f"k_{part}" for part in parts if part in spec.attributes.item]


def events(spec: DataSpec) -> Contract:
    """One clean event; `visible_ts` in seconds, the other two clocks in microseconds."""
    columns = {
        "event_id": "string",
        "user_id": "string",
        "item_id": "string",
        "surface": "tinyint",
        "type": "tinyint",
        "event_ts": "bigint",
        "ingest_ts": "bigint",
        "visible_ts": "bigint",
        "request_id": "string",
        "impression_id": "string",
        "position": "int",
        "dwell_ms": "double",
        "value": "double",
        "propensity": "double",
        **{f"x_{name}": raw_type(a) for name, a in context_columns(spec).items()},
        "log": "string",
        "source_file": "string",
    }
    return Contract(
        "events",
        columns | DAY_BUCKET,
        ("day", "bucket"),
        order_by=("user_id", "visible_ts", "event_ts", "event_id"),
        required={
            "no event id": "event_id",
            "no user": "user_id",
            "no item": "item_id",
            "unknown surface": "surface",
            "unknown type": "type",
            "no event time": "event_ts",
            "no ingest time": "ingest_ts",
            "no day": "day",
        },
        rules=_event_rules(spec),
    )


def _event_rules(spec: DataSpec) -> dict[str, str]:
    latest = f"({day_end(spec)} + {spec.lateness + SKEW}) * {MICROS['s']}"
    finite = [f"(NOT isnan({c}) AND abs({c}) < 1e300)" for c in ("dwell_ms", "value")]
    return {
        "event time before 2000": f"event_ts >= {EARLIEST}",
        "event time after its day": f"event_ts <= {latest}",
        "ingest time after its day": f"ingest_ts <= {latest}",
        "event time after its ingest": f"event_ts <= ingest_ts + {SKEW * MICROS['s']}",
        "negative dwell": "dwell_ms >= 0",
        "not a number": " AND ".join(f"coalesce({rule}, true)" for rule in finite),
        "propensity is no probability": "propensity > 0 AND propensity <= 1",
    }


def parked(spec: DataSpec) -> Contract:
    """One clean event that is not used, and why: it came too late, or from a machine."""
    kept = events(spec)
    columns = {"reason": "string"} | kept.columns
    columns.pop("bucket")
    return Contract("parked", columns, ("day",), ("reason", "user_id", "event_ts", "event_id"))


def quarantine(spec: DataSpec) -> Contract:
    """One bad record: as it was read, from which line (from 1) of which file, and what is wrong."""
    columns = {
        "log": "string",
        "payload": "string",
        "source_file": "string",
        "line": "bigint",
        "reasons": "array<string>",
        "day": "date",
    }
    return Contract("quarantine", columns, ("day", "log"), ("source_file", "line"))


def flow(spec: DataSpec) -> Contract:
    """What became of a day's records: read = kept + quarantined + duplicates + parked."""
    counts = ("read", "kept", "quarantined", "duplicates", "parked")
    rule = {"records were lost": "read = kept + quarantined + duplicates + parked"}
    columns = dict.fromkeys(counts, "bigint") | {"day": "date"}
    return Contract("flow", columns, ("day",), rules=rule)


def attributes(spec: DataSpec, entity: str) -> Contract:
    """One version of one user or item, valid from `valid_from` (µs) until its next version."""
    declared = getattr(spec.attributes, entity)
    columns = {f"{entity}_id": "string", "valid_from": "bigint"}
    columns |= {f"x_{name}": raw_type(a) for name, a in declared.items()}
    if entity == "item" and spec.auction:
        columns |= {"bid": "double", "goal": "string"}
    name = f"attributes_{entity}"
    order = (f"{entity}_id", "valid_from")
    required = {f"no {entity}": f"{entity}_id", "no time": "valid_from"}
    return Contract(name, columns | {"day": "date"}, ("day",), order, required)


def impressions(spec: DataSpec) -> Contract:
    """One ad impression: labels are null until `ready_…` (µs) of their objective."""
    columns = {
        "impression_id": "string",
        "request_id": "string",
        "user_id": "string",
        "item_id": "string",
        "surface": "tinyint",
        "event_ts": "bigint",
        "position": "int",
        "propensity": "double",
    }
    for name, (objective, _) in spec.labels.items():
        columns |= {f"label_{name}": "tinyint", f"ready_{name}": "bigint"}
        columns |= {f"value_{name}": "double"} if spec.objectives[objective].value else {}
    order = ("user_id", "event_ts", "impression_id")
    ids = ("impression_id", "request_id", "user_id", "item_id")
    return Contract(
        "impressions",
        columns | DAY_BUCKET,
        ("day", "bucket"),
        order,
        required={f"no {name}": name for name in (*ids, "surface", "event_ts")},
        rules={f"label of {n} not 0 or 1": f"label_{n} IN (0, 1)" for n in spec.labels},
    )


def items(spec: DataSpec) -> Contract:
    """One item: its index, which is never reused, and the day on which it was first seen."""
    columns = {"item_id": "string", "item_ix": "int", "day": "date"}
    required = {"no item": "item_id", "no index": "item_ix"}
    rules = {"a reserved index": f"item_ix >= {RESERVED_ITEMS}"}
    return Contract("items", columns, ("day",), ("item_ix",), required, rules)


def item_versions(spec: DataSpec) -> Contract:
    """What was known of an item from `valid_from` (µs) on, as models and counters read it."""
    columns = {"item_ix": "int", "valid_from": "bigint"}
    columns |= {f"i_{name}": encoded_type(a) for name, a in spec.attributes.item.items()}
    columns |= dict.fromkeys(item_key_columns(spec), "bigint")
    required = {"no index": "item_ix", "no time": "valid_from"}
    order = ("item_ix", "valid_from")
    return Contract("item_versions", columns | {"day": "date"}, ("day",), order, required)


def history(spec: DataSpec) -> Contract:
    """A user's events that became visible on one day, packed (features/history/pack.py).

    Compacted rows hold those up to their day: `chunk` numbers them, from 0, and is null in others;
    `dropped` is how many older events of the user were given up before them.
    """
    columns = {
        "user_id": "string",
        "chunk": "int",
        "dropped": "int",
        "first_ts": "bigint",
        "events": "int",
        **dict.fromkeys(HISTORY_PLANES, "binary"),
    }
    required = {f"no {name}": name for name in columns if name != "chunk"}
    order = ("user_id", "chunk")
    return Contract("history", columns | DAY_BUCKET, ("day", "bucket"), order, required)


def examples(spec: DataSpec) -> Contract:
    """One impression: a pointer into its user's history, and its non-sequence features.

    `user_since` and `item_since` are the seconds from which on the version of the user's
    attributes, and any of the item's, had been known; null where none had.
    """
    columns = {
        "impression_id": "string",
        "request_id": "string",
        "user_id": "string",
        "item_ix": "int",
        "surface": "tinyint",
        "as_of_ts": "bigint",
        "hist_len": "int",
        "history_version": "bigint",
    }
    order = ("user_id", "as_of_ts", "request_id", "impression_id")
    required = {f"no {name}": name for name in columns}
    columns |= {"user_since": "bigint", "item_since": "bigint"}
    for prefix, declared in (("u", spec.attributes.user), ("x", spec.attributes.context)):
        columns |= {f"{prefix}_{name}": encoded_type(a) for name, a in declared.items()}
    columns |= dict.fromkeys(counter_columns(spec), "int")
    rules = {"history of negative length": "hist_len >= 0"}
    return Contract("examples", columns | DAY_BUCKET, ("day", "bucket"), order, required, rules)


def knowledge(spec: DataSpec) -> Contract:
    """What GEM says of an impression; it had been trained on the days before alone.

    The logit of an objective is null where it had not yet seen a day of its labels.
    """
    columns = {"impression_id": "string", "fm_version": "string", "fm_trained_until": "date"}
    columns |= {f"logit_{name}": "float" for name in spec.objectives}
    columns |= {"embedding": "array<float>"}
    return Contract("knowledge", columns | DAY_BUCKET, ("day", "bucket"))


def user_knowledge(spec: DataSpec) -> Contract:
    """What GEM kept of one impression (training/knowledge/compress.py), for later ones of its user.

    It is visible from `visible_ts` (seconds) on: from when its day had ended, and it was written.
    """
    columns = {
        "user_id": "string",
        "visible_ts": "bigint",
        "shown_ts": "bigint",
        "item_ix": "int",
        "impression_id": "string",
        "fm_version": "string",
        "fm_trained_until": "date",
        "kept": "binary",
    }
    order = ("user_id", "visible_ts", "shown_ts", "impression_id")
    required = {f"no {name}": name for name in columns}
    return Contract("user_knowledge", columns | DAY_BUCKET, ("day", "bucket"), order, required)


def scores(spec: DataSpec) -> Contract:
    """What a surface's ranker gives a candidate; `place` orders the candidates of a request.

    It is null, as is what the event that the campaign pays for would cost, where the candidate may
    not take part.
    """
    columns = {
        "impression_id": "string",
        "request_id": "string",
        "item_id": "string",
        "ranker": "string",
        **{f"p_{name}": "double" for name in spec.objectives},
        "bid": "double",
        "expected_value": "double",
        "place": "int",
        "price": "double",
    }
    return Contract("scores", columns | {"surface": "string", "day": "date"}, ("surface", "day"))


TABLES = (
    events,
    quarantine,
    parked,
    flow,
    impressions,
    items,
    item_versions,
    history,
    examples,
    knowledge,
    user_knowledge,
    scores,
)
