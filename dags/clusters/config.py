"""The configuration of a cluster: its scheduler, and the resources of each kind of step."""

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from dags.steps import PipelinePaths, Step
from etl.cli.runner import format_validation_error, read_yaml_mapping
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.base import StrictModel
from etl.tables.uri import is_url

AbsolutePath = Annotated[str, Field(pattern=r"^/[-A-Za-z0-9_./+@]*$")]
# A label, and a subdomain of DNS (RFC 1123), as Kubernetes wants names.
DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
DnsSubdomain = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$")]
# A name that Slurm reads as one word.
SlurmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]*$")]
LabelKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./]*$")]
SbatchOption = Annotated[str, Field(pattern=r"^[a-z][-a-z]*$")]
SbatchValue = Annotated[str, Field(pattern=r"^[-A-Za-z0-9_.,:/+&|*()=@%]+$")]
StepKind = Literal["spark", "training", "other"]
# Options of sbatch that have keys of their own, or on which scripts rely.
OWN_OPTIONS = frozenset(
    (
        *("job-name", "output", "time", "nodes", "ntasks-per-node", "cpus-per-task", "mem"),
        *("gpus-per-node", "partition", "account", "requeue", "no-requeue", "open-mode"),
        *("dependency", "array", "wrap"),
    )
)


def step_kind(step: Step) -> StepKind:
    """Whose resources a step takes."""
    if step.is_distributed:
        return "training"
    return "spark" if step.engine == "spark" else "other"


class Resources(StrictModel):
    """Resources of one process or node."""

    cpus: int = Field(ge=1)
    """CPU cores."""
    memory_gb: int = Field(ge=2)
    """Memory in GiB."""

    @property
    def threads_per_process(self) -> int:
        """The threads of each process."""
        return self.cpus


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
    """Further Spark properties, such as those of conf/spark/s3."""


