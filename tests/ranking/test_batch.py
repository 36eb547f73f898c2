"""Batch scoring writes each candidate's scores once, equal to those of the ranker."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from etl.errors import UserError
from etl.tables import arrow, model_schemas
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from ranking.registry.ranker import live_pointer, load_ranker, rankers_folder
from ranking.scoring.batch import score_days
from ranking.scoring.scorer import Scorer
from tests.conftest import LAST
from tests.world import link_tables

pytestmark = pytest.mark.spark

DAYS = (LAST - timedelta(days=1), LAST)


@pytest.fixture(scope="module")
def ranker_lake(lake: Lake, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The shared tables, and a live ranker."""
    root = tmp_path_factory.mktemp("scored")
    link_tables(lake, root)
    shutil.copytree(folder, local_path(rankers_folder(str(root), "feed") / "one"))
    live_pointer(str(root), "feed").promote("one")
    return Lake(str(root), lake.spec)


@pytest.fixture(scope="module")
def written(spark: object, ranker_lake: Lake) -> int:
    """Scores of two days; returns the number of rows written."""
    return score_days(ranker_lake, "feed", DAYS)


def scores(lake: Lake) -> pa.Table:
    stored = arrow.snapshot(lake, model_schemas.scores(lake.spec)).read()
    return stored.sort_by([("day", "ascending"), ("impression_id", "ascending")])


def test_each_candidate_of_the_days_is_scored_as_by_the_ranker(
    ranker_lake: Lake, written: int
) -> None:
    scorer = Scorer.from_ranker(
        load_ranker(rankers_folder(ranker_lake.root, "feed") / "one"), ranker_lake, min(DAYS)
    )
    expected = pa.concat_tables(rows for day in DAYS for rows in scorer.score_day(day, (0, 1)))
    expected = expected.sort_by([("day", "ascending"), ("impression_id", "ascending")])
    stored = scores(ranker_lake)
    assert written == len(stored) == len(expected) > 100
    for name in stored.column_names:
        column, expected_column = stored[name], expected[name]
        if pa.types.is_floating(column.type):
            values, expected_values = (
                np.asarray(x.fill_null(-1)) for x in (column, expected_column)
            )
            np.testing.assert_allclose(values, expected_values, rtol=1e-4, err_msg=name)
        elif name != "rank":  # rounding may swap two candidates
            assert column.equals(expected_column), name


@pytest.mark.usefixtures("written")
def test_ranks_of_a_request_are_consecutive_and_by_value(ranker_lake: Lake) -> None:
    """Candidates of a request that landed on different days are ranked by day."""
    rows = scores(ranker_lake).to_pandas()
    for _, request in rows[rows["rank"].notna()].groupby(["day", "request_id"]):
        assert sorted(request["rank"]) == list(range(len(request)))
        values = request.sort_values("rank").expected_value
        assert (values.diff().dropna() <= 0).all()
        assert (request.price <= request.bid + 1e-12).all()


def test_scoring_again_replaces_rows_and_records_the_versions_read(
    ranker_lake: Lake, written: int
) -> None:
    before = scores(ranker_lake)
    assert score_days(ranker_lake, "feed", (LAST, LAST)) < written
    assert scores(ranker_lake).select(["impression_id", "day"]) == before.select(
        ["impression_id", "day"]
    )
    commit = DeltaTable(ranker_lake.table_uri("scores")).history(1)[0]
    inputs = json.loads(commit["userMetadata"])["inputs"]
    assert inputs["ranker"] == "one" and inputs["examples"] == ranker_lake.version("examples")


def test_a_surface_without_a_ranker_and_a_day_without_examples_are_named(ranker_lake: Lake) -> None:
    with pytest.raises(UserError, match="no ranker of reels is promoted"):
        score_days(ranker_lake, "reels", DAYS)
    with pytest.raises(UserError, match="no examples of"):
        score_days(ranker_lake, "feed", (LAST, LAST + timedelta(days=1)))
