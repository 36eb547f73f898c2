"""Days of examples that a refit or a calibration reads: all whose labels may become final."""

import shutil
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from deltalake import DeltaTable

from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.units import DAY
from etl.tables.lake import Lake
from ranking.trainer.label_days import days_with_labels, require_examples
from tests.conftest import FIRST, LAST, SPEC
from tests.world import link_tables
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader


def test_labels_of_impressions_that_become_visible_late_are_read() -> None:
    """A label is not final before its impression is visible, which may take longer than windows."""
    spec = load_spec(SPEC).model_copy(update={"allowed_lateness": 9 * DAY})
    assert spec.visibility_delay_days > spec.label_maturity_days + 1
    days = [FIRST + timedelta(days=n) for n in range(30)]
    last = days[20]
    window = LabelWindow(spec.day_start(last) + 3600, spec.day_end(last))
    reader = SimpleNamespace(lake=SimpleNamespace(spec=spec), days=lambda: days)
    found = days_with_labels(cast(ExampleReader, reader), window)
    assert found == days[20 - spec.visibility_delay_days : 21]


@pytest.fixture
def own_lake(lake: Lake, tmp_path: Path) -> Lake:
    """The shared tables; the test may change its examples and events."""
    link_tables(lake, tmp_path)
    for name in ("examples", "events", "ingest_metrics"):
        shared = (tmp_path / name).resolve()
        (tmp_path / name).unlink()
        shutil.copytree(shared, tmp_path / name)
    return Lake(str(tmp_path), lake.spec)


def require(lake: Lake, learned: date = LAST) -> None:
    """Require the examples of what has not been learned when a day began."""
    reader = ExampleReader.latest(lake, "behaviour", 0, ("feed",))
    require_examples(reader, lake.spec.day_start(learned), lake.spec.day_end(LAST))


def test_examples_are_required_of_the_day_on_which_the_data_ends(own_lake: Lake) -> None:
    """Its labels would be skipped for good, also where those of the day before exist."""
    require(own_lake)
    DeltaTable(own_lake.table_uri("examples")).delete(f"day = '{LAST}'")
    with pytest.raises(UserError, match=f"no examples of {LAST}.*run `gemline features examples`"):
        require(own_lake)
    impression = own_lake.spec.event_codes[own_lake.spec.impression_type]
    events = DeltaTable(own_lake.table_uri("events"))
    events.delete(f"day = '{LAST}' AND type = {impression}")
    require(own_lake)  # no impression was logged on the day
    events.delete(f"day = '{LAST}'")
    require(own_lake)  # all of its events were copies
    DeltaTable(own_lake.table_uri("ingest_metrics")).delete(f"day = '{LAST}'")
    with pytest.raises(UserError, match="no examples of"):
        require(own_lake)  # the day was not ingested


def test_examples_are_required_of_all_days_that_were_not_learned(own_lake: Lake) -> None:
    second = FIRST + timedelta(days=1)
    DeltaTable(own_lake.table_uri("examples")).delete(f"day = '{second}'")
    with pytest.raises(UserError, match=f"no examples of {second}"):
        require(own_lake, learned=second)
    require(own_lake, learned=second + timedelta(days=1))
    DeltaTable(own_lake.table_uri("examples")).delete(f"day = '{FIRST}'")
    require(own_lake, learned=FIRST)  # the first days have expired
