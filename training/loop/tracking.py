"""Runs in MLflow: in the lake on this machine, or wherever MLFLOW_TRACKING_URI points."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mlflow

from etl.tables.place import here, place

# What the user chose; `set_tracking_uri` writes the variable too, and the next lake has its own.
TRACKING_URI = os.environ.get("MLFLOW_TRACKING_URI")


@contextmanager
def tracked(lake: str, experiment: str, params: Mapping[str, object]) -> Iterator[None]:
    """An MLflow run while inside."""
    folder = here(place(lake, "mlflow")).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(TRACKING_URI or f"sqlite:///{folder}/mlflow.db")
    if mlflow.get_experiment_by_name(experiment) is None:
        mlflow.create_experiment(experiment, artifact_location=str(folder / "mlflow"))
    mlflow.set_experiment(experiment)
    with mlflow.start_run():
        mlflow.log_params(dict(params))
        yield


def track(metrics: Mapping[str, float], step: int) -> None:
    """Numbers of the current run at a step."""
    mlflow.log_metrics({k: float(v) for k, v in metrics.items()}, step=step)
