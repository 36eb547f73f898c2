"""The first training over several days together: the labels of these days, once a pass."""

from collections import Counter
from collections.abc import Iterable
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from etl.errors import UserError
from etl.spec.units import DayRange, date_range
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from tests.world import copy_of
from training.config import TrainConfig
from training.data.batch import Batch
from training.distributed.process_group import process_group
from training.trainer import checkpoint
from training.trainer.resume import DayBatches, first_day_statistics, starting_point
from training.trainer.state import Manifest, build_train_state, latest_reader
from training.trainer.table_day import start_table_day
from training.trainer.trainer import train_days

CONFIG = TrainConfig(
    scale="tiny", width_multiplier=0.5, max_length=8, batch_rows=256, item_table_rows=512,
    passes=1, first_training="joint",
)  # fmt: skip
DAYS = FIRST, LAST - timedelta(days=1)


def manifest_of(lake: Lake, config: TrainConfig, days: DayRange = DAYS) -> Manifest:
    return starting_point(lake, latest_reader(lake, config), days, config)[0]


def labels_of(batches: Iterable[Batch]) -> Counter[tuple[str, int]]:
    """How often each label, an impression and an objective, is learned."""
    labels: Counter[tuple[str, int]] = Counter()
    for batch in batches:
        rows, objectives = np.nonzero(batch.label_mask.numpy())
        labels.update(zip(batch.impression_ids[rows].tolist(), objectives.tolist(), strict=True))
    return labels


def test_joint_training_reads_the_labels_of_its_days_once_and_no_later_ones(lake: Lake) -> None:
    """They are those that a daily training reads day after day."""
    with process_group():
        reader = latest_reader(lake, CONFIG)
        manifest = manifest_of(lake, CONFIG)
        assert (manifest.trained_from, manifest.trained_until) == DAYS
        joint = labels_of(DayBatches(lake, reader, DAYS[1], manifest).shard_batches(0))
        daily_manifest = manifest_of(lake, CONFIG.model_copy(update={"first_training": "daily"}))
        daily: Counter[tuple[str, int]] = Counter()
        for day in date_range(*DAYS):
            day_manifest = daily_manifest.next_day(day, 1)
            batches = DayBatches(lake, reader, day, day_manifest).shard_batches(0)
            daily += labels_of(batches)
    assert set(joint.values()) == {1} and joint == daily and len(joint) > 2000


def test_rows_of_several_days_are_mixed(lake: Lake) -> None:
    with process_group():
        batches = DayBatches(lake, latest_reader(lake, CONFIG), DAYS[1], manifest_of(lake, CONFIG))
        as_of = [batch.as_of.numpy() for batch in batches.shard_batches(0)]
    first_half = np.concatenate(as_of[: len(as_of) // 2])
    days = {date.fromtimestamp(int(ts)) for ts in first_half}
    assert len(days) >= 3


def test_items_of_all_days_have_rows_and_later_ones_have_none(lake: Lake) -> None:
    with process_group():
        reader, manifest = latest_reader(lake, CONFIG), manifest_of(lake, CONFIG)
        state = build_train_state(manifest, statistics=first_day_statistics(lake, reader, manifest))
        start_table_day(state, reader.items, DAYS[1])
        with_rows = state.item_rows.map.row_items
    seen = reader.items.seen_by(DAYS[1])
    assert (~seen).sum() > 0 and seen.sum() < CONFIG.item_table_rows
    assert set(with_rows[with_rows > 0].tolist()) == set(np.flatnonzero(seen).tolist()) - {0}


def test_days_after_a_joint_training_follow_one_by_one(lake: Lake, tmp_path: Path) -> None:
    own = copy_of(lake, tmp_path / "lake")
    with process_group():
        train_days(own, DAYS, CONFIG)
        assert [m.trained_until for _, m in checkpoint.list_checkpoints(own.root, None)] == [
            DAYS[1]
        ]
        reader = latest_reader(own, CONFIG)
        assert train_days(own, DAYS, CONFIG) == []  # nothing is left to train
        manifest = manifest_of(own, CONFIG, (LAST, LAST))
        assert (manifest.trained_from, manifest.joint_until) == DAYS
        batches = list(DayBatches(own, reader, LAST, manifest).shard_batches(0))
        labels = labels_of(batches)
        start = own.spec.day_start(LAST)
        daily = manifest.model_copy(update={"joint_until": None})
        assert labels == labels_of(DayBatches(own, reader, LAST, daily).shard_batches(0))
        assert labels and torch.cat([batch.as_of for batch in batches]).max() >= start


def test_days_are_learned_together_until_the_last_of_these_and_then_one_by_one(
    lake: Lake, tmp_path: Path
) -> None:
    own, all_days = copy_of(lake, tmp_path / "lake"), (FIRST, LAST)
    config = CONFIG.model_copy(update={"joint_until": DAYS[1]})
    with process_group():
        train_days(own, all_days, config)
        checkpoints = [m for _, m in checkpoint.list_checkpoints(own.root, None)]
        assert [m.trained_until for m in checkpoints] == [DAYS[1], LAST]
        assert {m.joint_until for m in checkpoints} == {DAYS[1]}
        assert train_days(own, all_days, config) == []  # nothing is left to train
        assert train_days(own, DAYS, CONFIG) == []  # nor in a run of these days alone
        outside = config.model_copy(update={"joint_until": LAST + timedelta(days=1)})
        with pytest.raises(UserError, match=r"--joint-until .* must be one of the days"):
            manifest_of(own, outside, all_days)
