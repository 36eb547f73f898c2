"""Manifests for Kubernetes: one object for each step.

Spark steps are a SparkApplication (Spark operator), the training of GEM on several nodes is a
PyTorchJob (training operator), and all other steps are a Job. The annotation `gemline/after` of an
object names the objects that have to finish before it is created. A refusal (exit code 2) fails a
Job at once; the operators do not see the meaning of an exit code, and retry refusals, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dags.clusters.config import (
    KubernetesCluster,
    Placement,
    Resources,
    StepKind,
    Training,
    step_kind,
)
from dags.steps import Step, earlier_steps
from etl.errors import UserError

SPARK_VERSION = "4.2.0"
HEAP_PERCENT = 60
MAX_RETRIES = 3
# A lease whose holder was lost with its machine is free after two minutes: retries wait longer.
JOB_BACKOFF_LIMIT = 6
RENDEZVOUS_PORT = 29_400
MAX_NAME_LENGTH = 50  # operators add to it, and names of pods have at most 63 characters
VOLUME = "data"
PodSpec = dict[str, Any]
Manifest = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice, and quotes texts that other parsers read as numbers."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Whether a value is always written itself."""
        return True

    def represent_text(self, text: str) -> yaml.Node:
        """A text, such as `1e3`, which YAML 1.2 takes for a number."""
        style = '"' if text[:1].isdigit() else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def kubernetes_manifests(
    cluster: KubernetesCluster, steps: Sequence[Step], run: str
) -> Mapping[str, str]:
    """The manifests by file name; `run` is a part of the objects' names."""
    names = {step.name: _object_name(number, step, run) for number, step in enumerate(steps, 1)}
    files = {}
    for number, step in enumerate(steps, 1):
        earlier = [names[name] for name in earlier_steps(step, steps)]
        manifest = _manifest(cluster, step, names[step.name], run, earlier)
        files[f"{number:02d}-{step.name}.yaml"] = yaml.dump(
            manifest, Dumper=_Dumper, sort_keys=False
        )
    return files


def _object_name(number: int, step: Step, run: str) -> str:
    """A name that differs between runs, and stays a label of DNS however long the step's is."""
    stem = f"gemline-{number:02d}-{step.name.replace('_', '-')}"
    return f"{stem[: MAX_NAME_LENGTH - 1 - len(run)].rstrip('-')}-{run}"


def _manifest(
    cluster: KubernetesCluster, step: Step, name: str, run: str, earlier: list[str]
) -> Manifest:
    metadata = {
        "name": name,
        "namespace": cluster.namespace,
        "labels": {"app.kubernetes.io/name": "gemline", "app.kubernetes.io/instance": run},
        "annotations": {"gemline/step": step.name, "gemline/after": " ".join(earlier)},
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
        "volumes": _volumes(cluster),
    }
    if cluster.image_pull_secrets:
        spec["imagePullSecrets"] = list(cluster.image_pull_secrets)
    if spark.jars:
        spec["deps"] = {"jars": list(spark.jars)}
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
    return {
        "cores": resources.cpus,
        "memory": f"{heap}m",
        "memoryOverhead": f"{memory - heap}m",
        "envFrom": _secrets(cluster),
        "volumeMounts": _volume_mounts(cluster),
        **_placement(cluster, "spark"),
    }


def _pytorch_job(cluster: KubernetesCluster, step: Step, metadata: Manifest) -> Manifest:
    """A PyTorchJob: torchrun on each node, which the operator's variables connect."""
    training = cluster.training
    command = [
        "torchrun",
        f"--nnodes={training.nodes}",
        f"--nproc-per-node={training.processes_per_node}",
        f"--max-restarts={MAX_RETRIES}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={metadata['name']}",
        f"--rdzv-endpoint={metadata['name']}-master-0:{RENDEZVOUS_PORT}",
        *("-m", "gemline", *step.command),
    ]
    pod = _pod(cluster, "pytorch", command, training) | _placement(cluster, "training")
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
            "runPolicy": {"backoffLimit": MAX_RETRIES, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _job(cluster: KubernetesCluster, step: Step, metadata: Manifest) -> Manifest:
    """A Job; a refusal is not retried."""
    command = ["python", "-m", "gemline", *cluster.training.single_node_command(step)]
    resources = cluster.training if step.is_distributed else cluster.other
    pod = _pod(cluster, "gemline", command, resources) | {"restartPolicy": "Never"}
    pod |= _placement(cluster, step_kind(step))
    refusal = {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": "gemline",
            "operator": "In",
            "values": [UserError.exit_code],
        },
    }
    disruption = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": JOB_BACKOFF_LIMIT,
            "podFailurePolicy": {"rules": [refusal, disruption]},
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
    container: dict[str, Any] = {
        "name": name,
        "image": cluster.image,
        "workingDir": cluster.home,
        "command": [word.replace("$(", "$$(") for word in command],  # else Kubernetes expands it
        "env": [
            {"name": "OMP_NUM_THREADS", "value": str(resources.threads_per_process)},
            # A restart uses a new store: the old one holds addresses of processes that are gone.
            {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"},
        ],
        "envFrom": _secrets(cluster),
        "resources": {"requests": amounts, "limits": amounts},
    }
    volumes, mounts = [], []
    if isinstance(resources, Training):  # of which NCCL uses more than a container has by default
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    container["volumeMounts"] = mounts + _volume_mounts(cluster)
    pod: PodSpec = {
        "serviceAccountName": cluster.service_account,
        "containers": [container],
        "volumes": volumes + _volumes(cluster),
    }
    if cluster.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in cluster.image_pull_secrets]
    return pod


def _placement(cluster: KubernetesCluster, kind: StepKind) -> dict[str, Any]:
    """The fields of a pod, a driver or an executor that say on which nodes it runs."""
    placement = cluster.placement.get(kind, Placement())
    tolerations = [each.model_dump(exclude_none=True) for each in placement.tolerations]
    fields = {"nodeSelector": dict(placement.node_selector), "tolerations": tolerations}
    return {name: value for name, value in fields.items() if value}


def _secrets(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    return [{"secretRef": {"name": name}} for name in cluster.secrets]


def _volumes(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    if cluster.volume is None:
        return []
    return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": cluster.volume.claim}}]


def _volume_mounts(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    if cluster.volume is None:
        return []
    return [{"name": VOLUME, "mountPath": cluster.volume.path}]
