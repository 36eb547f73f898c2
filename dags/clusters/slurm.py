"""Batch scripts for Slurm: one for each step, and one that submits them with their dependencies.

A refusal (exit code 2) fails a job, and the jobs that depend on it are cancelled. After a temporary
failure (75) a job is requeued up to three times.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from dags.clusters.config import Resources, SlurmCluster, Training, step_kind
from dags.steps import Step, earlier_steps
from etl.errors import TemporaryError

MAX_RETRIES = 3
# Of the job's own, because jobs with the same first node would meet on a common one.
RENDEZVOUS_PORT = "$((20000 + SLURM_JOB_ID % 10000))"
SUBMIT_SCRIPT = "submit.sh"


def slurm_scripts(cluster: SlurmCluster, steps: Sequence[Step]) -> Mapping[str, str]:
    """The scripts by file name; `submit.sh` submits all others."""
    names = {step.name: f"{number:02d}-{step.name}.sh" for number, step in enumerate(steps, 1)}
    scripts = {names[step.name]: step_script(cluster, step) for step in steps}
    return scripts | {SUBMIT_SCRIPT: _submit_script(steps, names, cluster.logs)}


def step_script(cluster: SlurmCluster, step: Step) -> str:
    """The batch script of a step."""
    directives = _directives(cluster, step)
    is_temporary = f"[ $code -eq {TemporaryError.exit_code} ]"
    may_retry = f"[ ${{SLURM_RESTART_COUNT:-0}} -lt {MAX_RETRIES} ]"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in directives.items()),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",  # a requeued job keeps the output of the first attempt
        f"cd {shlex.quote(cluster.home)} || exit 1",
        *_environment(cluster, step),
        f"{_command_line(cluster, step)} && exit 0",
        "code=$?",
        f"if {is_temporary} && {may_retry}; then",
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _directives(cluster: SlurmCluster, step: Step) -> dict[str, object]:
    """The options of sbatch."""
    resources = _resources(cluster, step)
    directives: dict[str, object] = {
        "job-name": f"gemline-{step.name}",
        "output": f"{cluster.logs}/%j-{step.name}.log",
        "time": f"{cluster.time_limit_hours}:00:00",
        "nodes": resources.nodes if isinstance(resources, Training) else 1,
        "ntasks-per-node": 1,
        "cpus-per-task": resources.cpus,
        "mem": f"{resources.memory_gb}G",
    }
    if isinstance(resources, Training) and resources.gpus:
        directives["gpus-per-node"] = resources.gpus
    if cluster.partition:
        directives["partition"] = cluster.partition
    if cluster.account:
        directives["account"] = cluster.account
    return directives | dict(cluster.options.get(step_kind(step), {}))


def _resources(cluster: SlurmCluster, step: Step) -> Resources:
    kinds = {"spark": cluster.spark, "training": cluster.training, "other": cluster.other}
    return kinds[step_kind(step)]


def _environment(cluster: SlurmCluster, step: Step) -> list[str]:
    """Variables of a step: the threads of torch, or the cores and memory of Spark on one node."""
    resources = _resources(cluster, step)
    if step.engine == "torch":
        return [f"export OMP_NUM_THREADS={resources.threads_per_process}"]
    if cluster.spark_master:
        python = shlex.quote(cluster.python)
        return [f"export PYSPARK_PYTHON={python}"]
    return [
        f"export GEMLINE_SPARK_MASTER='local[{resources.cpus}]'",
        f"export GEMLINE_SPARK_MEMORY={max(1, resources.memory_gb * 3 // 4)}g",
    ]


def _command_line(cluster: SlurmCluster, step: Step) -> str:
    """The command of a step: by torchrun on all nodes, by spark-submit, or Python alone."""
    if cluster.training.takes_several_nodes(step):
        return _torchrun(cluster, step)
    if step.engine == "spark" and cluster.spark_master:
        submit = str(PurePosixPath(cluster.python).with_name("spark-submit"))
        memory = f"{max(1, cluster.spark.memory_gb * 3 // 4)}g"
        options = (submit, "--master", cluster.spark_master, "--driver-memory", memory)
        words = shlex.join(("gemline.py", *step.command))
        jars = f"jars=$({shlex.join((cluster.python, '-m', 'gemline', 'etl', 'jars'))})"
        return f'{jars} && {shlex.join(options)} --jars "$jars" {words}'
    return shlex.join(
        (cluster.python, "-m", "gemline", *cluster.training.single_node_command(step))
    )


def _torchrun(cluster: SlurmCluster, step: Step) -> str:
    """One torchrun on each node; they meet on the first one, on which the script runs.

    A restart uses a new store: the old one holds addresses of processes that are gone.
    """
    launch = (
        cluster.python, "-m", "torch.distributed.run",
        f"--nnodes={cluster.training.nodes}",
        f"--nproc-per-node={cluster.training.processes_per_node}",
        f"--max-restarts={MAX_RETRIES}",
        "--rdzv-backend=c10d",
    )  # fmt: skip
    meeting = f'--rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$(hostname):{RENDEZVOUS_PORT}"'
    srun = f"srun --cpus-per-task={cluster.training.cpus} --kill-on-bad-exit=1"
    words = shlex.join(("-m", "gemline", *step.command))
    return f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {srun} {shlex.join(launch)} {meeting} {words}"


def _submit_script(steps: Sequence[Step], names: Mapping[str, str], logs: str) -> str:
    """Submits each step after those that it depends on, and prints the ids of the jobs.

    If one is refused, those that were submitted before are cancelled.
    """
    variables = {step.name: f"job_{number:02d}" for number, step in enumerate(steps, 1)}
    folder = shlex.quote(logs)
    lines = [
        "#!/bin/bash",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        f"[ -d {folder} ] || {{ echo {folder} is not a folder >&2; exit 2; }}",
        "submitted=()",
        "trap '[ $? -eq 0 ] || [ ${#submitted[@]} -eq 0 ] || scancel \"${submitted[@]}\"' EXIT",
    ]
    for step in steps:
        earlier = "".join(f":${variables[name]}" for name in earlier_steps(step, steps))
        options = f"--dependency=afterok{earlier} --kill-on-invalid-dep=yes " if earlier else ""
        script, variable = shlex.quote(names[step.name]), variables[step.name]
        lines += [
            f"{variable}=$(sbatch --parsable {options}{script})",
            f"{variable}=${{{variable}%%;*}}",  # without the name of the cluster
            f"submitted+=(${variable})",
            f"echo {shlex.quote(step.name)} ${variable}",
        ]
    return "\n".join(lines) + "\n"
