"""Attributes of events: which events have them, and what is refused."""

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from etl.errors import UserError
from etl.ingest.run import ingest
from etl.spec import DataSpec, load_spec
from etl.tables.lake import Lake
from tests.etl.shop import SPEC
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAY, NOON = date(2026, 1, 2), 1767355200
ATTRIBUTES = {
    "quantity": {"type": "numeric", "column": "count"},
    "coupon": {"type": "categorical", "size": 8},
}


def shop_spec(folder: Path, app: Mapping[str, Any] | None = None) -> DataSpec:
    spec = yaml.safe_load(SPEC)
    spec["attributes"]["event"], spec["max_bad_record_rate"] = ATTRIBUTES, 0.5
    keys = spec["sources"]["app"] | (app or {})
    spec["sources"]["app"] = {name: value for name, value in keys.items() if value is not None}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return load_spec(folder / "spec.yaml")


def ingested(folder: Path, spec: DataSpec, records: list[dict[str, object]]) -> Lake:
    (folder / "raw/app").mkdir(parents=True)
    lines = [json.dumps(record) for record in records]
    (folder / f"raw/app/{DAY}.json").write_text("\n".join(lines))
    lake = Lake(str(folder / "lake"), spec)
    ingest(lake, str(folder / "raw"), (DAY, DAY))
    return lake


def record(number: int, **columns: object) -> dict[str, object]:
    return {"id": f"e{number}", "who": "u", "what": "i", "page": "home", "action": "click",
            "at": NOON + number, "phone": "ios"} | columns  # fmt: skip


def test_events_have_the_attributes_of_their_record(spark: SparkSession, tmp_path: Path) -> None:
    """A number in a text counts; a text that is no number is quarantined with the column."""
    columns: list[dict[str, object]] = [
        {"count": 2, "coupon": "spring"},
        {"count": "3"},
        {},
        {"count": "three"},
    ]
    spec = shop_spec(tmp_path)
    lake = ingested(tmp_path, spec, [record(n, **c) for n, c in enumerate(columns)])
    stored = sorted(rows(lake, "events"), key=lambda row: str(row["event_id"]))
    assert [row["event_quantity"] for row in stored] == [2, 3, None]
    assert [row["event_coupon"] for row in stored] == ["spring", None, None]
    quarantined = rows(lake, "quarantine")
    assert [row["reasons"] for row in quarantined] == [["wrong type: count"]]


