"""Writes versions of users and items into a feature store.

A version is added to those of its user or item, and what an item offers to its bids.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from etl.array_types import Bools, Int64
from etl.errors import UserError
from etl.event_time import MIN_EVENT_TS
from etl.spec.attributes import LoggedAttribute, VectorAttribute
from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS
from features.encoding.scalar import spark_xxhash64
from ranking.feature_store.encoded_attributes import AttributeValues, encode_attributes
from ranking.feature_store.items import (
    read_item_records,
    register_items,
    update_first_version,
)
from ranking.feature_store.storage import (
    BID_DTYPE,
    RecordLayout,
    Txn,
    group_rows,
    storage_key,
    storage_keys,
)
from ranking.feature_store.store import MAX_REQUEST_AGE, FeatureStore
from ranking.scoring.candidates import NO_ADVERTISER

ROWS_AT_ONCE = 10_000  # from the tables
MAX_FUTURE_SECONDS = 30 * DAY  # maximum distance of a posted valid_from into the future


@dataclass(frozen=True)
class AttributeVersion:
    """Attributes of a user or an item from `valid_from` (µs) on, by their names in the spec.

    `bid`, `goal` and `target_roas` are those of an item's campaign. In a posted version, None keeps
    the previous one, or the attributes as a whole; in one from the tables, None is a missing value.
    """

    entity_id: str
    valid_from: int
    attributes: AttributeValues | None
    bid: float | None = None
    goal: str | None = None
    target_roas: float | None = None

    @classmethod
    def from_row(
        cls, entity: str, row: Mapping[str, Any], declared: Mapping[str, LoggedAttribute]
    ) -> "AttributeVersion":
        """The version in a row of a table of attributes, with the declared ones.

        Vectors of another width than the declared one are missing.
        """
        return cls(
            entity_id=row[f"{entity}_id"],
            valid_from=row["valid_from"],
            attributes={
                name: value
                for name, attribute in declared.items()
                if (value := row[f"attr_{name}"]) is not None and _fits(attribute, value)
            },
            bid=row.get("bid"),
            goal=row.get("goal"),
            target_roas=row.get("target_roas"),
        )


def _fits(attribute: LoggedAttribute, value: Any) -> bool:
    return not isinstance(attribute, VectorAttribute) or len(value) == attribute.width


def validate_version(layout: RecordLayout, entity: str, version: AttributeVersion) -> None:
    """Check the names and types of a posted version against the spec.

    Raises:
        UserError: An attribute or goal is not declared, a value has the wrong type, there is a bid
            although the spec has no auction, or a target ROAS that no bid can follow.
    """
    spec = layout.spec
    declared = getattr(spec.attributes, entity)
    unknown = sorted(set(version.attributes or ()) - set(declared))
    if unknown:
        raise UserError(f"no {', '.join(unknown)} of {entity}s; known: {', '.join(declared)}")
    goals = spec.auction.goal_objectives if spec.auction and entity == "item" else {}
    if version.goal is not None and version.goal not in goals:
        known = ", ".join(goals) or "none"
        raise UserError(f"unknown campaign goal {version.goal!r}; known: {known}")
    if version.bid is not None and not goals:
        raise UserError(f"{version.entity_id} has a bid, but the spec has no auction: leave it out")
    if version.target_roas is not None and not (spec.auction and spec.auction.target_roas):
        raise UserError(
            f"{version.entity_id} has a target ROAS, but the auction of the spec has no "
            "`target_roas`: leave it out"
        )
    if version.target_roas and version.goal and not _has_value(spec, version.goal):
        raise UserError(
            f"{version.entity_id} has a target ROAS, but outcomes of its goal {version.goal!r} "
            "have no values: leave the target out"
        )
    if version.attributes is not None:
        encode_versions(layout, entity, [version])


def _has_value(spec: DataSpec, goal: str) -> bool:
    assert spec.auction
    return spec.objectives[spec.auction.goal_objectives[goal]].value


def validate_valid_from(valid_from: int, now: int) -> None:
    """Raise UserError if the `valid_from` (µs) of a posted version is implausible at `now` (µs)."""
    if not MIN_EVENT_TS <= valid_from <= now + MAX_FUTURE_SECONDS * MICROS["s"]:
        raise UserError(
            f"valid_from is {valid_from // MICROS['ms']}: it is in milliseconds since 1970, not "
            f"before 2000, and at most {MAX_FUTURE_SECONDS // DAY} days ahead"
        )


def write_user_versions(
    store: FeatureStore, txn: Txn, versions: Iterable[AttributeVersion], now: int
) -> None:
    """Write all versions of users of a new store, sorted by user and `valid_from`.

    Of several with the same `valid_from` the last counts. Versions that no request after about
    `now` (seconds) can read are left out.
    """
    for batch in _batches_of_users(versions):
        records = encode_versions(store.layout, "user", batch)
        keys = storage_keys([version.entity_id for version in batch])
        is_readable = _is_readable(keys, records["valid_from"], now - MAX_REQUEST_AGE)
        by_user = group_rows(keys[is_readable], records[is_readable])
        txn.put_many("users", [(key, rows.tobytes()) for key, rows in by_user])


def _batches_of_users(versions: Iterable[AttributeVersion]) -> Iterator[list[AttributeVersion]]:
    batch: list[AttributeVersion] = []
    for _, of_user in groupby(versions, key=lambda version: version.entity_id):
        batch += of_user
        if len(batch) >= ROWS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def upsert_attributes(
    store: FeatureStore, txn: Txn, entity: str, version: AttributeVersion, now: int
) -> None:
    """Add a version from the tables of a user or an item; see `upsert_user` and `upsert_item`."""
    if entity == "user":
        upsert_user(store, txn, version, now)
    else:
        upsert_item(store, txn, version, now)


def upsert_user(store: FeatureStore, txn: Txn, version: AttributeVersion, now: int) -> None:
    """Add a version of a user, replacing one with the same `valid_from`.

    Versions that no request after about `now` (seconds) can read are dropped.

    Raises:
        UserError: A value has the wrong type.
    """
    row = encode_versions(store.layout, "user", [version])
    key = storage_key(version.entity_id)
    _insert_version(txn, "users", key, row, now - MAX_REQUEST_AGE)


def upsert_item(
    store: FeatureStore, txn: Txn, version: AttributeVersion, now: int, is_posted: bool = False
) -> None:
    """Add a version of an item and its bid, replacing those with the same `valid_from`.

    An item that was never seen is registered. A posted version keeps the bid, goal and attributes
    that it leaves out, and counter keys that are known. Versions that no request after about `now`
    (seconds) can read are dropped.

    Raises:
        UserError: A value has the wrong type.
    """
    earliest_request = now - MAX_REQUEST_AGE
    register_items(store.layout, txn, [version.entity_id])
    if version.attributes is not None:
        update_first_version(
            store.layout,
            txn,
            version.entity_id,
            version.valid_from,
            version.attributes,
            posted_at=now if is_posted else None,
        )
        record = read_item_records(store.layout, txn, [version.entity_id])[0]
        row = encode_versions(store.layout, "item", [version])
        key = int(record["index"]).to_bytes(4, "big")
        _insert_version(txn, "item_versions", key, row, earliest_request)
    if store.spec.auction:
        _upsert_bid(store.spec, txn, version, earliest_request, is_posted)


def encode_versions(
    layout: RecordLayout, entity: str, versions: Sequence[AttributeVersion]
) -> np.ndarray:
    """Encode versions as the records (n) that rankers read.

    Raises:
        UserError: A value has the wrong type.
    """
    declared, group = getattr(layout.spec.attributes, entity), getattr(layout.features, entity)
    attributes = [version.attributes or {} for version in versions]
    encoded = encode_attributes(declared, group, entity, attributes)
    records = np.zeros(len(versions), getattr(layout, entity))
    records["valid_from"] = [version.valid_from for version in versions]
    records["ids"], records["numbers"] = encoded.ids, encoded.numbers
    records["content_vectors"] = encoded.vectors
    return records


def _upsert_bid(
    spec: DataSpec, txn: Txn, version: AttributeVersion, earliest_request: int, is_posted: bool
) -> None:
    """Add the bid of an item's version; a posted one that changes nothing is skipped."""
    key = storage_key(version.entity_id)
    rows = np.frombuffer(txn.get("bids", key), BID_DTYPE)
    current = rows[rows["valid_from"] <= version.valid_from][-1:]
    if not is_posted or not len(current):
        current = np.array([(0, 0.0, 0, 0.0, NO_ADVERTISER)], BID_DTYPE)
    merged = _merge_bid(spec, current, version)
    offer = ["bid", "goal", "target_roas", "advertiser"]
    if not is_posted or merged[offer] != current[offer]:
        _insert_version(txn, "bids", key, merged, earliest_request)


