"""Raw records: JSON lines of events, items and users, their gzip files, and the table of truth."""

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etl.array_types import Floats, Int64
from etl.simulator.ads import GroundTruth
from etl.simulator.arrays import MISSING, Events
from etl.simulator.audience import Audience, AuditReports
from etl.simulator.config import (
    AGE_BANDS,
    CONNECTIONS,
    COUNTRIES,
    DEVICES,
    EVENT_TYPES,
    FORMATS,
    GOALS,
    SURFACES,
    TIERS,
    EventType,
    SimulatorConfig,
)
from etl.simulator.entities import AGE_BAND, COUNTRY, TIER, Ads, Items, Users
from etl.spec.sections import UNKNOWN_LABEL

GZIP_LEVEL = 1


def json_lines(columns: Mapping[str, pa.Array]) -> pa.StringArray:
    """One JSON object per row, followed by a newline; fields that are null are left out.

    Columns hold numbers, text without characters to escape, lists of numbers, or dictionary arrays
    of these.
    """
    members = [_member(name, values) for name, values in columns.items()]
    body = pc.binary_join_element_wise(*members, ",", null_handling="skip")
    return pc.binary_join_element_wise("{", body, "}\n", "")


def write_lines(lines: pa.StringArray, path: Path) -> None:
    """Write lines as a gzip file; the same lines give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    joined = pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "")
    path.write_bytes(gzip.compress(joined[0].as_buffer(), GZIP_LEVEL, mtime=0))


def _member(name: str, values: pa.Array) -> pa.StringArray:
    """`"name":value` of each row, null where the value is null."""
    if isinstance(values, pa.DictionaryArray):
        return _member(name, values.dictionary).take(values.indices)
    if pa.types.is_string(values.type):
        return pc.binary_join_element_wise(f'"{name}":"', values, '"', "")
    if pa.types.is_list(values.type):
        joined = pc.binary_join(pc.cast(values, pa.list_(pa.string())), ",")
        return pc.binary_join_element_wise(f'"{name}":[', joined, "]", "")
    return pc.binary_join_element_wise(f'"{name}":', pc.cast(values, pa.string()), "")


def event_lines(config: SimulatorConfig, events: Events) -> pa.StringArray:
    """One line per event."""
    posts = _prefixed_ids("p", np.arange(config.posts))
    ads = _prefixed_ids("a", np.arange(config.ads))
    item = np.where(events.type >= EventType.AD_IMPRESSION, config.posts, 0) + events.item
    return json_lines(
        {
            "event_id": _prefixed_ids("e", events.event),
            "type": _dictionary_column(EVENT_TYPES, events.type),
            "user_id": _dictionary_column(_prefixed_ids("u", np.arange(config.users)), events.user),
            "item_id": _dictionary_column(pa.concat_arrays([posts, ads]), item),
            "surface": _dictionary_column(SURFACES, events.surface),
            "event_time": pa.array(events.event_time),
            "ingest_time": pa.array(events.ingest_time),
            "request_id": _prefixed_ids("r", events.request),
            "impression_id": _prefixed_ids("i", events.impression),
            "position": _nullable_numbers(events.position),
            "propensity": _nullable_numbers(events.propensity.astype(np.float32)),
            "device": _dictionary_column(DEVICES, events.device),
            "connection": _dictionary_column(CONNECTIONS, events.connection),
            "dwell_ms": _nullable_numbers(events.dwell_ms),
            "value": _nullable_numbers(events.value),
            "refunded_event": _prefixed_ids("e", events.refunded),
        }
    )


def post_lines(posts: Items) -> pa.StringArray:
    """One line per post."""
    return json_lines(_item_columns("p", "post", posts))


def ad_lines(ads: Ads, target_roas: Floats) -> pa.StringArray:
    """One line per ad, given the target returns on ad spend (n,), MISSING for none."""
    campaign = {
        "advertiser_id": _prefixed_ids("b", ads.advertiser),
        "goal": _dictionary_column(GOALS, ads.goal),
        "bid": pa.array(ads.bid.round(4)),
        "target_roas": _nullable_numbers(target_roas),
    }
    return json_lines(_item_columns("a", "ad", ads) | campaign)


def user_lines(users: Users) -> pa.StringArray:
    """One line per version of a user's attributes."""
    return json_lines(
        {
            "user_id": _prefixed_ids("u", users.user),
            "age_band": _dictionary_column(AGE_BANDS, users.attributes[:, AGE_BAND]),
            "country": _dictionary_column(COUNTRIES, users.attributes[:, COUNTRY]),
            "tier": _dictionary_column(TIERS, users.attributes[:, TIER]),
            "signup_days": pa.array(users.account_age_days),
            "changed_time": pa.array(users.changed_ms),
        }
    )