def test_events_of_a_wide_log_do_not_show_what_later_outcomes_have(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Leak test: the quantity of a purchase is known when it is visible, not with the click."""
    columns = yaml.safe_load(SPEC)["sources"]["app"]["columns"]
    del columns["type"]
    outcomes = [
        {"event": "click", "indicator": "clicked", "attributes": ["coupon"]},
        {"event": "buy", "indicator": "bought", "delay": "after", "attributes": ["quantity"]},
    ]
    wide = {"kind": "impression_log", "types": None, "outcomes": outcomes, "columns": columns}
    spec = shop_spec(tmp_path, wide)
    bought = {"clicked": 1, "bought": 1, "after": 60, "count": 4, "coupon": "sale"}
    lake = ingested(tmp_path, spec, [record(1, **bought), record(2, bought=0, count=5)])
    stored = {row["event_id"]: row for row in rows(lake, "events")}
    attributes = {
        id_: (row["event_quantity"], row["event_coupon"], row["event_ts"] // 10**6 - NOON)
        for id_, row in stored.items()
    }
    assert attributes == {
        "e1": (None, None, 1),
        "e1:click": (None, "sale", 1),
        "e1:buy": (4, None, 61),
        "e2": (None, None, 2),
    }


def test_outcomes_of_a_wide_log_that_cannot_be_read_are_quarantined(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A delay that is no number is not one of 0: the purchase would be visible too early."""
    columns = yaml.safe_load(SPEC)["sources"]["app"]["columns"]
    del columns["type"]
    buy = {"event": "buy", "indicator": "bought", "delay": "after", "value": "paid"}
    wide = {"kind": "impression_log", "types": None, "outcomes": [buy], "columns": columns}
    logged: list[dict[str, object]] = [
        {"bought": "true", "after": 60, "paid": 2, "count": 1, "coupon": "sale"},
        {"bought": 1, "after": "2 h", "paid": 2},
        {"bought": 1, "after": 60, "paid": "two"},
        {"bought": "perhaps", "after": 60, "paid": 2},
        {"bought": 0, "after": "never", "paid": "n/a"},
        {"after": 60},
    ]
    spec = shop_spec(tmp_path, wide)
    spec = spec.model_copy(update={"max_bad_record_rate": 0.9})
    lake = ingested(tmp_path, spec, [record(n, **c) for n, c in enumerate(logged)])
    assert {row["event_id"] for row in rows(lake, "events")} == {"e0", "e0:buy", "e4", "e5"}
    reasons = [row["reasons"] for row in rows(lake, "quarantine")]
    assert sorted(reasons) == [[f"wrong type: {c}"] for c in ("after", "bought", "paid")]


@pytest.mark.parametrize(
    ("attribute", "aggregation", "message"),
    [
        ("phone", None, "attributes.event.phone: phone is also an attribute of the context"),
        ("ts", None, "'ts' is reserved: the table events has a column `event_ts`"),
        ("value", None, "'value' is reserved: events have a column of this name"),
        (None, {"function": "sum", "column": "quantiti"}, "did you mean 'quantity'"),
        (None, {"function": "sum", "column": "coupon"}, "'coupon' is not among the dwell, value"),
        (None, {"function": "distinct_count", "column": "quantity"}, "'quantity' is not among"),
        (None, {"function": "median", "column": "quantity"}, "'distinct_count'"),
        (None, {"function": "sum", "column": "quantity", "event": "buy"}, "has a quantity of buy"),
    ],
)
def test_names_that_mean_nothing_or_two_things_are_refused(
    tmp_path: Path, attribute: str | None, aggregation: dict[str, str] | None, message: str
) -> None:
    spec = yaml.safe_load(SPEC)
    del spec["sources"]["sales"]
    spec["attributes"]["event"] = ATTRIBUTES | (
        {attribute: {"type": "numeric"}} if attribute else {}
    )
    if aggregation:
        spec["counters"]["aggregations"] = [{"event": "click"} | aggregation]
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(UserError, match=r"spec.yaml:\d+: ") as refused:
        load_spec(tmp_path / "spec.yaml")
    assert message in str(refused.value)


def test_numbers_that_are_not_finite_are_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    spec = shop_spec(tmp_path)
    counts = ("Infinity", "NaN", -1.5, None)
    records = [record(number, count=count) for number, count in enumerate(counts)]
    lake = ingested(tmp_path, spec, records)
    assert [row["event_quantity"] for row in rows(lake, "events")] == [-1.5, None]
    assert [row["reasons"] for row in rows(lake, "quarantine")] == [["not a number"]] * 2


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (["quantiti"], "did you mean 'quantity'"),
        (["query"], "query has 300 rows, and events of histories hold 256"),
        (["quantity", "quantity"], "quantity is listed twice"),
    ],
)
def test_attributes_that_events_of_histories_cannot_have_are_refused(
    tmp_path: Path, history: list[str], message: str
) -> None:
    spec = yaml.safe_load(SPEC)
    spec["attributes"]["event"] = ATTRIBUTES | {"query": {"type": "categorical", "size": 300}}
    spec["history"] = {"attributes": history}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(UserError, match=r"spec.yaml:\d+: history.attributes") as refused:
        load_spec(tmp_path / "spec.yaml")
    assert message in str(refused.value)


def test_counters_with_the_same_column_are_refused(tmp_path: Path) -> None:
    spec = yaml.safe_load(SPEC)
    spec["attributes"]["event"] = ATTRIBUTES | {"quantity_user": {"type": "numeric"}}
    aggregations = [("quantity", "click"), ("quantity_user", "click")]
    spec["counters"] |= {
        "keys": [["user", "phone"], ["phone"]],
        "aggregations": [{"function": "sum", "column": c, "event": e} for c, e in aggregations],
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(UserError, match="several counters have the column sum_quantity_user_phone"):
        load_spec(tmp_path / "spec.yaml")
