"""MLflow runs are stored in the lake of the training run."""

import sqlite3
from pathlib import Path

from training.trainer.tracking import log_metrics, mlflow_run


def count_runs(lake: Path) -> int:
    with sqlite3.connect(lake / "mlflow.db") as database:
        return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])


def test_each_lake_has_its_own_runs(tmp_path: Path) -> None:
    """Also if one process trains in several lakes, as in studies."""
    for name, count in (("first", 2), ("second", 1)):
        for _ in range(count):
            with mlflow_run(str(tmp_path / name), "gem", {"scale": "tiny"}):
                log_metrics({"loss": 0.5}, 1)
    assert (count_runs(tmp_path / "first"), count_runs(tmp_path / "second")) == (2, 1)
