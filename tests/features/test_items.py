"""Item indexes are consecutive, and do not depend on how Spark distributes the items."""

import json
import random
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from etl.attributes import load_attributes
from etl.ingest.run import ingest
from etl.spec import load_spec
from etl.tables.lake import Lake
from features.items import index_items, number_items
from tests.oracle.disorder import day_start
from tests.pipeline import rows

pytestmark = pytest.mark.spark

FIRST_INDEX = 16


def test_items_are_numbered_by_day_and_popularity_whatever_their_partitions(
    spark: SparkSession,
) -> None:
    rng = random.Random(0)
    days = [date(2026, 1, 1) + timedelta(days=rng.randrange(3)) for _ in range(500)]
    counts = [1 + int(rng.paretovariate(0.7)) for _ in days]
    table = pa.table({"item_id": [f"i{i}" for i in range(500)], "day": days, "n": counts})
    items = spark.createDataFrame(table)
    numbered = number_items(items, FIRST_INDEX).collect()
    indexes = sorted(row["item_index"] for row in numbered)
    assert indexes == list(range(FIRST_INDEX, FIRST_INDEX + 500))
    again = number_items(items.repartition(7).sort("n"), FIRST_INDEX).collect()
    assert sorted(again) == sorted(numbered)
    by_id = dict(zip(table["item_id"].to_pylist(), counts, strict=True))
    in_order = sorted(numbered, key=lambda row: row["item_index"])
    keys = [(row["day"], -(by_id[row["item_id"]].bit_length())) for row in in_order]
    assert all(first <= second for first, second in pairwise(keys))


STATIC_SPEC = """
name: shop
buckets: 1
surfaces: {home: {}}
events: {shown: {role: impression}, click: {role: outcome}}
objectives: {click: {event: click, window: 1h}}
attributes: {item: {brand: {type: categorical}}}
sequences: {behaviour: {}}
counters: {windows: [1h], events: [shown], keys: [[brand]]}
sources:
  log:
    {kind: event_log, format: json, path: "log/{day}.json", time_unit: s, columns: {event_id: id,
     user: user, item: item, surface: surface, type: type, event_time: ts}}
  ads: {kind: attributes, entity: item, format: json, path: ads.json, key: ad, static: true}
"""


@pytest.mark.usefixtures("spark")
def test_an_item_has_an_added_static_row_from_the_day_of_its_arrival(tmp_path: Path) -> None:
    """Not before, and once, although the item was seen earlier and the days are run again."""
    days = [date(2026, 1, day) for day in (1, 2, 3)]
    (tmp_path / "spec.yaml").write_text(STATIC_SPEC)
    (tmp_path / "log").mkdir()
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    early, late = ({"ad": ad, "brand": f"brand {ad}"} for ad in ("early", "late"))

    def run(day: date, *ads: dict[str, str]) -> None:
        (tmp_path / "ads.json").write_text("".join(json.dumps(ad) + "\n" for ad in ads))
        load_attributes(lake, str(tmp_path), (day, day))
        index_items(lake, (day, day))

    for day in days:
        event = {"user": "u", "surface": "home", "type": "shown", "ts": day_start(day, "UTC") + 60}
        events = [event | {"id": f"{day}{ad}", "item": ad} for ad in ("early", "late")]
        (tmp_path / "log" / f"{day}.json").write_text("\n".join(map(json.dumps, events)))
        ingest(lake, str(tmp_path), (day, day))
        run(day, early, *([late] if day == days[2] else []))
    expected = [("early", days[0], 0), ("late", days[2], day_start(days[2], "UTC") * 10**6)]
    for _ in range(2):
        names = {item["item_index"]: item["item_id"] for item in rows(lake, "items")}
        stored = [(names[v["item_index"]], v["day"], v["valid_from"])
                  for v in rows(lake, "item_versions")]  # fmt: skip
        assert sorted(stored) == expected
        for day in (days[1], days[2]):
            run(day, early, late)