class Training(Resources):
    """Resources of each node that trains GEM, and how many nodes there are."""

    nodes: int = Field(default=1, ge=1)
    """Nodes."""
    processes_per_node: int = Field(default=1, ge=1)
    """Training processes of a node."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of a node: none, or one for each of its processes."""

    @model_validator(mode="after")
    def _check_gpus(self) -> "Training":
        if self.gpus not in (0, self.processes_per_node):
            raise ValueError(
                f"{self.gpus} gpus for {self.processes_per_node} processes_per_node: each process "
                "takes one GPU, so both must be equal"
            )
        return self

    @property
    def threads_per_process(self) -> int:
        """The threads of each of a node's processes."""
        return max(1, self.cpus // self.processes_per_node)

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

    claim: DnsSubdomain
    """The claim; several nodes must be able to write to it."""
    path: AbsolutePath
    """Where it is mounted."""


class Toleration(StrictModel):
    """A taint of nodes on which pods may run."""

    key: LabelKey | None = None
    """The key of the taint; with `operator: Exists` it may be left out, for all taints."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the taint has the `value`, or any."""
    value: str | None = None
    """The value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect that is tolerated; by default all."""

    @model_validator(mode="after")
    def _check_operator(self) -> "Toleration":
        if self.operator == "Equal" and (self.key is None or self.value is None):
            raise ValueError("operator Equal needs a key and a value; Exists needs no value")
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists takes no value")
        return self


class Placement(StrictModel):
    """On which nodes of Kubernetes pods run."""

    node_selector: dict[LabelKey, str] = {}
    """Labels of the nodes."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that are tolerated, such as that of nodes with GPUs."""


class Cluster(StrictModel):
    """What clusters have in common."""

    home: AbsolutePath
    """The folder of the repository: on all nodes, or in the image."""
    training: Training
    """The training of GEM."""
    other: Resources
    """Steps other than Spark's and the training of GEM."""

    def check_run(self, spec: DataSpec, paths: PipelinePaths) -> None:
        """Raise UserError if the cluster cannot run a pipeline of a spec on some paths."""
        processes = self.training.nodes * self.training.processes_per_node
        if processes > spec.buckets:
            raise UserError(
                f"training on {processes} processes: spec {spec.name} has {spec.buckets} buckets, "
                "and each process reads separate ones; lower nodes or processes_per_node"
            )
        for flag, path in (("--raw", paths.raw), ("--lake", paths.lake)):
            if not is_url(path) and not self.is_shared(PurePosixPath(path)):
                raise UserError(f"{flag} {path}: {self.shared_paths_hint}")

    @property
    def shared_paths_hint(self) -> str:
        """Which paths all nodes see."""
        return "write a URL, or an absolute path that all nodes see"

    def is_shared(self, path: PurePosixPath) -> bool:
        """Whether all nodes see a path."""
        return path.is_absolute()


class KubernetesCluster(Cluster):
    """A Kubernetes cluster with the operators of Spark (v1beta2) and of PyTorch (v1)."""

    scheduler: Literal["kubernetes"]
    """Always `kubernetes`."""
    image: str = Field(pattern=r"^\S+$")
    """The container image: Spark's own, with the repository and its extras installed."""
    namespace: DnsLabel
    """The namespace of all objects."""
    service_account: DnsSubdomain
    """The account of all pods; that of Spark drivers has to create pods."""
    secrets: tuple[DnsSubdomain, ...] = ()
    """Secrets whose keys become environment variables of all containers."""
    image_pull_secrets: tuple[DnsSubdomain, ...] = ()
    """Secrets with which the image is pulled."""
    placement: dict[StepKind, Placement] = {}
    """On which nodes steps run, by their kind; by default on any."""
    volume: Volume | None = None
    """A volume for raw logs and lake, where they are not in an object store."""
    spark: SparkOnKubernetes
    """Spark steps."""

    @property
    def shared_paths_hint(self) -> str:
        """Which paths all pods see."""
        return "write a URL, or a path below that of the cluster's `volume`"

    def is_shared(self, path: PurePosixPath) -> bool:
        """Whether all pods see a path."""
        return self.volume is not None and path.is_relative_to(self.volume.path)


class SlurmCluster(Cluster):
    """A Slurm cluster whose nodes see the same folders."""

    scheduler: Literal["slurm"]
    """Always `slurm`."""
    python: AbsolutePath
    """Python of an environment with the extras `spark`, `train` and `serve`."""
    logs: AbsolutePath
    """The folder of the jobs' output; it must exist."""
    partition: SlurmName | None = None
    """The partition; by default the cluster's."""
    account: SlurmName | None = None
    """The account that is charged."""
    time_limit_hours: int = Field(default=12, ge=1)
    """A job that takes longer is ended."""
    spark_master: str | None = Field(default=None, pattern=r"^spark://\S+$")
    """A standalone Spark cluster; by default a Spark step uses the cores of its own node."""
    spark: Resources
    """Spark steps; with `spark_master` their driver."""
    options: dict[StepKind, dict[SbatchOption, SbatchValue]] = {}
    """Further options of sbatch by kind of step, such as `{training: {constraint: h100}}`."""

    @field_validator("options")
    @classmethod
    def _check_options(
        cls, options: dict[StepKind, dict[str, str]]
    ) -> dict[StepKind, dict[str, str]]:
        reserved = sorted({name for of_kind in options.values() for name in of_kind} & OWN_OPTIONS)
        if reserved:
            raise ValueError(f"{reserved[0]} is set by other keys: leave it out")
        return options


SCHEDULERS: dict[str, type[KubernetesCluster | SlurmCluster]] = {
    "kubernetes": KubernetesCluster,
    "slurm": SlurmCluster,
}


def load_cluster(file: Path) -> KubernetesCluster | SlurmCluster:
    """Read a cluster's configuration; UserError names the file and the faulty keys."""
    content = read_yaml_mapping(file)
    scheduler = content.get("scheduler")
    if scheduler not in SCHEDULERS:
        raise UserError(f"{file}: scheduler is {scheduler!r}; known: {', '.join(SCHEDULERS)}")
    try:
        return SCHEDULERS[scheduler].model_validate(content)
    except ValidationError as error:
        raise UserError(f"{file}: {format_validation_error(error)}") from None
