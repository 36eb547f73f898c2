"""Counter keys of attributes of users and of the context: online as offline."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import load_spec
from features.ragged import latest_before
from ranking.feature_store.consistency import check_consistency
from ranking.feature_store.events import Event, validate_event
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.student.config import InputLimits
from tests.oracle.disorder import FIRST, NOON, SPEC, build_lake, generate_records
from tests.pipeline import rows

pytestmark = pytest.mark.spark

ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=30)


@given(ROWS, ROWS)
def test_the_latest_row_before_a_time_is_found(
    versions: list[tuple[int, int]], queries: list[tuple[int, int]]
) -> None:
    """Of an owner's rows of one time, the last; -1 where there is none."""
    rows_of, queries_of = (np.array(r, np.int64).reshape(-1, 2) for r in (versions, queries))
    found = latest_before(rows_of[:, 0], rows_of[:, 1], queries_of[:, 0], queries_of[:, 1])
    for (owner, time), position in zip(queries, found.tolist(), strict=True):
        earlier = [(t, n) for n, (o, t) in enumerate(versions) if o == owner and t < time]
        assert position == max(earlier, default=(0, -1))[1]


DAYS, LENGTH = 2, 20
POSTED = Event("e", "u1", "hat", "home", "click", NOON * 10**6, NOON * 10**6)
LIMITS = InputLimits(
    max_length=LENGTH, encoded_events=8, teacher_history_length=0, user_hash_buckets=0
)


def test_events_count_for_the_attributes_that_their_user_or_context_had(
    spark: object, tmp_path: Path
) -> None:
    """Users change their plan; events come from the tables or are posted, as are versions."""
    lake = build_lake(tmp_path, generate_records(5, 60, DAYS), [(0, DAYS - 1)])
    last = FIRST + timedelta(days=DAYS - 1)
    lengths = HistoryLengths("behaviour", LENGTH)
    store = build_feature_store(lake, tmp_path / "store", lake.spec.day_start(last), lengths)
    report = check_consistency(store, lake, last, LIMITS)
    store.close()
    counters = [c.column for c in lake.spec.counters.columns if c.aggregation == "count"]
    examples = rows(lake, "examples")
    for key in ("item_plan", "plan_brand", "user_device", "hour_brand"):
        of_key = [column for column in counters if column.startswith(f"cnt_{key}")]
        assert sum(row[column] for row in examples for column in of_key) > 5, key
    assert report.num_requests > 20
    assert not report.mismatches


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"devise": "tv"}, "event e: the context has no devise"),
        ({"device": 7}, "device of the context is 7; it is a string"),
    ],
)
def test_a_wrong_context_of_an_event_is_refused(
    tmp_path: Path, context: dict[str, object], message: str
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = load_spec(tmp_path / "spec.yaml")
    validate_event(spec, replace(POSTED, context={"device": "tv"}))
    with pytest.raises(UserError, match=message):
        validate_event(spec, replace(POSTED, context=context))
