"""Kubernetes manifests and Slurm scripts run each step as it was declared, after what it reads."""

import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow.training import ApiClient
from kubeflow_spark_api.models.spark_v1beta2_spark_application import SparkV1beta2SparkApplication

from dags.clusters import load_cluster, render_files
from dags.clusters.config import KubernetesCluster, SlurmCluster
from dags.clusters.kubernetes import SPARK_VERSION
from dags.clusters.slurm import step_script
from dags.pipeline import latest_mature_split, pipeline_steps
from dags.steps import PipelinePaths, Step, earlier_steps
from etl.spec import load_spec
from etl.spec.units import parse_date_range
from gemline import main
from tests.conftest import ROOT

SPEC = ROOT / "conf/specs/simulator.yaml"
DAYS = "2026-01-01:2026-01-11"
RUN = "20260111"
KUBERNETES_VERSION = "1.34"
OBJECT_STORE = PipelinePaths(SPEC, "s3://logs/raw", "s3://lake")


def all_steps(paths: PipelinePaths = OBJECT_STORE) -> list[Step]:
    spec = load_spec(SPEC)
    return pipeline_steps(spec, paths, latest_mature_split(spec, *parse_date_range(DAYS)))


def kubernetes(**changes: Any) -> KubernetesCluster:
    cluster = load_cluster(ROOT / "conf/clusters/kubernetes.yaml")
    return KubernetesCluster.model_validate(cluster.model_dump() | changes)


def slurm(**changes: Any) -> SlurmCluster:
    cluster = load_cluster(ROOT / "conf/clusters/slurm.yaml")
    return SlurmCluster.model_validate(cluster.model_dump() | changes)


