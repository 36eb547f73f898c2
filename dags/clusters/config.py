"""The configuration of a cluster: its scheduler, and the resources of each kind of step."""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from dags.steps import Step
from etl.cli.runner import format_validation_error
from etl.errors import UserError
from etl.spec.base import StrictModel

AbsolutePath = Annotated[str, Field(pattern=r"^/[-A-Za-z0-9_./+@]*$")]
# A label of DNS (RFC 1123), as Kubernetes wants names of namespaces, accounts and secrets.
DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
# A name that Slurm reads as one word.
SlurmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]*$")]


class Resources(StrictModel):
    """Resources of one process or node."""

    cpus: int = Field(ge=1)
    """CPU cores."""
    memory_gb: int = Field(ge=1)
    """Memory in GiB."""


class Executors(Resources):
    """Resources of each Spark executor, and how many there are by dynamic allocation."""

    min: int = Field(default=1, ge=0)
    """The fewest executors."""
    max: int = Field(ge=1)
    """The most executors."""

    @model_validator(mode="after")
    def _check_order(self) -> "Executors":
        if self.min > self.max:
            raise ValueError(f"min {self.min} is larger than max {self.max}")
        return self


class SparkOnKubernetes(StrictModel):
    """Resources of Spark steps on Kubernetes."""

    driver: Resources
    """The driver."""
    executors: Executors
    """The executors."""
    jars: tuple[str, ...] = ()
    """The Delta JARs, such as `local:///opt/gemline/jars/x.jar`, unless Spark has them."""
    properties: dict[str, str] = {}
    """Further Spark properties, such as those of conf/spark."""


class Training(Resources):
    """Resources of each node that trains GEM, and how many nodes there are."""

    nodes: int = Field(default=1, ge=1)
    """Nodes."""
    processes_per_node: int = Field(default=1, ge=1)
    """Training processes of a node; on GPUs one for each."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of a node."""

    def single_node_command(self, step: Step) -> tuple[str, ...]:
        """The command of a step on one node, where training starts its own processes."""
        if step.is_distributed and self.processes_per_node > 1:
            return *step.command, "--processes", str(self.processes_per_node)
        return step.command

    def takes_several_nodes(self, step: Step) -> bool:
        """Whether a step runs on several nodes."""
        return step.is_distributed and self.nodes > 1


class Volume(StrictModel):
    """A persistent volume claim that all containers see."""

    claim: DnsLabel
    """The claim; several nodes must be able to write to it."""
    path: AbsolutePath
    """Where it is mounted."""


class KubernetesCluster(StrictModel):
    """A Kubernetes cluster with the operators of Spark (v1beta2) and of PyTorch (v1)."""

    scheduler: Literal["kubernetes"]
    """Always `kubernetes`."""
    image: str = Field(min_length=1)
    """The container image: Python, the repository, and its extras `spark` and `train`."""
    home: AbsolutePath
    """The folder of the repository in the image."""
    namespace: DnsLabel
    """The namespace of all objects."""
    service_account: DnsLabel
    """The account of all pods; that of Spark drivers has to create pods."""
    secrets: tuple[DnsLabel, ...] = ()
    """Secrets whose keys become environment variables of all containers."""
    volume: Volume | None = None
    """A volume for raw logs and lake, where they are not in an object store."""
    spark: SparkOnKubernetes
    """Spark steps."""
    training: Training
    """The training of GEM."""
    other: Resources
    """All other steps."""


class SlurmCluster(StrictModel):
    """A Slurm cluster whose nodes see the same folders."""

    scheduler: Literal["slurm"]
    """Always `slurm`."""
    python: AbsolutePath
    """Python of an environment with the extras `spark` and `train`."""
    home: AbsolutePath
    """The folder of the repository."""
    logs: AbsolutePath
    """The folder of the jobs' output; it must exist."""
    partition: SlurmName | None = None
    """The partition; by default the cluster's."""
    account: SlurmName | None = None
    """The account that is charged."""
    time_limit_hours: int = Field(default=12, ge=1)
    """A job that takes longer is ended."""
    spark_master: str | None = Field(default=None, pattern=r"^spark://")
    """A standalone Spark cluster; by default a Spark step uses the cores of its own node."""
    spark: Resources
    """Spark steps; with `spark_master` their driver."""
    training: Training
    """The training of GEM."""
    other: Resources
    """All other steps."""


Cluster = KubernetesCluster | SlurmCluster
_ADAPTER: TypeAdapter[Cluster] = TypeAdapter(Annotated[Cluster, Field(discriminator="scheduler")])


def load_cluster(path: Path) -> Cluster:
    """Read a cluster's configuration; UserError names the file and the faulty keys."""
    try:
        return _ADAPTER.validate_python(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    except ValidationError as error:
        raise UserError(f"{path}: {format_validation_error(error)}") from None
