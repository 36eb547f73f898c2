"""Counter keys of attributes that change: online as offline."""

from datetime import timedelta
from pathlib import Path

import pytest

from ranking.feature_store.consistency import check_consistency
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.student.config import InputLimits
from tests.oracle.disorder import FIRST, build_lake, generate_records

pytestmark = pytest.mark.spark

DAYS, LENGTH = 2, 20
LIMITS = InputLimits(
    max_length=LENGTH, encoded_events=8, teacher_history_length=0, user_hash_buckets=0
)


def test_events_count_for_the_attributes_that_their_user_had(spark: object, tmp_path: Path) -> None:
    """Users change their plan; events come from the tables or are posted, as are versions."""
    lake = build_lake(tmp_path, generate_records(5, 60, DAYS), [(0, DAYS - 1)])
    last = FIRST + timedelta(days=DAYS - 1)
    lengths = HistoryLengths("behaviour", LENGTH)
    store = build_feature_store(lake, tmp_path / "store", lake.spec.day_start(last), lengths)
    report = check_consistency(store, lake, last, LIMITS)
    store.close()
    assert report.num_requests > 20
    assert not report.mismatches
