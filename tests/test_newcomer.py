"""A log that the project has never seen: other names, hourly Parquet, orders that land later."""

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


def local(ms: pd.Series) -> pd.Series:
    return pd.to_datetime(ms, unit="ms", utc=True).dt.tz_convert(ZONE)


def kuairand() -> pd.DataFrame:
    log = pd.concat(pd.read_csv(f) for f in sorted((DATA / "data").glob("log_standard_*.csv*")))
    log = log.drop_duplicates(["user_id", "video_id", "time_ms"]).reset_index(drop=True)
    return log[log["date"].between(int(f"{FIRST:%Y%m%d}"), int(f"{LAST:%Y%m%d}"))]


def write(log: pd.DataFrame, raw: Path) -> pd.DataFrame:
    """The same impressions as hourly Parquet, and invented orders; returns those that landed."""
    told = pd.DataFrame({
        "member": "m" + log["user_id"].astype(str),
        "clip": "c" + log["video_id"].astype(str),
        "screen": "screen-" + log["tab"].clip(upper=2).astype(str),
        "at": log["time_ms"],
        "request": "rq" + (log["time_ms"] // 120_000).astype(str),
        "tapped": log["is_click"],
        "watched_ms": log["play_time_ms"],
        "length_ms": log["duration_ms"],
        "day": pd.to_datetime(log["date"].astype(str)).dt.date,
    })  # fmt: skip
    for (day, hour), part in told.groupby(["day", local(log["time_ms"]).dt.hour]):
        folder = raw / "shown" / str(day)
        folder.mkdir(parents=True, exist_ok=True)
        part.drop(columns="day").to_parquet(folder / f"{hour:02}.parquet", index=False)
    rng = np.random.default_rng(0)
    orders = told[(told["tapped"] == 1) & (rng.random(len(told)) < 0.2)].copy()
    hours = rng.integers(0, 20 * 3_600_000, len(orders))
    orders["at"] += log["play_time_ms"].loc[orders.index] + hours
    orders["order"] = [f"o{i}" for i in range(len(orders))]
    orders["amount"] = 1.5
    orders["lands"] = (local(orders["at"]).dt.normalize() + pd.Timedelta(days=1)).dt.date
    orders = orders[orders["lands"] <= LAST]
    (raw / "orders").mkdir()
    for day, part in orders.groupby("lands"):
        columns = part[["order", "member", "clip", "screen", "at", "amount"]]
        lines = "".join(json.dumps(row) + "\n" for row in columns.to_dict("records"))
        (raw / "orders" / f"{day}.json.gz").write_bytes(gzip.compress(lines.encode()))
    clips = pd.read_csv(next((DATA / "data").glob("video_features_basic*")))
    named = {"clip": "c" + clips["video_id"].astype(str), "maker": clips["author_id"]}
    pd.DataFrame(named | {"topic": clips["tag"]}).to_csv(raw / "clips.csv", index=False)
    return orders


@pytest.mark.proof
@needs_kuairand
def test_a_newcomers_log_goes_from_raw_files_to_rankers(spark: object, tmp_path: Path) -> None:
    raw, lake = tmp_path / "logs", Lake(str(tmp_path / "lake"), load_spec(SPEC))
    log = kuairand()
    orders = write(log, raw)
    where = ["--spec", str(SPEC), "--lake", lake.root]
    days = ["--days", f"{FIRST}:{LAST}"]
    assert main(["run", *where, "--raw", str(raw), *days, "--scale", "tiny"]) == 0
    assert main(["features", "check", *where, "--sample", "10"]) == 0
    assert (tmp_path / "lake" / "report.html").is_file()

    shown = {row["impression_id"]: row for row in rows(lake, "impressions")}
    assert len(shown) == len(log)
    types = [row["type"] for row in rows(lake, "events")]
    assert types.count(lake.spec.event_codes["order"]) == len(orders)
    tapped = log[log["is_click"] == 1].groupby(["user_id", "video_id"])
    taps = {key: part["time_ms"].tolist() for key, part in tapped}
    credited = set()
    for order in orders.itertuples():
        key = int(order.member[1:]), int(order.clip[1:])
        last = max(t for t in taps[key] if t <= order.at)
        if order.at - last <= 24 * 3_600_000:
            credited.add(f"{order.member}-{order.clip}-{last}")
    labels = {i: row["label_order"] for i, row in shown.items() if row["label_order"] is not None}
    assert len(labels) > 1000
    assert {i for i, label in labels.items() if label} == credited & labels.keys()
