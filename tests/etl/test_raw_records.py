"""Attributes of a raw record in Python are those that ingest reads from the same record."""

import json
import math
from contextlib import suppress
from datetime import date
from pathlib import Path

import pytest
import yaml
from pyspark.sql import SparkSession

from etl.errors import UserError
from etl.ingest.run import ingest
from etl.raw_records import attributes_of_record
from etl.spec import DataSpec, load_spec
from etl.tables.lake import Lake
from tests.etl.shop import SPEC
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAY = date(2026, 1, 2)
NOON = 1767355200
CONTEXT = {
    "phone": {"type": "categorical"},
    "market": {"type": "categorical"},
    "hour": {"type": "clock", "part": "hour"},
    "price": {"type": "numeric", "column": "micros"},
    "age_band": {"type": "categorical", "vocabulary": ["young", "old"]},
    "tags": {"type": "multi_categorical", "separator": "|"},
    "labels": {"type": "multi_categorical"},
    "query": {"type": "text"},
    "place": {"type": "vector", "width": 2},
    "speed": {"type": "numeric"},
}
SELECT = {
    "market": "concat(lower(trim(country)), ':', coalesce(language, 'none'))",
    "micros": "cost / 1e6",
    "age_band": "case when age < 25 then 'young' when age >= 25 then 'old' end",
    "query": "nullif(lower(search), '')",
}
RECORDS: list[dict[str, object]] = [
    {},
    {"phone": "ios", "country": " DE", "language": "de", "cost": 2_500_000, "age": 24},
    {"phone": 7, "country": "fr", "cost": "n/a", "age": "25", "search": "Red SHOES"},
    {"phone": True, "country": None, "cost": "1e6", "age": None, "search": ""},
    {"tags": "b | a||b", "labels": ["y", "x", "", "x"], "place": [1, 2.5]},
    {"tags": "", "labels": [], "place": [1, 2, 3]},
    {"tags": " | ", "labels": "no list", "place": [1, None]},
    {"phone": "", "labels": [1, True, "1"], "place": "[3, 4]", "cost": -0.5, "age": "NaN"},
    {"speed": "NaN", "cost": "NaN"},
    {"speed": " 1.5e3 ", "cost": "Infinity"},
    {"speed": 0.1, "cost": 12345678.9},
]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """The shop's spec with attributes of all types and computed columns."""
    spec = yaml.safe_load(SPEC)
    spec["attributes"]["context"] = CONTEXT
    spec["sources"]["app"]["select"] = SELECT
    spec["max_bad_record_rate"] = 0.5
    file = tmp_path_factory.mktemp("shop") / "spec.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    return load_spec(file)


def plain(value: object) -> object:
    """A value that can be compared: without NaN and tuples."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def test_attributes_of_a_record_are_those_that_ingest_stores(
    spark: SparkSession, tmp_path: Path, spec: DataSpec
) -> None:
    (tmp_path / "raw/app").mkdir(parents=True)
    logged = [
        {"id": f"e{i}", "who": "u", "what": "i", "page": "home", "action": "shown", "at": NOON + i}
        for i in range(len(RECORDS))
    ]
    lines = [json.dumps(event | record) for event, record in zip(logged, RECORDS, strict=True)]
    (tmp_path / f"raw/app/{DAY}.json").write_text("\n".join(lines) + "\n")
    lake = Lake(str(tmp_path / "lake"), spec)
    ingest(lake, str(tmp_path / "raw"), (DAY, DAY))
    stored = {
        event["event_id"]: {n: plain(event[f"ctx_{n}"]) for n in CONTEXT if n != "hour"}
        for event in rows(lake, "events")
    }
    computed = {}
    for number, record in enumerate(RECORDS):
        with suppress(UserError):  # of another type
            attributes = attributes_of_record(spec, None, record)
            computed[f"e{number}"] = {name: plain(each) for name, each in attributes.items()}
    assert stored == computed
    assert stored["e1"]["market"] == "de:de"
    assert stored["e1"]["price"] == 2.5
    assert len(stored) == len(RECORDS) - 2


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"place": [1, 2, 3]}, "place of the record is .*; it is a vector attribute of width 2"),
        ({"labels": "x"}, "labels of the record is 'x'; it is a multi categorical attribute"),
    ],
)
def test_a_value_of_another_type_is_refused(
    spec: DataSpec, record: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        attributes_of_record(spec, "app", record)


def test_a_record_is_of_a_source_with_attributes(spec: DataSpec) -> None:
    assert attributes_of_record(spec, "app", {"phone": "ios"})["phone"] == "ios"
    with pytest.raises(
        UserError, match="apps is no source of events or attributes; there is app, sales"
    ):
        attributes_of_record(spec, "apps", {})