def _merge_bid(spec: DataSpec, current_bid: np.ndarray, version: AttributeVersion) -> np.ndarray:
    """The current bid (1) with the fields that a version sets."""
    assert spec.auction
    goals, merged = list(spec.auction.goal_objectives), current_bid.copy()
    merged["valid_from"] = version.valid_from
    if version.bid is not None:
        merged["bid"] = version.bid
    if version.goal is not None:
        merged["goal"] = goals.index(version.goal) + 1 if version.goal in goals else 0
    if version.target_roas is not None:
        merged["target_roas"] = version.target_roas
    if version.attributes is not None:
        name = version.attributes.get(spec.auction.advertiser or "")
        merged["advertiser"] = NO_ADVERTISER if name is None else spark_xxhash64(str(name))
    return merged


def _insert_version(
    txn: Txn, table: str, key: bytes, version: np.ndarray, earliest_request: int
) -> None:
    """Insert a version (1) and drop those that no request from a second on can read."""
    rows = np.concatenate((np.frombuffer(txn.get(table, key), version.dtype), version))
    rows = rows[np.argsort(rows["valid_from"], kind="stable")]
    owners = np.zeros(len(rows), np.int64)
    is_readable = _is_readable(owners, rows["valid_from"], earliest_request)
    txn.put(table, key, rows[is_readable].tobytes())


def _is_readable(owners: np.ndarray, valid_from: Int64, earliest_request: int) -> Bools:
    """Which versions (n), sorted by owner and `valid_from`, requests from a second on can read.

    A request can read the latest version valid strictly before it, and all later ones. Of versions
    with the same `valid_from` the last counts.
    """
    next_is_older = valid_from[1:] < earliest_request * MICROS["s"]
    is_superseded = next_is_older | (valid_from[1:] == valid_from[:-1])
    return np.append(~(is_superseded & (owners[1:] == owners[:-1])), True)
