"""One typed contract a table, derived from the data spec."""

from dataclasses import dataclass

from etl.spec.attributes import Categorical, Clock, Numeric, Vector
from etl.spec.model import DataSpec
from etl.spec.units import format_duration

Attribute = Categorical | Numeric | Vector | Clock


@dataclass(frozen=True)
class Contract:
    """A table: `columns` maps names to Spark SQL types; rows of a file are in `order_by`."""

    name: str
    columns: dict[str, str]
    partition_by: tuple[str, ...]
    order_by: tuple[str, ...] = ()

    @property
    def ddl(self) -> str:
        """The columns as a Spark DDL string."""
        return ", ".join(f"`{name}` {type_}" for name, type_ in self.columns.items())


DAY_BUCKET = {"day": "date", "bucket": "int"}


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
        "source_file": "string",
    }
    order = ("user_id", "visible_ts", "event_ts", "event_id")
    return Contract("events", columns | DAY_BUCKET, ("day", "bucket"), order)


def quarantine(spec: DataSpec) -> Contract:
    """One bad record, as it was read, with all that is wrong with it."""
    columns = {"payload": "string", "source_file": "string", "reasons": "array<string>"}
    return Contract("quarantine", columns | {"day": "date"}, ("day",))


def flow(spec: DataSpec) -> Contract:
    """What became of a day's records: read = kept + quarantined + duplicates."""
    columns = dict.fromkeys(("read", "kept", "quarantined", "duplicates"), "bigint")
    return Contract("flow", columns | {"day": "date"}, ("day",))


def attributes(spec: DataSpec, entity: str) -> Contract:
    """One version of one user or item, valid from `valid_from` (µs) until its next version."""
    declared = getattr(spec.attributes, entity)
    columns = {f"{entity}_id": "string", "valid_from": "bigint"}
    columns |= {f"x_{name}": raw_type(a) for name, a in declared.items()}
    if entity == "item" and spec.auction:
        columns |= {"bid": "double", "goal": "string"}
    name = f"attributes_{entity}"
    return Contract(name, columns | {"day": "date"}, ("day",), (f"{entity}_id", "valid_from"))


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
    for name, objective in spec.objectives.items():
        columns |= {f"label_{name}": "tinyint", f"ready_{name}": "bigint"}
        columns |= {f"value_{name}": "double"} if objective.value else {}
    order = ("user_id", "event_ts", "impression_id")
    return Contract("impressions", columns | DAY_BUCKET, ("day", "bucket"), order)


def items(spec: DataSpec) -> Contract:
    """One item: its index, which is never reused, and its attributes as models read them."""
    columns = {"item_id": "string", "item_ix": "int"}
    columns |= {f"i_{name}": encoded_type(a) for name, a in spec.attributes.item.items()}
    columns |= dict.fromkeys(item_key_columns(spec), "bigint")
    return Contract("items", columns | {"day": "date"}, ("day",), ("item_ix",))


def history(spec: DataSpec) -> Contract:
    """A user's events that became visible on one day, packed (features/history/pack.py)."""
    columns = {
        "user_id": "string",
        "first_ts": "bigint",
        "gaps": "array<int>",
        "lags": "array<int>",
        "items": "array<int>",
        "surfaces": "array<tinyint>",
        "types": "array<tinyint>",
        "dwells": "array<tinyint>",
    }
    return Contract("history", columns | DAY_BUCKET, ("day", "bucket"), ("user_id",))


def examples(spec: DataSpec) -> Contract:
    """One impression: a pointer into its user's history, and its non-sequence features."""
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
    for prefix, declared in (("u", spec.attributes.user), ("x", spec.attributes.context)):
        columns |= {f"{prefix}_{name}": encoded_type(a) for name, a in declared.items()}
    columns |= dict.fromkeys(counter_columns(spec), "int")
    order = ("user_id", "as_of_ts", "request_id", "impression_id")
    return Contract("examples", columns | DAY_BUCKET, ("day", "bucket"), order)


def knowledge(spec: DataSpec) -> Contract:
    """What GEM says of an impression; it had been trained on the days before alone."""
    columns = {"impression_id": "string", "fm_version": "string", "fm_trained_until": "date"}
    columns |= {f"logit_{name}": "float" for name in spec.objectives}
    columns |= {"embedding": "array<float>"}
    return Contract("knowledge", columns | DAY_BUCKET, ("day", "bucket"))


def scores(spec: DataSpec) -> Contract:
    """What a surface's ranker gives a candidate; `place` orders the candidates of a request."""
    columns = {
        "impression_id": "string",
        "request_id": "string",
        "item_id": "string",
        "ranker": "string",
        **{f"p_{name}": "double" for name in spec.objectives},
        "bid": "double",
        "expected_value": "double",
        "place": "int",
    }
    return Contract("scores", columns | {"surface": "string", "day": "date"}, ("surface", "day"))
