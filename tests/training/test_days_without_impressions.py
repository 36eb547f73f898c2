"""A day on which no impression was logged, as when ads are paused, does not stop training."""

from collections import Counter
from datetime import date, timedelta

import numpy as np
import pytest
from deltalake import DeltaTable

from etl.errors import UserError
from etl.spec.units import date_range
from etl.tables import model_schemas
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from training.config import TrainConfig
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.teacher.outputs import write_teacher_outputs
from training.trainer import checkpoint
from training.trainer.resume import DayBatches
from training.trainer.state import latest_reader
from training.trainer.trainer import train_days

SECOND, THIRD = FIRST + timedelta(days=1), FIRST + timedelta(days=2)
CONFIG = TrainConfig(
    scale="tiny", width_multiplier=0.5, max_length=0, batch_rows=256, item_table_rows=512, passes=1
)  # fmt: skip


def pause_ads(lake: Lake, day: date) -> None:
    """Remove the impressions of a day from the tables, as if none had been logged."""
    impression = lake.spec.event_codes[lake.spec.impression_type]
    DeltaTable(lake.table_uri("events")).delete(f"day = '{day}' AND type = {impression}")
    for name in ("impressions", "examples"):
        DeltaTable(lake.table_uri(name)).delete(f"day = '{day}'")


def learned_labels(lake: Lake, days: list[date]) -> Counter[tuple[str, int]]:
    """How often each label, an impression and an objective, was learned by the GEM of some days.

    Its checkpoint must have been trained on the rows of these labels and no others.
    """
    labels: Counter[tuple[str, int]] = Counter()
    reader, num_rows = latest_reader(lake, CONFIG), 0
    for day in days:
        manifest = checkpoint.require_manifest(lake, day)
        for batch in DayBatches(lake, reader, day, manifest).shard_batches(0):
            rows, objectives = np.nonzero(batch.label_mask.numpy())
            labels.update(
                zip(batch.impression_ids[rows].tolist(), objectives.tolist(), strict=True)
            )
            num_rows += len(batch)
        assert manifest.complete and manifest.rows == num_rows
    return labels


@pytest.mark.parametrize("paused", [[SECOND], [SECOND, THIRD]])
def test_training_day_by_day_learns_each_label_once_across_paused_days(
    own: Lake, paused: list[date]
) -> None:
    for day in paused:
        pause_ads(own, day)
    days = list(date_range(FIRST, LAST))
    with process_group():
        for day in days:
            train_days(own, (day, day), CONFIG)
        learned = learned_labels(own, days)
    final = LabelWindow(0, own.spec.day_end(LAST))
    expected = Counter(
        (impression, column)
        for batch in ExampleReader.latest(own, max_length=0).batches(
            days, final, 256, Shuffle(None)
        )
        for row, impression in enumerate(batch.impression_ids)
        for column in np.flatnonzero(batch.label_mask[row].numpy())
    )
    assert learned == expected and set(learned.values()) == {1} and len(learned) > 500


def test_paused_days_have_no_teacher_predictions_and_other_days_have_theirs(own: Lake) -> None:
    pause_ads(own, THIRD)
    with process_group():
        train_days(own, (FIRST, THIRD), CONFIG)
        num_rows = write_teacher_outputs(own, (FIRST, LAST))
    predictions = own.rows_by_day(model_schemas.teacher_predictions(own.spec).name)
    examples = own.rows_by_day("examples")
    assert predictions == {day: examples[day] for day in (SECOND, LAST)}
    assert num_rows == sum(predictions.values())


def test_a_day_whose_impressions_have_no_examples_is_refused(own: Lake) -> None:
    DeltaTable(own.table_uri("examples")).delete(f"day = '{SECOND}'")
    with process_group(), pytest.raises(UserError, match=f"no examples of {SECOND}; run"):
        train_days(own, (FIRST, LAST), CONFIG)


def test_a_day_that_was_not_ingested_is_refused(own: Lake) -> None:
    pause_ads(own, SECOND)
    DeltaTable(own.table_uri("ingest_metrics")).delete(f"day = '{SECOND}'")
    with process_group(), pytest.raises(UserError, match=f"no examples of {SECOND}; run"):
        train_days(own, (FIRST, LAST), CONFIG)
