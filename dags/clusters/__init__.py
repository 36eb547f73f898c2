"""Kubernetes manifests and Slurm batch scripts, rendered from the declaration of the pipeline."""

from collections.abc import Mapping, Sequence

from dags.clusters.config import Cluster, KubernetesCluster, load_cluster
from dags.clusters.kubernetes import kubernetes_manifests
from dags.clusters.slurm import slurm_scripts
from dags.steps import Step

__all__ = ["load_cluster", "render_files"]


def render_files(cluster: Cluster, steps: Sequence[Step], run: str) -> Mapping[str, str]:
    """The files of a pipeline run, by name; `run` distinguishes the objects of several runs."""
    if isinstance(cluster, KubernetesCluster):
        return kubernetes_manifests(cluster, steps, run)
    return slurm_scripts(cluster, steps)