def audience_label_lines(
    audience: Audience, since_ms: int, providers: Sequence[str]
) -> pa.StringArray:
    """One line per user and provider whose label has changed since a time."""
    user, provider = np.nonzero(audience.changed_ms >= since_ms)
    label = audience.labels[user, provider]
    return json_lines(
        {
            "provider": _dictionary_column(providers, provider),
            "user_id": _prefixed_ids("u", user),
            "age_band": _dictionary_column(
                (*AGE_BANDS, UNKNOWN_LABEL), label % (len(AGE_BANDS) + 1)
            ),
            "labelled_time": pa.array(audience.changed_ms[user, provider]),
        }
    )


def audit_lines(reports: AuditReports) -> pa.StringArray:
    """One line per campaign and age band."""
    campaigns, classes = reports.shares.shape
    campaign = np.repeat(np.arange(campaigns), classes)
    return json_lines(
        {
            "campaign": _prefixed_ids("b", reports.advertiser[campaign]),
            "age_band": _dictionary_column(AGE_BANDS, np.tile(np.arange(classes), campaigns)),
            "share": pa.array(reports.shares.ravel().round(6)),
            "panel": pa.array(reports.panel[campaign]),
        }
    )


def spend_lines(spend: Floats) -> pa.StringArray:
    """One line per advertiser that is billed."""
    advertiser = np.flatnonzero(spend > 0)
    return json_lines(
        {
            "campaign": _prefixed_ids("b", advertiser),
            "spend": pa.array(spend[advertiser].round(4)),
        }
    )


def truth_table(truth: GroundTruth) -> pa.Table:
    """One row per impression."""
    return pa.table(
        {
            "impression_id": _prefixed_ids("i", truth.impression),
            "p_click": truth.p_click,
            "p_long_view": truth.p_long_view,
            "p_conversion": truth.p_conversion,
            "expected_value": truth.expected_value,
        }
    )


def _item_columns(prefix: str, kind: str, items: Items) -> dict[str, pa.Array]:
    offsets = np.arange(len(items) + 1) * items.creative.shape[1]
    creative = items.creative.astype(np.float64).round(3).ravel()
    return {
        "item_id": _prefixed_ids(prefix, items.item),
        "kind": _dictionary_column([kind], np.zeros(len(items), np.int64)),
        "category": pc.binary_join_element_wise(
            "c", pc.utf8_lpad(pc.cast(pa.array(items.category), pa.string()), 2, "0"), ""
        ),
        "format": _dictionary_column(FORMATS, items.format),
        "creative": pa.ListArray.from_arrays(offsets, creative),
        "created_time": pa.array(items.created_ms),
    }


def _nullable_numbers(values: NDArray[Any]) -> pa.Array:
    return pa.array(values, mask=values == MISSING)


def _dictionary_column(
    values: Sequence[str] | pa.StringArray, indices: Int64
) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(_nullable_numbers(indices), pa.array(values))


def _prefixed_ids(prefix: str, ids: Int64) -> pa.StringArray:
    return pc.binary_join_element_wise(prefix, pc.cast(_nullable_numbers(ids), pa.string()), "")
