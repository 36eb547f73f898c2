"""Logs whose users, items and contexts have several values, texts and vectors."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from math import sqrt
from pathlib import Path

from etl.spec import load_spec
from etl.tables.lake import Lake
from features.encoding.scalar import spark_xxhash64
from tests.oracle.disorder import FIRST, SPEC, generate_records, write_raw
from tests.oracle.log import Record
from tests.pipeline import build_tables

TAGS = ("red", "wool", "sale", "new", "blue")
QUERIES = (None, "", "Red wool HAT", "red, red shoes!", "\u65e5\u672c \u00c9T\u00c9", "hat")
ATTRIBUTES = """
  user:
    plan: {type: categorical, vocabulary: [free, paid]}
    interests: {type: multi_categorical, vocabulary: [red, wool, sale]}
    taste: {type: vector, width: 2}
  item:
    brand: {type: categorical, vocabulary: [x, y]}
    tags: {type: multi_categorical, size: 4, separator: "|"}
    title: {type: text, size: 16, analyzer: char, ngram_range: [2, 3]}
  context:
    query: {type: text, size: 8, ngram_range: [1, 2]}
    filters: {type: multi_categorical, size: 16}
    view: {type: vector, width: 2}
"""
DECLARED = """
  user: {plan: {type: categorical, vocabulary: [free, paid]}}
  item: {brand: {type: categorical, vocabulary: [x, y]}}
  context:
"""


def write_bag_spec(folder: Path) -> Path:
    """Write the spec of these logs."""
    assert DECLARED in SPEC
    (folder / "spec.yaml").write_text(SPEC.replace(DECLARED, ATTRIBUTES))
    return folder / "spec.yaml"


def generate_bag_records(seed: int, users: int, days: int) -> list[Record]:
    """Records with a query, filters and a view; some lack them."""
    records = generate_records(seed, users, days)
    for record in records:
        rng = random.Random(f"{seed} {record['imp'] or record['id']}")  # the same in all copies
        record["query"] = rng.choice(QUERIES)
        record["filters"] = rng.choice((None, [], ["new"], ["sale", "new", "sale", ""]))
        record["view"] = rng.choice((None, [0.5, -2], [1, 3]))
    return records


def write_attributes(raw: Path, seed: int, changed_since: int | None = None) -> None:
    """Add values to the attributes of users and items that `write_raw` wrote.

    Those that are valid from `changed_since` on have other values than without it.
    """
    rng = random.Random(seed)
    for name in ("items", "users"):
        path = raw / f"{name}.json"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            tags = rng.choices(TAGS, k=rng.randrange(4))
            if changed_since is not None and row["since"] >= changed_since:
                tags = ["changed"]
            if name == "items":
                row |= {"tags": "|".join(tags), "title": f"{row['item']} of {' '.join(tags)}"}
            else:
                row |= {"interests": tags, "taste": [rng.random(), -1.0]}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_bag_lake(
    folder: Path,
    records: list[Record],
    spans: list[tuple[int, int]],
    changed_since: int | None = None,
) -> Lake:
    """The tables of the logs, built in spans of days (first, last) one after the other."""
    raw = folder / "raw"
    write_raw(records, raw, changed_since)
    write_attributes(raw, 0, changed_since)
    lake = Lake(str(folder / "lake"), load_spec(write_bag_spec(folder)))
    for first, last in spans:
        build_tables(lake, raw, (FIRST + timedelta(days=first), FIRST + timedelta(days=last)))
    return lake


def impressions_by_id(records: Iterable[Record]) -> dict[str, Record]:
    """The record of each impression, by its id."""
    return {record["imp"]: record for record in records if record["type"] == "shown"}


def version_before(raw: Path, entity: str, id_: str, second: int) -> Record:
    """The latest attributes of a user or an item that were valid before a second, or none."""
    lines = (raw / f"{entity}s.json").read_text().splitlines()
    versions = [row for row in map(json.loads, lines) if row[entity] == id_]
    known = [row for row in versions if row["since"] < second]
    return max(known, key=lambda row: row["since"], default={})


def hashed(values: Iterable[str], size: int) -> list[float]:
    """Counts of the values by hash, as a vector of length 1; zeros if there are none."""
    counts = Counter(spark_xxhash64(value) % size for value in values)
    length = sqrt(sum(n * n for n in counts.values())) or 1.0
    return [counts[position] / length for position in range(size)]
