"""A log with a new format, from raw files to rankers: other names, hourly Parquet, late orders."""

import gzip
import json
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from etl.spec import load_spec
from etl.tables.lake import Lake
from gemline import main
from tests.kuairand import DATA, needs_kuairand
from tests.pipeline import rows

pytestmark = pytest.mark.spark

SPEC = Path(__file__).with_name("newcomer.yaml")
FIRST, LAST = date(2022, 4, 25), date(2022, 4, 30)
ZONE = "Asia/Shanghai"


def local_time(ms: pd.Series) -> pd.Series:
    """Timestamps in the log's time zone, from milliseconds since the epoch."""
    return pd.to_datetime(ms, unit="ms", utc=True).dt.tz_convert(ZONE)


def kuairand_log() -> pd.DataFrame:
    """The standard log of KuaiRand-Pure, on some days, without duplicates."""
    log = pd.concat(pd.read_csv(f) for f in sorted((DATA / "data").glob("log_standard_*.csv*")))
    log = log.drop_duplicates(["user_id", "video_id", "time_ms"]).reset_index(drop=True)
    return log[log["date"].between(int(f"{FIRST:%Y%m%d}"), int(f"{LAST:%Y%m%d}"))]


def write_raw_files(log: pd.DataFrame, raw: Path) -> pd.DataFrame:
    """Write impressions as hourly Parquet, and random orders; returns the orders in the files."""
    impressions = pd.DataFrame({
        "member": "m" + log["user_id"].astype(str),
        "clip": "c" + log["video_id"].astype(str),
        "screen": "screen-" + log["tab"].clip(upper=2).astype(str),
        "at": log["time_ms"],
        "request": "rq" + (log["time_ms"] // 120_000).astype(str),
        "tapped": log["is_click"],
        "watched_ms": log["play_time_ms"],
        "length_ms": log["duration_ms"],
        "place": "Screen number " + log["tab"].astype(str),
        "shelves": [[f"s{tab}", "all"] for tab in log["tab"]],
        "day": pd.to_datetime(log["date"].astype(str)).dt.date,
    })  # fmt: skip
    for (day, hour), part in impressions.groupby(["day", local_time(log["time_ms"]).dt.hour]):
        folder = raw / "shown" / str(day)
        folder.mkdir(parents=True, exist_ok=True)
        part.drop(columns="day").to_parquet(folder / f"{hour:02}.parquet", index=False)
    rng = np.random.default_rng(0)
    is_ordered = (impressions["tapped"] == 1) & (rng.random(len(impressions)) < 0.2)
    orders = impressions[is_ordered].copy()
    hours = rng.integers(0, 20 * 3_600_000, len(orders))
    orders["at"] += log["play_time_ms"].loc[orders.index] + hours
    orders["order"] = [f"o{i}" for i in range(len(orders))]
    orders["amount"] = 1.5
    orders["landing_day"] = (local_time(orders["at"]).dt.normalize() + pd.Timedelta(days=1)).dt.date
    orders = orders[orders["landing_day"] <= LAST]
    (raw / "orders").mkdir()
    for day in sorted(set(orders["landing_day"])):
        part = orders[orders["landing_day"] == day]
        columns = part[["order", "member", "clip", "screen", "at", "amount"]]
        lines = "".join(json.dumps(row) + "\n" for row in columns.to_dict("records"))
        (raw / "orders" / f"{day}.json.gz").write_bytes(gzip.compress(lines.encode()))
    clips = pd.read_csv(next((DATA / "data").glob("video_features_basic*")))
    attributes = {"clip": "c" + clips["video_id"].astype(str), "maker": clips["author_id"]}
    pd.DataFrame(attributes | {"topic": clips["tag"]}).to_csv(raw / "clips.csv", index=False)
    return orders


@pytest.mark.proof
@needs_kuairand
def test_an_unknown_log_goes_from_raw_files_to_rankers(spark: object, tmp_path: Path) -> None:
    raw, lake = tmp_path / "logs", Lake(str(tmp_path / "lake"), load_spec(SPEC))
    log = kuairand_log()
    orders = write_raw_files(log, raw)
    flags = ["--spec", str(SPEC), "--lake", lake.root]
    days = ["--days", f"{FIRST}:{LAST}"]
    assert main(["run", *flags, "--raw", str(raw), *days, "--scale", "tiny"]) == 0
    assert main(["features", "check", *flags, "--sample", "10"]) == 0
    assert (tmp_path / "lake" / "report.html").is_file()

    impressions = {row["impression_id"]: row for row in rows(lake, "impressions")}
    assert len(impressions) == len(log)
    types = [row["type"] for row in rows(lake, "events")]
    assert types.count(lake.spec.event_codes["order"]) == len(orders)
    tapped = log[log["is_click"] == 1].groupby(["user_id", "video_id"])
    taps = {key: part["time_ms"].tolist() for key, part in tapped}
    attributed = set()
    for order in orders.to_dict("records"):
        member, clip, ordered_at = order["member"], order["clip"], order["at"]
        key = int(member[1:]), int(clip[1:])
        last_tap = max(tap for tap in taps[key] if tap <= ordered_at)
        if ordered_at - last_tap <= 24 * 3_600_000:
            attributed.add(f"{member}-{clip}-{last_tap}")
    labels = {
        impression_id: row["label_order"]
        for impression_id, row in impressions.items()
        if row["label_order"] is not None
    }
    assert len(labels) > 1000
    assert {
        impression_id for impression_id, label in labels.items() if label
    } == attributed & labels.keys()
