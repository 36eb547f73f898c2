"""Kubernetes manifests and Slurm batch scripts, rendered from the declaration of the pipeline."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import date

from dags.clusters.config import KubernetesCluster, SlurmCluster, load_cluster
from dags.clusters.kubernetes import kubernetes_manifests
from dags.clusters.slurm import slurm_scripts
from dags.steps import PipelinePaths, Step
from etl.spec import DataSpec
from etl.tables.uri import is_url

__all__ = ["load_cluster", "render_files"]


def render_files(
    cluster: KubernetesCluster | SlurmCluster,
    spec: DataSpec,
    paths: PipelinePaths,
    steps: Sequence[Step],
    last_day: date,
) -> Mapping[str, str]:
    """The files of a pipeline run, by name.

    The feature store of a lake in an object store is not built, because each serving machine builds
    its own.

    Raises:
        UserError: The cluster cannot run the pipeline.
    """
    cluster.check_run(spec, paths)
    if is_url(paths.lake):
        steps = [step for step in steps if not step.writes[0].startswith("feature_store/")]
    if isinstance(cluster, KubernetesCluster):
        return kubernetes_manifests(cluster, steps, run_name(steps, last_day))
    return slurm_scripts(cluster, steps)


def run_name(steps: Sequence[Step], last_day: date) -> str:
    """A name that differs between runs of other specs, lakes, days or sizes of GEM."""
    commands = json.dumps([step.command for step in steps])
    return f"{last_day:%Y%m%d}-{hashlib.sha256(commands.encode()).hexdigest()[:6]}"
