"""Scores of a batch are the ranker's own, each candidate's once, from pinned tables."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from etl.errors import UserError
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from ranking.batch import score_days
from ranking.package.ranker import load
from ranking.package.versions import current, versions
from ranking.score import Scorer
from tests.conftest import LAST
from tests.world import link_tables

pytestmark = pytest.mark.spark

DAYS = (LAST - timedelta(days=1), LAST)


@pytest.fixture(scope="module")
def own(lake: Lake, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The shared tables, and a ranker that answers."""
    root = tmp_path_factory.mktemp("scored")
    link_tables(lake, root)
    shutil.copytree(folder, versions(str(root), "feed") / "one")
    current(str(root), "feed").swap("one")
    return Lake(str(root), lake.spec)


@pytest.fixture(scope="module")
def written(spark: object, own: Lake) -> int:
    return score_days(own, "feed", DAYS)


def scores(lake: Lake) -> pa.Table:
    stored = arrow.snapshot(lake, contracts.scores(lake.spec)).read()
    return stored.sort_by([("day", "ascending"), ("impression_id", "ascending")])


def test_each_candidate_of_the_days_has_what_the_ranker_says(own: Lake, written: int) -> None:
    scorer = Scorer.of(load(versions(own.root, "feed") / "one"), own)
    alone = pa.concat_tables(rows for day in DAYS for rows in scorer.rows(day, (0, 1)))
    alone = alone.sort_by([("day", "ascending"), ("impression_id", "ascending")])
    found = scores(own)
    assert written == len(found) == len(alone) > 100
    for name in found.column_names:
        mine, theirs = found[name], alone[name]
        if pa.types.is_floating(mine.type):
            numbers = [np.asarray(x.fill_null(-1)) for x in (mine, theirs)]
            np.testing.assert_allclose(*numbers, rtol=1e-4, err_msg=name)
        elif name != "place":  # two may change places within the last digit
            assert mine.equals(theirs), name


def test_places_of_a_request_are_from_the_first_on(own: Lake, written: int) -> None:
    """What of a request landed on another day is another day's."""
    found = scores(own).to_pandas()
    for _, request in found[found.place.notna()].groupby(["day", "request_id"]):
        assert sorted(request.place) == list(range(len(request)))
        inside = request.sort_values("place").expected_value
        assert (inside.diff().dropna() <= 0).all()
        assert (request.price <= request.bid + 1e-12).all()


def test_writing_again_replaces_and_tells_what_was_read(own: Lake, written: int) -> None:
    before = scores(own)
    assert score_days(own, "feed", (LAST, LAST)) < written
    assert scores(own).select(["impression_id", "day"]) == before.select(["impression_id", "day"])
    commit = DeltaTable(own.path("scores")).history(1)[0]
    inputs = json.loads(commit["userMetadata"])["inputs"]
    assert inputs["ranker"] == "one" and inputs["examples"] == own.version("examples")


def test_a_surface_without_a_ranker_and_a_day_without_examples_are_named(own: Lake) -> None:
    with pytest.raises(UserError, match="no ranker of reels is promoted"):
        score_days(own, "reels", DAYS)
    with pytest.raises(UserError, match="no examples of"):
        score_days(own, "feed", (LAST, LAST + timedelta(days=1)))
