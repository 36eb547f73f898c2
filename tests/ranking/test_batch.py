"""Batch scoring writes each candidate's scores once, equal to those of the ranker."""

import json
import pickle
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from etl.errors import UserError
from etl.tables import arrow, model_schemas, schemas
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake, arrow_schema
from features.schema import TEACHER_EMBEDDING_WIDTH
from ranking.inputs.from_tables import load_teacher_history
from ranking.registry.ranker import live_pointer, load_ranker, rankers_folder
from ranking.scoring.batch import ScoreBuckets, score_days, scoring_task
from ranking.scoring.scorer import Scorer
from ranking.student.config import InputLimits
from tests.conftest import LAST
from tests.world import copy_of, link_tables

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


def bucket_scores(task: ScoreBuckets, bucket: int) -> list[dict[str, object]]:
    """The rows that an executor scores of a bucket; the task has been sent to it."""
    sent: ScoreBuckets = pickle.loads(pickle.dumps(task))
    ids = pa.RecordBatch.from_pydict({"id": [bucket]})
    return [row for rows in sent(iter([ids])) for row in rows.to_pylist()]


def double_bids(lake: Lake) -> None:
    """A new version of all items' attributes, as of a refresh."""
    schema = schemas.attributes(lake.spec, "item")
    rows = arrow.snapshot(lake, schema).read()
    at = rows.column_names.index("bid")
    doubled = rows.set_column(at, rows.schema.field(at), pc.multiply(rows["bid"], 2.0))
    arrow.replace_rows(lake, schema, doubled, "true", {})


def add_teacher_embedding(lake: Lake) -> None:
    """The first teacher embedding of a lake, as of a teacher that is turned on."""
    schema = model_schemas.user_teacher_embeddings(lake.spec)
    day = DAYS[0] - timedelta(days=1)
    row = {
        "user_id": "u", "visible_ts": lake.spec.day_end(day),
        "impression_ts": lake.spec.day_start(day), "item_index": 1, "impression_id": "i",
        "fm_version": "gem", "fm_trained_until": day - timedelta(days=1),
        "compressor_version": "c", "day": day, "bucket": 0,
        "teacher_embedding_int4": bytes(TEACHER_EMBEDDING_WIDTH // 2),
    }  # fmt: skip
    rows = pa.Table.from_pylist([row], schema=arrow_schema(schema))
    arrow.replace_rows(lake, schema, rows, f"day = '{day}'", {})


def test_all_tasks_read_the_versions_at_the_start_or_the_pinned_ones(
    ranker_lake: Lake, tmp_path: Path
) -> None:
    """A refresh between two tasks would else mix bids and embeddings of two versions."""
    own = copy_of(ranker_lake, tmp_path / "lake")
    buckets = range(own.spec.buckets)
    task, version = scoring_task(own, "feed", DAYS), own.version("attributes_item")
    before = [bucket_scores(task, bucket) for bucket in buckets]
    double_bids(own)
    add_teacher_embedding(own)
    assert [bucket_scores(task, bucket) for bucket in buckets] == before
    fresh = scoring_task(own, "feed", DAYS)
    assert bucket_scores(fresh, 0) != before[0]
    limits = InputLimits(40, encoded_events=8, teacher_history_length=1, user_hash_buckets=0)
    counts = [len(load_teacher_history(t.lake, limits).sort_keys) for t in (task, fresh)]
    assert counts == [0, 1]

    score_days(Lake(own.root, own.spec, {"attributes_item": version}), "feed", DAYS)
    bids = {row["impression_id"]: row["bid"] for rows in before for row in rows}
    assert {row["impression_id"]: row["bid"] for row in scores(own).to_pylist()} == bids
    commit = DeltaTable(own.table_uri("scores")).history(1)[0]
    assert json.loads(commit["userMetadata"])["inputs"]["attributes_item"] == version


def test_a_surface_without_a_ranker_and_a_day_without_examples_are_named(ranker_lake: Lake) -> None:
    with pytest.raises(UserError, match="no ranker of reels is promoted"):
        score_days(ranker_lake, "reels", DAYS)
    with pytest.raises(UserError, match="no examples of"):
        score_days(ranker_lake, "feed", (LAST, LAST + timedelta(days=1)))
