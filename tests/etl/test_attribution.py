"""Attribution equals a brute-force reference that checks every pair of events."""

import random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from etl.labels import attribute_outcomes, outcomes_without_impression
from etl.spec import DataSpec
from etl.spec.sections import Objective, Touchpoint
from etl.tables import schemas
from etl.tables.lake import Lake, arrow_schema

pytestmark = pytest.mark.spark

VIEW_WINDOW, CLICK_WINDOW = "10m", "40m"
Row = dict[str, Any]


def random_events(spec: DataSpec, n: int, rng: random.Random) -> list[Row]:
    """Events of few users and items within an hour; some land late, some name an impression."""
    events = []
    for i in range(n):
        event_type = rng.choice(["shown", "shown", "click", "buy"])
        second = rng.randrange(3600)
        named = f"e{rng.randrange(n)}" if rng.random() < 0.3 else None
        events.append(
            {
                "event_id": f"e{i}",
                "log": "log",
                "user_id": f"u{rng.randrange(3)}",
                "item_id": f"i{rng.randrange(3)}",
                "surface": rng.choice([1, 2]),
                "type": spec.event_codes[event_type],
                "event_type": event_type,
                "event_ts": second * 10**6,
                "visible_ts": second + rng.choice([0, 0, 0, 700]),
                "impression_id": f"e{i}" if event_type == "shown" else named,
                "value": 1.0,
            }
        )
    return events


def frame(shop: Lake, events: list[Row]) -> DataFrame:
    schema = arrow_schema(schemas.events(shop.spec))
    rows = [{k: v for k, v in event.items() if k != "event_type"} for event in events]
    table = pa.Table.from_pylist(rows, schema)
    return SparkSession.active().createDataFrame(table)


def reference_attribution(events: list[Row], outcome: Row, objective: Objective) -> str | None:
    """The impression to which an outcome is attributed, by brute force over all events."""
    impressions = {e["event_id"]: e for e in events if e["event_type"] == "shown"}
    named: str | None = outcome["impression_id"]
    if named and objective.unknown_impression == "drop":
        return named
    if named in impressions and impressions[named]["visible_ts"] <= outcome["visible_ts"]:
        return named
    for touchpoint in objective.attribution:
        touch = latest_touch(events, outcome, touchpoint)
        if touch:
            return touch[-1]
    return None


def latest_touch(
    events: list[Row], outcome: Row, touchpoint: Touchpoint
) -> tuple[int, str, str] | None:
    """Time, event ID and impression ID of the latest touch of an outcome."""
    touches = []
    for event in events:
        if event["event_type"] != touchpoint.touch or not may_touch(event, outcome, touchpoint):
            continue
        impression = event["impression_id"]
        if impression is None:
            view = touchpoint.model_copy(update={"touch": "shown", "window": None})
            last_view = latest_touch(events, event, view)
            impression = last_view and last_view[-1]
        if impression is not None:
            touches.append((event["event_ts"], event["event_id"], impression))
    return max(touches, default=None)


def may_touch(event: Row, outcome: Row, touchpoint: Touchpoint) -> bool:
    """Whether an outcome may be attributed to an event of the touchpoint's type."""
    keys = ["user_id", "item_id", *(["surface"] if touchpoint.same_surface else [])]
    elapsed = outcome["event_ts"] - event["event_ts"]
    is_in_window = 0 <= elapsed <= (touchpoint.window or 10**9) * 10**6
    is_visible = event["visible_ts"] <= outcome["visible_ts"]
    return all(event[key] == outcome[key] for key in keys) and is_in_window and bool(is_visible)


@pytest.mark.parametrize("unknown", ["drop", "last_touch"])
@pytest.mark.parametrize("same_surface", [False, True])
def test_attribution_prefers_clicks_to_views_within_their_windows(
    shop: Lake, unknown: str, same_surface: bool
) -> None:
    touches = [
        {"touch": "click", "window": CLICK_WINDOW},
        {"touch": "shown", "window": VIEW_WINDOW},
    ]
    objective = Objective.model_validate(
        {
            "event": "buy",
            "window": "1h",
            "attribution": [t | {"same_surface": same_surface} for t in touches],
            "unknown_impression": unknown,
        }
    )
    events = random_events(shop.spec, 400, random.Random(unknown + str(same_surface)))
    rows = attribute_outcomes(shop, frame(shop, events), [objective]).collect()
    attributed = {row["event_id"]: row["impression_id"] for row in rows}
    purchases = [event for event in events if event["event_type"] == "buy"]
    expected = {e["event_id"]: reference_attribution(events, e, objective) for e in purchases}
    assert attributed == {id_: imp for id_, imp in expected.items() if imp is not None}
    assert len(rows) == len(attributed)
    assert 10 < len(attributed) < len(purchases) or unknown == "drop"


def test_outcomes_of_unknown_impressions_are_counted(shop: Lake) -> None:
    events = random_events(shop.spec, 300, random.Random(5))
    all_events = frame(shop, events)
    buys = all_events.filter(f"type = {shop.spec.event_codes['buy']}")
    impressions = {e["event_id"] for e in events if e["event_type"] == "shown"}
    named = [e["impression_id"] for e in events if e["event_type"] == "buy" and e["impression_id"]]
    unknown = sum(name not in impressions for name in named)
    assert outcomes_without_impression(shop.spec, all_events, buys).count() == unknown > 0
