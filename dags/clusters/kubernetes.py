"""Manifests for Kubernetes: one object for each step.

Spark steps are a SparkApplication (Spark operator), the training of GEM on several nodes is a
PyTorchJob (training operator), and all other steps are a Job. The annotation `gemline/after` of an
object names the objects that have to finish before it is created. A refusal (exit code 2) fails a
Job at once; the operators do not see the meaning of an exit code, and retry refusals, too. The
feature store of a lake in an object store is not built: each serving machine builds its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dags.clusters.config import KubernetesCluster, Resources, Training
from dags.steps import Step, earlier_steps

SPARK_VERSION = "4.2.0"
HEAP_PERCENT = 60
MAX_RETRIES = 3
MAX_NAME_LENGTH = 63  # of a label of DNS
VOLUME = "data"
PodSpec = dict[str, Any]
Manifest = dict[str, Any]


class _WithoutAliases(yaml.SafeDumper):
    """Writes what occurs twice twice, instead of an anchor and an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Whether a value is always written itself."""
        return True


def kubernetes_manifests(
    cluster: KubernetesCluster, steps: Sequence[Step], run: str
) -> Mapping[str, str]:
    """The manifests by file name; `run` is part of the objects' names, such as 20260111."""
    if not cluster.volume:
        steps = [step for step in steps if not step.writes[0].startswith("feature_store/")]
    names = {step.name: _object_name(number, step, run) for number, step in enumerate(steps, 1)}
    files = {}
    for number, step in enumerate(steps, 1):
        earlier = [names[name] for name in earlier_steps(step, steps)]
        manifest = _manifest(cluster, step, names[step.name], earlier)
        files[f"{number:02d}-{step.name}.yaml"] = yaml.dump(
            manifest, Dumper=_WithoutAliases, sort_keys=False
        )
    return files


def _object_name(number: int, step: Step, run: str) -> str:
    """A name that differs between runs, and stays a label of DNS however long the step's is."""
    stem = f"gemline-{number:02d}-{step.name.replace('_', '-')}"
    return f"{stem[: MAX_NAME_LENGTH - 1 - len(run)].rstrip('-')}-{run}"


def _manifest(cluster: KubernetesCluster, step: Step, name: str, earlier: list[str]) -> Manifest:
    metadata = {
        "name": name,
        "namespace": cluster.namespace,
        "labels": {"app.kubernetes.io/name": "gemline", "gemline/step": step.name[:63]},
        "annotations": {"gemline/after": " ".join(earlier)},
    }
    if cluster.training.takes_several_nodes(step):
        return _pytorch_job(cluster, step, metadata)
    if step.engine == "spark":
        return _spark_application(cluster, step, metadata)
    return _job(cluster, step, metadata)


def _spark_application(cluster: KubernetesCluster, step: Step, metadata: Manifest) -> Manifest:
    """A SparkApplication in cluster mode, with dynamic allocation of executors."""
    spark = cluster.spark
    executors = spark.executors
    spec: dict[str, Any] = {
        "type": "Python",
        "pythonVersion": "3",
        "mode": "cluster",
        "image": cluster.image,
        "mainApplicationFile": f"local://{cluster.home}/gemline.py",
        "arguments": list(step.command),
        "sparkVersion": SPARK_VERSION,
        "sparkConf": dict(spark.properties),
        "dynamicAllocation": {
            "enabled": True,
            "initialExecutors": executors.min,
            "minExecutors": executors.min,
            "maxExecutors": executors.max,
        },
        "restartPolicy": {
            "type": "OnFailure",
            "onFailureRetries": MAX_RETRIES,
            "onFailureRetryInterval": 60,
        },
        "driver": {
            "serviceAccount": cluster.service_account,
            **_spark_pod(cluster, spark.driver),
        },
        "executor": _spark_pod(cluster, executors),
    }
    if spark.jars:
        spec["deps"] = {"jars": list(spark.jars)}
    if cluster.volume:
        spec["volumes"] = _volumes(cluster)
    return {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": metadata,
        "spec": spec,
    }


def _spark_pod(cluster: KubernetesCluster, resources: Resources) -> dict[str, Any]:
    """The driver, or an executor: a part of its memory is the heap, the rest is for Python."""
    memory = resources.memory_gb * 1024
    heap = memory * HEAP_PERCENT // 100
    pod: dict[str, Any] = {
        "cores": resources.cpus,
        "memory": f"{heap}m",
        "memoryOverhead": f"{memory - heap}m",
        "envFrom": _secrets(cluster),
    }
    if cluster.volume:
        pod["volumeMounts"] = _volume_mounts(cluster)
    return pod


def _pytorch_job(cluster: KubernetesCluster, step: Step, metadata: Manifest) -> Manifest:
    """A PyTorchJob: torchrun on each node, which the operator's variables connect."""
    training = cluster.training
    command = ["torchrun", f"--max-restarts={MAX_RETRIES}", "-m", "gemline", *step.command]
    pod = _pod(cluster, "pytorch", command, training)
    replica = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
    replicas = {
        "Master": {"replicas": 1} | replica,
        "Worker": {"replicas": training.nodes - 1} | replica,
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(training.processes_per_node),
            "runPolicy": {"backoffLimit": MAX_RETRIES, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _job(cluster: KubernetesCluster, step: Step, metadata: Manifest) -> Manifest:
    """A Job; a refusal is not retried."""
    command = ["python", "-m", "gemline", *cluster.training.single_node_command(step)]
    resources = cluster.training if step.is_distributed else cluster.other
    pod = _pod(cluster, "gemline", command, resources) | {"restartPolicy": "Never"}
    refusal = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "gemline", "operator": "In", "values": [2]},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": MAX_RETRIES,
            "podFailurePolicy": {"rules": [refusal]},
            "template": {"spec": pod},
        },
    }


def _pod(
    cluster: KubernetesCluster, name: str, command: list[str], resources: Resources
) -> PodSpec:
    """A pod with one container."""
    amounts: dict[str, Any] = {"cpu": str(resources.cpus), "memory": f"{resources.memory_gb}Gi"}
    if isinstance(resources, Training) and resources.gpus:
        amounts["nvidia.com/gpu"] = str(resources.gpus)
    container = {
        "name": name,
        "image": cluster.image,
        "workingDir": cluster.home,
        "command": command,
        "envFrom": _secrets(cluster),
        "resources": {"requests": amounts, "limits": amounts},
    }
    if not cluster.volume:
        return {"serviceAccountName": cluster.service_account, "containers": [container]}
    container["volumeMounts"] = _volume_mounts(cluster)
    return {
        "serviceAccountName": cluster.service_account,
        "containers": [container],
        "volumes": _volumes(cluster),
    }


def _secrets(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    return [{"secretRef": {"name": name}} for name in cluster.secrets]


def _volumes(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    assert cluster.volume
    return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": cluster.volume.claim}}]


def _volume_mounts(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    assert cluster.volume
    return [{"name": VOLUME, "mountPath": cluster.volume.path}]
