"""A model reads the latest version of an item that is valid strictly before a second."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.spec import load_spec
from etl.tables import arrow, schemas
from etl.tables.lake import Lake, arrow_schema
from features.schema import feature_schema
from tests.oracle.disorder import FIRST, SPEC
from training.data.items import load_items

R = schemas.RESERVED_ITEM_INDICES


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    folder: Path = tmp_path_factory.mktemp("items")
    (folder / "spec.yaml").write_text(SPEC)
    return Lake(str(folder / "lake"), load_spec(folder / "spec.yaml"))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_versions_are_those_of_the_reference(lake: Lake, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 6)
    attributes = {(R + rng.randrange(size), rng.randrange(40)): rng.randrange(3) for _ in range(12)}
    index, versions = schemas.items(lake.spec), schemas.item_versions(lake.spec)
    names = [{"item_id": f"i{k}", "item_index": R + k, "day": FIRST} for k in range(size)]
    rows = [
        {"item_index": ix, "valid_from": second * 1_000_000 + 7, "item_brand": brand, "day": FIRST}
        for (ix, second), brand in attributes.items()
    ]
    for contract, content in ((index, names), (versions, rows)):
        table = pa.Table.from_pylist(content, arrow_schema(contract))
        arrow.replace_rows(lake, contract, table, "true", {})
    items = load_items(
        arrow.snapshot(lake, index), arrow.snapshot(lake, versions), feature_schema(lake.spec).item
    )
    requested = np.array([(R + k, t) for k in range(size) for t in range(42)])
    found = items.categorical["item_brand"][items.versions_at(requested[:, 0], requested[:, 1])]
    for (ix, second), brand in zip(requested.tolist(), found, strict=True):
        before = {t: b for (i, t), b in attributes.items() if i == ix and t < second}
        assert brand == (before[max(before)] if before else 0)


def test_reserved_indexes_have_no_attributes(lake: Lake) -> None:
    empty = {c.name: arrow_schema(c).empty_table() for c in
             (schemas.items(lake.spec), schemas.item_versions(lake.spec))}  # fmt: skip
    for contract in (schemas.items(lake.spec), schemas.item_versions(lake.spec)):
        arrow.replace_rows(lake, contract, empty[contract.name], "true", {})
    items = load_items(
        arrow.snapshot(lake, schemas.items(lake.spec)),
        arrow.snapshot(lake, schemas.item_versions(lake.spec)),
        feature_schema(lake.spec).item,
    )
    assert len(items) == R and not items.seen_by(FIRST).any()
    assert items.versions_at(np.arange(R), np.full(R, 10**10)).tolist() == [0] * R
