"""Real logs: the labels computed from KuaiRand's raw files equal the labels in the files."""

from datetime import date, timedelta
from pathlib import Path

import pandas as pd
import pytest

from etl.ingest.run import ingest
from etl.labels import label_impressions
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.conftest import ROOT
from tests.kuairand import DATA, needs_kuairand
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAY = date(2022, 4, 26)
LABELS = {
    "click": "is_click",
    "long_view": "long_view",
    "like": "is_like",
    **{name: f"is_{name}" for name in ("follow", "comment", "forward", "hate")},
}


@needs_kuairand
@pytest.mark.usefixtures("spark")
def test_labels_equal_those_in_the_raw_files(tmp_path: Path) -> None:
    """For every fifth user, on a day and the next one, on which its labels mature."""
    raw = log_of_some_users(5)
    days = (DAY, DAY + timedelta(days=1))
    (tmp_path / "logs/data").mkdir(parents=True)
    raw.to_csv(tmp_path / "logs/data/log_standard_pure.csv", index=False)
    lake = Lake(str(tmp_path / "lake"), load_spec(ROOT / "conf/specs/kuairand.yaml"))
    ingest(lake, str(tmp_path / "logs"), days)
    label_impressions(lake, days)
    stored = {r["impression_id"]: r for r in rows(lake, "impressions") if r["day"] == DAY}

    raw = raw[raw["date"] == int(f"{DAY:%Y%m%d}")]
    ids = raw["user_id"].astype(str) + "-" + raw["video_id"].astype(str)
    raw.index = ids + "-" + raw["time_ms"].astype(str)
    raw = raw[~raw.index.duplicated()]
    assert set(stored) == set(raw.index) and len(stored) > 1000
    for name, column in LABELS.items():
        wrong = [i for i, v in raw[column].items() if stored[i][f"label_{name}"] != v]
        is_after_window = raw.loc[wrong, "play_time_ms"] > 600_000
        assert is_after_window.all(), f"{name}: {len(wrong)} of {len(raw)} differ"
    ended = raw[raw["play_time_ms"] <= 600_000]["play_time_ms"]
    assert all(stored[i]["dwell_ms_play_time"] == dwell for i, dwell in ended.items())


def log_of_some_users(every: int) -> pd.DataFrame:
    """The raw log of one user in `every`, on the day and the next one."""
    files = sorted((DATA / "data").glob("log_standard_*.csv*"))
    raw = pd.concat(pd.read_csv(f) for f in files)
    dates = [int(f"{DAY + timedelta(days=n):%Y%m%d}") for n in (0, 1)]
    return raw[raw["date"].isin(dates) & (raw["user_id"] % every == 0)]
