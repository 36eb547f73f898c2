"""Experiment tracking with MLflow: in the lake, or at MLFLOW_TRACKING_URI if set."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlflow
from mlflow import MlflowClient

from etl.tables.uri import local_cache_path, resolve_uri

# Read at import, because `set_tracking_uri` also sets the variable; each lake has its own database.
TRACKING_URI = os.environ.get("MLFLOW_TRACKING_URI")


def register_model_version(
    lake: str, name: str, source: str, description: str, tags: Mapping[str, str]
) -> None:
    """Add a version of a model to MLflow's model registry, or update that of the same source."""
    client = MlflowClient(_use_tracking_uri(lake))
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    known = client.search_model_versions(f"name = '{name}'")
    same = [each.version for each in known if each.source == source]
    if not same:
        client.create_model_version(name, source, tags=dict(tags), description=description)
    for version in same:
        client.update_model_version(name, version, description)
        for key, value in tags.items():
            client.set_model_version_tag(name, version, key, value)


def remove_model_versions(lake: str, name: str, folder: str, kept: Collection[str]) -> None:
    """Remove the versions of a model whose sources are in a folder, except for some sources.

    Only in the lake's own registry: a server may have versions of lakes of the same path on other
    machines.
    """
    if TRACKING_URI:
        return
    client = MlflowClient(_use_tracking_uri(lake))
    for version in client.search_model_versions(f"name = '{name}'"):
        source = version.source or ""
        if source.startswith(f"{folder}/") and source not in kept:
            client.delete_model_version(name, version.version)


def _use_tracking_uri(lake: str) -> str:
    """The tracking URI of a lake, which MLflow uses from now on."""
    folder = _mlflow_folder(lake)
    folder.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(TRACKING_URI or f"sqlite:///{folder}/mlflow.db")
    return mlflow.get_tracking_uri()


def _mlflow_folder(lake: str) -> Path:
    return Path(local_cache_path(resolve_uri(lake, "mlflow")).absolute().parent)


@contextmanager
def mlflow_run(lake: str, experiment: str, params: Mapping[str, object]) -> Iterator[None]:
    """An MLflow run of an experiment; the parameters are logged at its start."""
    _use_tracking_uri(lake)
    if mlflow.get_experiment_by_name(experiment) is None:
        mlflow.create_experiment(experiment, artifact_location=str(_mlflow_folder(lake) / "mlflow"))
    mlflow.set_experiment(experiment)
    with mlflow.start_run():
        mlflow.log_params(dict(params))
        yield


def log_metrics(metrics: Mapping[str, float], step: int) -> None:
    """Log metrics of the current run."""
    mlflow.log_metrics(dict(metrics), step=step)
