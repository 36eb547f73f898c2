"""A day reads the labels of data providers from the latest weekly snapshot before it."""

import random
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from etl import reports
from etl.label_versions import labels_from
from etl.reports import AUDIENCE_REPORTS, load_reports
from etl.spec import DataSpec
from etl.spec.units import DAY, MICROS
from etl.tables.lake import Lake
from tests.features.test_audience_tables import uncompressed, write_raw
from tests.features.test_weekly_snapshots import remove_files_until

pytestmark = pytest.mark.spark

FIRST = date(2026, 1, 1)
DAYS = [FIRST + timedelta(days=number) for number in range(30)]
DELIVERY_DAYS = [DAYS[number] for number in (0, 1, 5, 6, 12, 14, 26, 29)]
PROVIDERS, USERS, LABELS = ("acme", "bluefin"), ("u1", "u2", "u3"), ("18-24", "25-34")
Label = dict[str, object]


def random_labels() -> Iterator[Label]:
    """Labels that are valid from earlier and later times than the day of their delivery."""
    rng = random.Random(7)
    for day in DELIVERY_DAYS:
        for provider in PROVIDERS:
            for user in USERS:
                second = rng.randrange(-2 * DAY, 3 * DAY)
                second += (day - date(1970, 1, 1)).days * DAY
                label = {"provider": provider, "user_id": user, "labelled_time": second * 1000}
                if rng.random() < 0.6:
                    yield label | {"age_band": rng.choice(LABELS), "day": day}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_raw(tmp_path_factory.mktemp("labels"), DAYS, audience_labels=list(random_labels()))


def load(lake: Lake, raw: str, runs: list[tuple[int, int]]) -> None:
    for first, last in runs:
        load_reports(lake, raw, (DAYS[first], DAYS[last]), AUDIENCE_REPORTS)


@pytest.fixture
def lake(spark: object, lake_spec: DataSpec, raw: str, tmp_path: Path) -> Lake:
    """Labels in several runs; the run of the last delivery but two is repeated."""
    lake = uncompressed(Lake(str(tmp_path / "lake"), lake_spec))
    load(lake, raw, [(0, 4), (5, 5), (6, 11), (12, 12), (13, 25), (14, 25), (26, 26), (27, 29)])
    return lake


def valid_at(labels: DataFrame, second: int) -> dict[tuple[str, str], str]:
    """The latest label of each provider and user strictly before a second."""
    rows = [row for row in labels.collect() if row["valid_from"] < second * MICROS["s"]]
    rows.sort(key=lambda row: (row["valid_from"], row["day"]))
    return {(row["provider"], row["user_id"]): row["label"] for row in rows}


def test_labels_from_a_day_are_those_of_all_days(lake: Lake) -> None:
    snapshot_days = sorted(lake.rows_by_day("audience_label_snapshots"))
    assert [day.toordinal() % 7 for day in snapshot_days] == [0] * len(snapshot_days)
    assert len(snapshot_days) >= 3, "one before each delivery that is a week after the last"
    all_labels = labels_from(lake, date.min)
    assert all_labels.count() > 20
    for day in DAYS[::4]:
        found = labels_from(lake, day)
        for second in range(lake.spec.day_start(day) + 1, lake.spec.day_end(day), DAY // 2):
            assert valid_at(found, second) == valid_at(all_labels, second), day


def test_a_snapshot_does_not_outlive_the_labels_that_it_was_made_of(
    lake: Lake, raw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are loaded again, and the run is killed as soon as it has written them."""
    write = reports._write_rows

    def write_and_interrupt(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("etl.reports._write_rows", write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            load(lake, raw, [(5, 29)])
    assert not [day for day in lake.rows_by_day("audience_label_snapshots") if day >= DAYS[5]]
    load(lake, raw, [(29, 29)])
    end, all_labels = lake.spec.day_end(DAYS[-1]), labels_from(lake, date.min)
    assert valid_at(labels_from(lake, DAYS[-1]), end) == valid_at(all_labels, end)


def test_labels_of_days_before_the_latest_snapshot_are_not_read(lake: Lake) -> None:
    end = lake.spec.day_end(DAYS[-1])
    expected = valid_at(labels_from(lake, DAYS[-1]), end)
    assert len(expected) == len(PROVIDERS) * len(USERS)
    remove_files_until(lake, "audience_labels", max(lake.rows_by_day("audience_label_snapshots")))
    assert valid_at(labels_from(lake, DAYS[-1]), end) == expected
