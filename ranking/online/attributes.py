"""Versions of users and items in the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etl.errors import UserError
from etl.spec.attributes import Categorical, Numeric, Vector
from etl.spec.units import MICROS
from etl.tables.contracts import RESERVED_ITEMS, item_key_columns
from features.encoded import number_of, row_of, signed_hash
from ranking.online.database import Txn
from ranking.online.layout import OFFER, UNKNOWN, Layout, key_of
from ranking.online.store import REQUEST_SLACK, Store

NEXT_ITEM = b"next item"
Values = Mapping[str, object]


@dataclass(frozen=True)
class Version:
    """What is known of a user or an item from `valid_from` (µs) on, by the names of the spec.

    An item's `bid` and `goal` are what is offered for it.
    """

    name: str
    valid_from: int
    values: Values
    bid: float | None = None
    goal: str | None = None


def check_version(layout: Layout, entity: str, version: Version) -> None:
    """Raises UserError for attributes and goals unknown to the spec, and values of a wrong type."""
    spec = layout.spec
    declared = getattr(spec.attributes, entity)
    unknown = sorted(set(version.values) - set(declared))
    if unknown:
        raise UserError(f"no {', '.join(unknown)} of {entity}s; known: {', '.join(declared)}")
    goals = spec.auction.pays_for if spec.auction and entity == "item" else {}
    if version.goal is not None and version.goal not in goals:
        known = ", ".join(goals) or "none"
        raise UserError(f"unknown campaign goal {version.goal!r}; known: {known}")
    encoded(layout, entity, version)


def upsert_attributes(store: Store, txn: Txn, entity: str, version: Version, now: int) -> None:
    """Add a version of a user or an item, in the place of one that is valid from the same time.

    Versions that no request from about the second `now` on can read are dropped. A new item gets
    the next index. Raises UserError where a value is of a wrong type.
    """
    first = now - REQUEST_SLACK
    row = encoded(store.layout, entity, version)
    if entity == "user":
        _insert(txn, "users", key_of(version.name), row, first)
        return
    head = known_item(store, txn, version.name, version)
    _insert(txn, "versions", int(head["index"]).to_bytes(4, "big"), row, first)
    if store.spec.auction:
        _insert(txn, "offers", key_of(version.name), offer(store, version), first)


def encoded(layout: Layout, entity: str, version: Version) -> np.ndarray:
    """A version (1) as models read it. Raises UserError where a value is of a wrong type."""
    declared: Mapping[str, Categorical | Numeric | Vector]
    declared = getattr(layout.spec.attributes, entity)
    group, prefix = getattr(layout.features, entity), entity[0]
    row = np.zeros(1, getattr(layout, entity))
    row["since"] = version.valid_from
    ids, given = list(group.ids), []
    for name, attribute in declared.items():
        value, column = version.values.get(name), f"{prefix}_{name}"
        if isinstance(attribute, Vector):
            given.append(_vector(name, value, attribute.width))
        elif isinstance(attribute, Numeric):
            row["numbers"][0, group.numbers.index(column)] = number_of(
                attribute, _float(name, value)
            )
        else:
            row["ids"][0, ids.index(column)] = row_of(attribute, _word(name, value))
    if given:
        row["given"][0] = np.concatenate(given)
    return row


def known_item(store: Store, txn: Txn, item: str, version: Version | None = None) -> np.void:
    """Index, first second and first keys of an item; one never seen gets the next index."""
    stored = txn.get("items", key_of(item))
    head = np.zeros(1, store.layout.item_head)
    if stored:
        head = np.frombuffer(stored, store.layout.item_head).copy()
    else:
        index = int.from_bytes(txn.get("meta", NEXT_ITEM) or b"\0", "big")
        head["index"], head["since"], head["keys"] = max(index, RESERVED_ITEMS), UNKNOWN, UNKNOWN
        txn.put("meta", NEXT_ITEM, (int(head["index"][0]) + 1).to_bytes(8, "big"))
    since = int(head["since"][0])
    if version and (since == UNKNOWN or version.valid_from // 1_000_000 < since):
        head["since"] = version.valid_from // 1_000_000
        for n, name in enumerate(item_key_columns(store.spec)):
            value = version.values.get(name.removeprefix("k_"))
            head["keys"][0, n] = UNKNOWN if value is None else signed_hash(str(value))
    txn.put("items", key_of(item), head.tobytes())
    found: np.void = head[0]
    return found


def offer(store: Store, version: Version) -> np.ndarray:
    """What a version of an item offers (1)."""
    assert store.spec.auction
    goals = list(store.spec.auction.pays_for)
    row = np.zeros(1, OFFER)
    row["since"], row["bid"] = version.valid_from, version.bid or 0.0
    row["goal"] = goals.index(version.goal) + 1 if version.goal in goals else 0
    return row


def _insert(txn: Txn, table: str, key: bytes, row: np.ndarray, first: int) -> None:
    """Add a row to the versions of a key that a request at the second `first` or later can read.

    These are all that are valid from then on, and the newest valid strictly before.
    """
    there = np.frombuffer(txn.get(table, key), row.dtype)
    rows = np.concatenate((there[there["since"] != row["since"]], row))
    rows = rows[np.argsort(rows["since"], kind="stable")]
    before = int(np.searchsorted(rows["since"], first * MICROS["s"]))
    txn.put(table, key, rows[max(0, before - 1) :].tobytes())


def _float(name: str, value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    raise UserError(f"{name} is {value!r}; it is a number")


def _word(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"{name} is {value!r}; it is a string")


def _vector(name: str, value: object, width: int) -> np.ndarray:
    """Zeros where it is missing or of another width; what is not finite is zero."""
    if value is None:
        return np.zeros(width, np.float32)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{name} is {value!r}; it is a list of {width} numbers")
    found = np.array(value, np.float32)
    if found.shape != (width,):
        return np.zeros(width, np.float32)
    return np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)
