"""Real logs: the labels that the line makes of KuaiRand's raw files are those of the files."""

import os
from datetime import date, timedelta
from pathlib import Path

import pandas as pd
import pytest

from etl.ingest import ingest
from etl.labels import label
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.conftest import ROOT
from tests.pipeline import rows

DATA = Path(os.environ.get("GEMLINE_KUAIRAND", ROOT.parent / "shared/data/KuaiRand-Pure"))
DAY = date(2022, 4, 26)
LABELS = {"click": "is_click", "long_view": "long_view", "like": "is_like"}


@pytest.mark.skipif(
    not DATA.is_dir(),
    reason="KuaiRand's raw files are absent; name their folder by GEMLINE_KUAIRAND",
)
def test_labels_are_those_of_the_raw_files(spark: object, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path), load_spec(ROOT / "conf/specs/kuairand.yaml"))
    days = (DAY, DAY + timedelta(days=1))
    ingest(lake, str(DATA), days)
    label(lake, days)
    made = {r["impression_id"]: r for r in rows(lake, "impressions") if r["day"] == DAY}

    files = sorted((DATA / "data").glob("log_standard_*.csv*"))
    raw = pd.concat(pd.read_csv(f) for f in files)
    raw = raw[raw["date"] == int(f"{DAY:%Y%m%d}")]
    ids = raw["user_id"].astype(str) + "-" + raw["video_id"].astype(str)
    raw.index = ids + "-" + raw["time_ms"].astype(str)
    raw = raw[~raw.index.duplicated()]
    assert set(made) == set(raw.index)
    for name, column in LABELS.items():
        wrong = [i for i, v in raw[column].items() if made[i][f"label_{name}"] != v]
        late = raw.loc[wrong, "play_time_ms"] > 600_000
        assert late.all(), f"{name}: {len(wrong)} of {len(raw)} differ"
