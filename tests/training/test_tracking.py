"""Runs in MLflow lie in the lake that was trained."""

import sqlite3
from pathlib import Path

from training.loop.tracking import track, tracked


def runs_of(lake: Path) -> int:
    with sqlite3.connect(lake / "mlflow.db") as database:
        return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])


def test_each_lake_keeps_its_own_runs(tmp_path: Path) -> None:
    """Also where one process trains in several, as studies do."""
    for name, count in (("one", 2), ("other", 1)):
        for _ in range(count):
            with tracked(str(tmp_path / name), "gem", {"scale": "tiny"}):
                track({"loss": 0.5}, 1)
    assert (runs_of(tmp_path / "one"), runs_of(tmp_path / "other")) == (2, 1)
