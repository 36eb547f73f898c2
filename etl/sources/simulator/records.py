"""The raw records: which fields they have, and how each is written."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etl.sources.simulator.columns import ABSENT, Events, Ints
from etl.sources.simulator.config import SimulatorConfig
from etl.sources.simulator.items import Ads, Items
from etl.sources.simulator.json_lines import json_lines, text
from etl.sources.simulator.outcomes import Truth
from etl.sources.simulator.users import AGE_BAND, COUNTRY, TIER, Users
from etl.sources.simulator.vocabulary import (
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
)


def event_lines(config: SimulatorConfig, events: Events) -> pa.StringArray:
    """One line an event."""
    posts, ads = _ids("p", np.arange(config.posts)), _ids("a", np.arange(config.ads))
    item = np.where(events.type >= EventType.AD_IMPRESSION, config.posts, 0) + events.item
    return json_lines(
        {
            "event_id": _ids("e", events.event),
            "type": _words(EVENT_TYPES, events.type),
            "user_id": _words(_ids("u", np.arange(config.users)), events.user),
            "item_id": _words(pa.concat_arrays([posts, ads]), item),
            "surface": _words(SURFACES, events.surface),
            "event_time": pa.array(events.event_time),
            "ingest_time": pa.array(events.ingest_time),
            "request_id": _ids("r", events.request),
            "impression_id": _ids("i", events.impression),
            "position": _numbers(events.position),
            "propensity": _numbers(events.propensity.astype(np.float32)),
            "device": _words(DEVICES, events.device),
            "connection": _words(CONNECTIONS, events.connection),
            "dwell_ms": _numbers(events.dwell_ms),
            "value": _numbers(events.value),
        }
    )


def post_lines(posts: Items) -> pa.StringArray:
    """One line a post."""
    return json_lines(_item("p", "post", posts))


def ad_lines(ads: Ads) -> pa.StringArray:
    """One line an ad."""
    paid = {
        "advertiser_id": _ids("b", ads.advertiser),
        "goal": _words(GOALS, ads.goal),
        "bid": pa.array(ads.bid.round(4)),
    }
    return json_lines(_item("a", "ad", ads) | paid)


def user_lines(users: Users) -> pa.StringArray:
    """One line a version of a user's attributes."""
    return json_lines(
        {
            "user_id": _ids("u", users.user),
            "age_band": _words(AGE_BANDS, users.attributes[:, AGE_BAND]),
            "country": _words(COUNTRIES, users.attributes[:, COUNTRY]),
            "tier": _words(TIERS, users.attributes[:, TIER]),
            "signup_days": pa.array(users.signup_days),
            "changed_time": pa.array(users.changed_ms),
        }
    )


def truth_table(truth: Truth) -> pa.Table:
    """One row an impression."""
    return pa.table(
        {
            "impression_id": _ids("i", truth.impression),
            "p_click": truth.p_click,
            "p_long_view": truth.p_long_view,
            "p_conversion": truth.p_conversion,
            "expected_value": truth.expected_value,
        }
    )


def _item(prefix: str, kind: str, items: Items) -> dict[str, pa.Array]:
    ends = np.arange(len(items) + 1) * items.creative.shape[1]
    creative = items.creative.astype(np.float64).round(3).ravel()
    return {
        "item_id": _ids(prefix, items.item),
        "kind": _words([kind], np.zeros(len(items), np.int64)),
        "category": pc.binary_join_element_wise(
            "c", pc.utf8_lpad(text(items.category), 2, "0"), ""
        ),
        "format": _words(FORMATS, items.format),
        "creative": pa.ListArray.from_arrays(ends, creative),
        "created_time": pa.array(items.created_ms),
    }


def _numbers(values: NDArray[Any]) -> pa.Array:
    return pa.array(values, mask=values == ABSENT)


def _words(words: Sequence[str] | pa.StringArray, position: Ints) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(_numbers(position), pa.array(words))


def _ids(prefix: str, number: Ints) -> pa.StringArray:
    return pc.binary_join_element_wise(prefix, text(_numbers(number)), "")
