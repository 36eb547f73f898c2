"""Versions of users and items in the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etl.clock import EARLIEST
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.attributes import Categorical, Numeric, Vector
from etl.spec.units import DAY, MICROS
from etl.tables.contracts import RESERVED_ITEMS, item_key_columns
from features.encoded import number_of, row_of, signed_hash
from ranking.auction import NO_ADVERTISER
from ranking.online.database import Txn
from ranking.online.layout import OFFER, UNKNOWN, Layout, key_of
from ranking.online.store import REQUEST_SLACK, Store

NEXT_ITEM = b"next item"
Values = Mapping[str, object]
MAX_AHEAD = 30 * DAY  # seconds that a posted version may lie in the future


@dataclass(frozen=True)
class Version:
    """What is known of a user or an item from `valid_from` (µs) on, by the names of the spec.

    An item's `bid` and `goal` are what is offered for it. What is None in a version that is posted
    keeps the value that it had, `values` as a whole; in one of a table it is missing.
    """

    name: str
    valid_from: int
    values: Values | None
    bid: float | None = None
    goal: str | None = None


def check_version(layout: Layout, entity: str, version: Version) -> None:
    """Raises UserError for what the spec does not know of a version, and values of a wrong type."""
    spec = layout.spec
    declared = getattr(spec.attributes, entity)
    unknown = sorted(set(version.values or ()) - set(declared))
    if unknown:
        raise UserError(f"no {', '.join(unknown)} of {entity}s; known: {', '.join(declared)}")
    goals = spec.auction.pays_for if spec.auction and entity == "item" else {}
    if version.goal is not None and version.goal not in goals:
        known = ", ".join(goals) or "none"
        raise UserError(f"unknown campaign goal {version.goal!r}; known: {known}")
    if version.bid is not None and not goals:
        raise UserError(f"a bid for {version.name}, but the spec has no auction: leave it out")
    if version.values is not None:
        encoded(layout, entity, version)


def check_time(valid_from: int, now: int) -> None:
    """Raises UserError where a posted version (µs) would hold from a time that cannot be meant."""
    if not EARLIEST <= valid_from <= now + MAX_AHEAD * MICROS["s"]:
        raise UserError(
            f"valid_from is {valid_from // MICROS['ms']}: it is in milliseconds since 1970, not "
            f"before 2000, and at most {MAX_AHEAD // DAY} days ahead"
        )


def upsert_attributes(
    store: Store, txn: Txn, entity: str, version: Version, now: int, is_posted: bool = False
) -> None:
    """Add a version of a user or an item, in the place of one that is valid from the same time.

    Versions that no request from about the second `now` on can read are dropped. A new item gets
    the next index. One that is posted keeps the bid, the goal and the values that it leaves out.
    Raises UserError where a value is of a wrong type.
    """
    first = now - REQUEST_SLACK
    if entity == "user":
        row = encoded(store.layout, entity, version)
        _insert(txn, "users", key_of(version.name), row, first)
        return
    has_values = version.values is not None
    head = known_item(store, txn, version.name, version if has_values else None)
    if has_values:
        row = encoded(store.layout, entity, version)
        _insert(txn, "versions", int(head["index"]).to_bytes(4, "big"), row, first)
    if store.spec.auction:
        _upsert_offer(store, txn, version, first, is_posted)


def encoded(layout: Layout, entity: str, version: Version) -> np.ndarray:
    """A version (1) as models read it. Raises UserError where a value is of a wrong type."""
    declared: Mapping[str, Categorical | Numeric | Vector]
    declared = getattr(layout.spec.attributes, entity)
    group, prefix = getattr(layout.features, entity), entity[0]
    row = np.zeros(1, getattr(layout, entity))
    row["since"] = version.valid_from
    ids, given = list(group.ids), []
    for name, attribute in declared.items():
        value, column = (version.values or {}).get(name), f"{prefix}_{name}"
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
            value = (version.values or {}).get(name.removeprefix("k_"))
            head["keys"][0, n] = UNKNOWN if value is None else signed_hash(str(value))
    txn.put("items", key_of(item), head.tobytes())
    found: np.void = head[0]
    return found


def _upsert_offer(store: Store, txn: Txn, version: Version, first: int, is_posted: bool) -> None:
    """Add what a version of an item offers; a posted one that changes nothing is left out."""
    rows = np.frombuffer(txn.get("offers", key_of(version.name)), OFFER)
    held = rows[rows["since"] <= version.valid_from][-1:]
    if not is_posted or not len(held):
        held = np.array([(0, 0.0, 0, NO_ADVERTISER)], OFFER)
    row = _changed(store.spec, held, version)
    offered = ["bid", "goal", "advertiser"]
    if not is_posted or row[offered] != held[offered]:
        _insert(txn, "offers", key_of(version.name), row, first)


def _changed(spec: DataSpec, held: np.ndarray, version: Version) -> np.ndarray:
    """An offer (1) with what a version says of it."""
    assert spec.auction
    goals, row = list(spec.auction.pays_for), held.copy()
    row["since"] = version.valid_from
    if version.bid is not None:
        row["bid"] = version.bid
    if version.goal is not None:
        row["goal"] = goals.index(version.goal) + 1 if version.goal in goals else 0
    if version.values is not None:
        name = version.values.get(spec.auction.advertiser or "")
        row["advertiser"] = NO_ADVERTISER if name is None else signed_hash(str(name))
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
