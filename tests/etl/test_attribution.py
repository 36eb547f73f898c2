"""Attribution of outcomes is that of a reference that looks at every pair of events."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from etl.attribution import attribute_outcomes, unknown_impressions
from etl.spec.objectives import Objective
from etl.tables import contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from tests.etl.shop import shop_lake

pytestmark = pytest.mark.spark

VIEW, CLICK = "10m", "40m"  # after a view, and after a click
Row = dict[str, Any]


@pytest.fixture
def own(spark: SparkSession, tmp_path: Path) -> Lake:
    return shop_lake(tmp_path)


def some_events(spec: Any, n: int, chance: random.Random) -> list[Row]:
    """Events of few users and items within an hour, some seen late, some naming impressions."""
    events = []
    for i in range(n):
        kind = chance.choice(["shown", "shown", "click", "buy"])
        second = chance.randrange(3600)
        named = f"e{chance.randrange(n)}" if chance.random() < 0.3 else None
        events.append(
            {
                "event_id": f"e{i}",
                "log": "log",
                "user_id": f"u{chance.randrange(3)}",
                "item_id": f"i{chance.randrange(3)}",
                "surface": chance.choice([1, 2]),
                "type": spec.event_codes[kind],
                "kind": kind,
                "event_ts": second * 10**6,
                "visible_ts": second + chance.choice([0, 0, 0, 700]),
                "impression_id": f"e{i}" if kind == "shown" else named,
                "value": 1.0,
            }
        )
    return events


def frame(own: Lake, events: list[Row]) -> DataFrame:
    schema = arrow_schema(contracts.events(own.spec))
    rows = [{k: v for k, v in e.items() if k != "kind"} for e in events]
    table = pa.Table.from_pylist(rows, schema)
    return SparkSession.active().createDataFrame(table)


def reference(events: list[Row], e: Row, objective: Objective) -> str | None:
    """The impression to which an outcome is attributed, by looking at all events."""
    shown = {s["event_id"]: s for s in events if s["kind"] == "shown"}
    named = e["impression_id"]
    if named and objective.unknown_impression == "drop":
        return named
    if named in shown and shown[named]["visible_ts"] <= e["visible_ts"]:
        return named
    for touch in objective.attribution:
        best = _latest(events, e, touch)
        if best:
            return best[-1]
    return None


def _latest(events: list[Row], e: Row, touch: Any) -> tuple[int, str, str] | None:
    def may(t: Row) -> bool:
        same = t["user_id"] == e["user_id"] and t["item_id"] == e["item_id"]
        same &= not touch.same_surface or t["surface"] == e["surface"]
        since = e["event_ts"] - t["event_ts"]
        inside = 0 <= since <= (touch.window or 10**9) * 10**6
        return same and inside and t["visible_ts"] <= e["visible_ts"]

    found = []
    for t in events:
        if t["kind"] != touch.touch or not may(t):
            continue
        impression = t["impression_id"]
        if impression is None:
            shown = touch.model_copy(update={"touch": "shown", "window": None})
            last = _latest(events, t, shown)
            impression = last and last[-1]
        if impression is not None:
            found.append((t["event_ts"], t["event_id"], impression))
    return max(found, default=None)


@pytest.mark.parametrize("unknown", ["drop", "last_touch"])
@pytest.mark.parametrize("same_surface", [False, True])
def test_a_click_is_preferred_to_a_view_and_windows_hold(
    own: Lake, unknown: str, same_surface: bool
) -> None:
    touches = [{"touch": "click", "window": CLICK}, {"touch": "shown", "window": VIEW}]
    objective = Objective.model_validate(
        {
            "event": "buy",
            "window": "1h",
            "attribution": [t | {"same_surface": same_surface} for t in touches],
            "unknown_impression": unknown,
        }
    )
    events = some_events(own.spec, 400, random.Random(unknown + str(same_surface)))
    found = attribute_outcomes(own, frame(own, events), objective).collect()
    attributed = {row["event_id"]: row["impression_id"] for row in found}
    expected = {
        e["event_id"]: reference(events, e, objective) for e in events if e["kind"] == "buy"
    }
    assert attributed == {id_: shown for id_, shown in expected.items() if shown is not None}
    assert len(found) == len(attributed)
    kinds = {e["event_id"]: e["kind"] for e in events}
    assert 10 < len(attributed) < list(kinds.values()).count("buy") or unknown == "drop"


def test_outcomes_of_unknown_impressions_are_counted(own: Lake) -> None:
    events = some_events(own.spec, 300, random.Random(5))
    all_events = frame(own, events)
    buys = all_events.filter(f"type = {own.spec.event_codes['buy']}")
    shown = {e["event_id"] for e in events if e["kind"] == "shown"}
    names = [e["impression_id"] for e in events if e["kind"] == "buy" and e["impression_id"]]
    unknown = sum(name not in shown for name in names)
    assert unknown_impressions(own.spec, all_events, buys).count() == unknown > 0
