"""A Slurm cluster on this machine: a controller, and a process for each of two nodes."""

import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = ("node-1", "node-2")
START_TIMEOUT_SECONDS = 60
CONFIGURATION = """
ClusterName=proof
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
MinJobAge=86400
NodeName=DEFAULT CPUs=1 RealMemory=4096
NodeName=node-[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}]
PartitionName=batch Nodes=ALL Default=YES State=UP
"""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of two nodes with one core each; yields the environment of its commands."""
    for name in ("state", *NODES):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=socket.gethostname(),
            user=getpass.getuser(),
            folder=folder,
            ports=_free_ports(3),
        ).lstrip()
    )
    env = os.environ | {"SLURM_CONF": str(configuration)}
    commands = (["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES))
    running = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"process-{number}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        command, env=env, stdout=log, stderr=log, start_new_session=True
                    )
                )
        _wait_for_nodes(env)
        yield env
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=env, check=True)
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def job_states(env: dict[str, str]) -> dict[str, str]:
    """The state of each job, such as COMPLETED, by its name."""
    jobs = subprocess.run(
        ["scontrol", "show", "jobs", "--oneliner"], env=env, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    states = {}
    for line in filter(None, jobs.splitlines()):
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        states[fields["JobName"]] = fields["JobState"]
    return states


def _wait_for_nodes(env: dict[str, str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    states: list[str] = []
    while time.monotonic() < deadline:
        sinfo = ["sinfo", "--noheader", "--Node", "--format=%T"]
        run = subprocess.run(sinfo, env=env, capture_output=True, text=True, check=False)
        states = run.stdout.split()
        if states == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    raise AssertionError(f"nodes: {states}")


def _free_ports(count: int) -> list[int]:
    """Ports that no process listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
