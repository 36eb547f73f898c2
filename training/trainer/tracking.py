"""Experiment tracking with MLflow: in the lake, or at MLFLOW_TRACKING_URI if set."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mlflow

from etl.tables.uri import local_cache_path, resolve_uri

# Read at import, because `set_tracking_uri` also sets the variable; each lake has its own database.
TRACKING_URI = os.environ.get("MLFLOW_TRACKING_URI")


@contextmanager
def mlflow_run(lake: str, experiment: str, params: Mapping[str, object]) -> Iterator[None]:
    """An MLflow run of an experiment; the parameters are logged at its start."""
    folder = local_cache_path(resolve_uri(lake, "mlflow")).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(TRACKING_URI or f"sqlite:///{folder}/mlflow.db")
    if mlflow.get_experiment_by_name(experiment) is None:
        mlflow.create_experiment(experiment, artifact_location=str(folder / "mlflow"))
    mlflow.set_experiment(experiment)
    with mlflow.start_run():
        mlflow.log_params(dict(params))
        yield


def log_metrics(metrics: Mapping[str, float], step: int) -> None:
    """Log metrics of the current run."""
    mlflow.log_metrics(dict(metrics), step=step)
