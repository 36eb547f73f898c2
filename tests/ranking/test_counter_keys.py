"""Counter keys of attributes of users and of the context: online as offline."""

import re
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import load_spec
from etl.tables.declared_columns import counted_columns, item_counter_key_columns
from features.ragged import latest_before
from ranking.feature_store.consistency import check_consistency
from ranking.feature_store.events import Event, validate_event
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.feature_store.wal import WalEntry
from ranking.serving.schemas import EventPayload
from ranking.serving.worker import posted_event
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


def test_a_posted_event_keeps_what_counters_read_of_it(tmp_path: Path) -> None:
    """Also in the log of posted events; unknown attributes and wrong types are refused."""
    (tmp_path / "spec.yaml").write_text(
        SPEC.replace("  context:\n", "  context:\n    query: {type: text}\n")
    )
    spec = load_spec(tmp_path / "spec.yaml")
    payload = EventPayload(event_id="e", user="u", item="hat", surface="home", type="click")

    def posted(**fields: object) -> Event:
        posted_payload = payload.model_copy(update=fields)
        return posted_event(spec, posted_payload, NOON * 10**6, counted_columns(spec))

    context = {"device": "tv", "screen": 55, "query": "red hat", "hour": "noon"}
    event = posted(context=context, attributes={"quantity": 2, "coupon": "sale"})
    assert event.context == {"device": "tv", "screen": 55}
    assert event.attributes == {"quantity": 2, "coupon": "sale"}
    assert WalEntry.from_json(WalEntry("event", 0, event).to_json()).payload == event
    validate_event(spec, event)
    with pytest.raises(UserError, match="event e: the context has no devise"):
        posted(context={"devise": "tv"})
    with pytest.raises(
        UserError, match="event e: the event has no count; it has coupon, handset, quantity"
    ):
        posted(attributes={"count": 1})
    wrong: dict[str, dict[str, object]] = {
        "device of the context is 7; it is a string": {"context": {"device": 7}},
        "coupon of the event is 7; it is a string": {"attributes": {"coupon": 7}},
        "quantity of event e is '2'; it is a number": {"attributes": {"quantity": "2"}},
        "screen of event e is True; it is a number": {"context": {"screen": True}},
    }
    for message, fields in wrong.items():
        with pytest.raises(UserError, match=re.escape(message)):
            validate_event(spec, posted(**fields))


def test_a_name_that_several_have_means_what_can_be_a_key(tmp_path: Path) -> None:
    """A text of items cannot; of those that can, items come first."""
    for of_items, owner in (("{type: text}", "context"), ("{type: categorical}", "item")):
        text = SPEC.replace("  item: {", f"  item: {{device: {of_items}, ")
        (tmp_path / "spec.yaml").write_text(text)
        spec = load_spec(tmp_path / "spec.yaml")
        assert ("device" in spec.context_counter_keys) == (owner == "context")
        assert ("device" in spec.item_counter_keys) == (owner == "item")
        assert ("key_device" in item_counter_key_columns(spec)) == (owner == "item")