class _Response:
    """What the client of the training operator deserializes."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        import json

        self.data = json.dumps(manifest)


def assert_valid(manifest: dict[str, Any]) -> None:
    """No field is unknown to the API of its kind, and none has another type."""
    match manifest["kind"]:
        case "SparkApplication":
            model = SparkV1beta2SparkApplication.from_dict(manifest)
            assert model and model.to_dict() == manifest
        case "PyTorchJob":
            client = ApiClient()
            job = client.deserialize(_Response(manifest), "KubeflowOrgV1PyTorchJob")
            assert client.sanitize_for_serialization(job) == manifest
        case _:
            kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


VOLUME = {"claim": "ads", "path": "/data"}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"volume": VOLUME, "secrets": ()},
    {"training": {"nodes": 1, "cpus": 4, "memory_gb": 8, "gpus": 1, "processes_per_node": 2}},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_manifests_are_valid_and_name_each_step_once(changes: dict[str, Any]) -> None:
    cluster, steps = kubernetes(**changes), all_steps()
    files = render_files(cluster, steps, RUN)
    manifests = [yaml.safe_load(text) for text in files.values()]
    for manifest in manifests:
        assert_valid(manifest)
    names = [manifest["metadata"]["name"] for manifest in manifests]
    assert len(set(names)) == len(names)
    written = {manifest["metadata"]["labels"]["gemline/step"] for manifest in manifests}
    machine_local = set() if cluster.volume else {"feature_store"}
    assert written == {step.name for step in steps} - machine_local


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("SparkApplication", ("spec", "driver", "core"), 1),
        ("SparkApplication", ("spec", "mainFile"), "x"),
        ("PyTorchJob", ("spec", "pytorchReplicaSpecs", "Master", "template", "spec", "image"), "x"),
        ("Job", ("spec", "template", "spec", "image"), "x"),
    ],
)
def test_the_schemas_refuse_an_unknown_field(
    kind: str, path: tuple[str, ...], value: object
) -> None:
    """So that the test before can fail."""
    files = render_files(kubernetes(), all_steps(), RUN)
    manifest = next(m for m in map(yaml.safe_load, files.values()) if m["kind"] == kind)
    assert_valid(manifest)
    target = manifest
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
        assert_valid(manifest)


def command_of(manifest: dict[str, Any]) -> list[str]:
    """The words after `gemline` that a manifest runs."""
    spec = manifest["spec"]
    if manifest["kind"] == "SparkApplication":
        return list(spec["arguments"])
    if manifest["kind"] == "PyTorchJob":
        pods = [replica["template"]["spec"] for replica in spec["pytorchReplicaSpecs"].values()]
        assert all(pod["containers"] == pods[0]["containers"] for pod in pods)
    else:
        pods = [spec["template"]["spec"]]
    words = pods[0]["containers"][0]["command"]
    return list(words[words.index("gemline") + 1 :])


def test_manifests_run_the_declared_commands_after_what_they_read() -> None:
    steps = {step.name: step for step in all_steps()}
    manifests = [
        yaml.safe_load(text)
        for text in render_files(kubernetes(), list(steps.values()), RUN).values()
    ]
    step_of = {m["metadata"]["name"]: m["metadata"]["labels"]["gemline/step"] for m in manifests}
    for manifest in manifests:
        step = steps[step_of[manifest["metadata"]["name"]]]
        assert tuple(command_of(manifest)) == step.command
        after = manifest["metadata"]["annotations"]["gemline/after"].split()
        writers = {s.name for s in steps.values() if set(s.writes) & set(step.reads)}
        earlier = set(list(steps)[: list(steps).index(step.name)])
        assert (writers & earlier) - {"feature_store"} <= {step_of[name] for name in after}


TABLE_NAMES = st.sets(st.sampled_from("abcd"), max_size=3).map(tuple)


@settings(max_examples=100)
@given(st.lists(st.tuples(TABLE_NAMES, TABLE_NAMES), max_size=6))
def test_any_order_that_keeps_dependencies_gives_the_tables_of_one_after_another(
    declared: list[tuple[tuple[str, ...], tuple[str, ...]]],
) -> None:
    """A table is the name of its writer, and what that has read; steps run as late as possible."""
    steps = [
        Step(f"s{number}", "spark", (), reads, writes)
        for number, (reads, writes) in enumerate(declared)
    ]
    after = {step.name: earlier_steps(step, steps) for step in steps}
    latest_first: list[Step] = []
    while len(latest_first) < len(steps):
        finished = {step.name for step in latest_first}
        ready = [s for s in steps if s.name not in finished and set(after[s.name]) <= finished]
        latest_first.append(ready[-1])
    assert tables_after(latest_first) == tables_after(steps)


def tables_after(steps: list[Step]) -> dict[str, tuple[object, ...]]:
    tables: dict[str, tuple[object, ...]] = {}
    for step in steps:
        content = (step.name, *(tables.get(name) for name in step.reads))
        tables |= dict.fromkeys(step.writes, content)
    return tables


def python_that_records(folder: Path, exit_code: int = 0) -> Path:
    """A program in place of Python, which writes its arguments, one a line."""
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nfor word; do echo "$word"; done > {folder}/words\nexit {exit_code}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def run_script(script: str, folder: Path, **environment: str) -> int:
    """Run a batch script with stand-ins for the commands of Slurm."""
    for name in ("scontrol", "srun"):
        program = folder / name
        body = 'exec "$@"' if name == "srun" else f'echo "$@" >> {folder}/scontrol_calls'
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    env = {"PATH": path, "SLURM_JOB_ID": "7"} | environment
    return subprocess.run(["bash", "-c", script], env=env, check=False).returncode


ODD = PipelinePaths(Path("/specs/it's $(touch pwned).yaml"), "/raw logs", '/lake; exit 3 "x" `id`')


@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_scripts_pass_every_word_as_it_is(tmp_path: Path, nodes: int) -> None:
    """Also where a path has spaces, quotes and what a shell would run."""
    training = {"nodes": nodes, "processes_per_node": 3, "cpus": 4, "memory_gb": 8}
    program = python_that_records(tmp_path)
    cluster = slurm(python=str(program), home=str(tmp_path), training=training)
    for step in all_steps(ODD):
        assert run_script(step_script(cluster, step), tmp_path) == 0
        words = (tmp_path / "words").read_text().splitlines()
        command = list(step.command)
        if step.is_distributed and nodes == 1:
            command += ["--processes", "3"]
        assert words[-len(command) :] == command
        assert words[-len(command) - 2 : -len(command)] == ["-m", "gemline"]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [(0, 0, False), (2, 0, False), (75, 2, True), (75, 3, False)],
)
def test_only_temporary_failures_are_requeued(
    tmp_path: Path, code: int, restarts: int, is_requeued: bool
) -> None:
    program = python_that_records(tmp_path, code)
    cluster = slurm(python=str(program), home=str(tmp_path))
    script = step_script(cluster, all_steps()[0])
    assert run_script(script, tmp_path, SLURM_RESTART_COUNT=str(restarts)) == code
    assert (tmp_path / "scontrol_calls").exists() == is_requeued


def test_the_submit_script_submits_each_step_after_those_it_depends_on(tmp_path: Path) -> None:
    """sbatch is a stand-in that numbers its calls; a dependency is a number before."""
    steps = all_steps()
    for name, text in render_files(slurm(), steps, RUN).items():
        (tmp_path / name).write_text(text)
    calls = tmp_path / "calls"
    calls.touch()
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nwc -l < {calls} | tr -d " "\n')
    sbatch.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["bash", str(tmp_path / "submit.sh")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = calls.read_text().splitlines()
    number_of = {step.name: number for number, step in enumerate(steps, 1)}
    assert len(lines) == len(steps)
    for step, line in zip(steps, lines, strict=True):
        assert line.endswith(f"{number_of[step.name]:02d}-{step.name}.sh")
        found = re.search(r"afterok:([\d:]+)", line)
        after = set(map(int, found[1].split(":"))) if found else set()
        assert after == {number_of[name] for name in earlier_steps(step, steps)}


def test_the_version_of_spark_is_the_one_of_the_project() -> None:
    assert f'"pyspark=={SPARK_VERSION}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scheduler: nomad", "nomad"),
        ("scheduler: slurm\nhome: relative", "home"),
        ("scheduler: slurm\nlogs: /a b", "logs"),
        ("scheduler: kubernetes\nimages: x", "images"),
        ("[", "not valid YAML"),
        (None, "No such file"),
    ],
)
def test_a_wrong_cluster_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, expected: str
) -> None:
    cluster, out = tmp_path / "cluster.yaml", tmp_path / "out"
    if text is not None:
        cluster.write_text(text)
    words = ["manifests", "--spec", str(SPEC), "--raw", "raw", "--lake", "lake", "--days", DAYS]
    assert main([*words, "--cluster", str(cluster), "--out", str(out)]) == 2
    assert expected in capsys.readouterr().err and not out.exists()


def test_files_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = [
        "manifests",
        "--spec",
        str(SPEC),
        "--raw",
        "s3://r",
        "--lake",
        "s3://l",
        "--days",
        DAYS,
    ]
    words += ["--cluster", str(ROOT / "conf/clusters/slurm.yaml"), "--out", str(out)]
    assert main(words) == 0
    before = sorted(path.name for path in out.iterdir())
    assert main(words) == 2 and "exists" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == before
