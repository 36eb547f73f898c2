"""Kubernetes manifests and Slurm scripts run each step as it was declared, after what it reads."""

import re
import shutil
import stat
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow.training import ApiClient
from kubeflow_spark_api.models.spark_v1beta2_spark_application import SparkV1beta2SparkApplication
from pydantic import ValidationError

from dags.clusters import load_cluster, render_files
from dags.clusters.config import KubernetesCluster, SlurmCluster, step_kind
from dags.clusters.kubernetes import SPARK_VERSION
from dags.clusters.slurm import step_script
from dags.pipeline import latest_mature_split, pipeline_steps
from dags.steps import PipelinePaths, Step, earlier_steps
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.units import parse_date_range
from gemline import main
from tests.conftest import ROOT

SPEC = ROOT / "conf/specs/simulator.yaml"
DAYS = "2026-01-01:2026-01-11"
LAST_DAY = date(2026, 1, 11)
KUBERNETES_VERSION = "1.34"
OBJECT_STORE = PipelinePaths(SPEC, "s3://logs/raw", "s3://lake")
SHARED_FOLDER = PipelinePaths(SPEC, "/shared/raw", "/shared/lake")


def all_steps(paths: PipelinePaths = OBJECT_STORE) -> list[Step]:
    spec = load_spec(SPEC)
    return pipeline_steps(spec, paths, latest_mature_split(spec, *parse_date_range(DAYS)))


def files_of(
    cluster: KubernetesCluster | SlurmCluster, paths: PipelinePaths = OBJECT_STORE
) -> Mapping[str, str]:
    return render_files(cluster, load_spec(SPEC), paths, all_steps(paths), LAST_DAY)


def manifests_of(
    cluster: KubernetesCluster, paths: PipelinePaths = OBJECT_STORE
) -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in files_of(cluster, paths).values()]


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
    {"training": {"nodes": 1, "cpus": 4, "memory_gb": 8, "gpus": 2, "processes_per_node": 2}},
    {"image_pull_secrets": ("registry",)},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_manifests_are_valid_and_name_each_step_once(changes: dict[str, Any]) -> None:
    cluster = kubernetes(**changes)
    paths = PipelinePaths(SPEC, "/data/raw", "/data/lake") if cluster.volume else OBJECT_STORE
    manifests = manifests_of(cluster, paths)
    for manifest in manifests:
        assert_valid(manifest)
        name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?", name)
        for value in labels.values():
            assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)
    names = [manifest["metadata"]["name"] for manifest in manifests]
    assert len(set(names)) == len(names)
    written = {manifest["metadata"]["annotations"]["gemline/step"] for manifest in manifests}
    machine_local = set() if cluster.volume else {"feature_store"}
    assert written == {step.name for step in all_steps()} - machine_local


def pods_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What has the fields of a pod that name nodes."""
    spec = manifest["spec"]
    if manifest["kind"] == "SparkApplication":
        return [spec["driver"], spec["executor"]]
    if manifest["kind"] == "PyTorchJob":
        return [replica["template"]["spec"] for replica in spec["pytorchReplicaSpecs"].values()]
    return [spec["template"]["spec"]]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", ["spark", "training", "other"])
def test_each_kind_of_step_runs_on_its_nodes(kind: str, nodes: int) -> None:
    selector = {"cloud.example.com/pool": "large"}
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    placement = {kind: {"node_selector": selector, "tolerations": [taint]}}
    training = kubernetes().training.model_dump() | {"nodes": nodes}
    manifests = manifests_of(kubernetes(placement=placement, training=training))
    steps = {step.name: step for step in all_steps()}
    placed = 0
    for manifest in manifests:
        assert_valid(manifest)
        is_placed = step_kind(steps[manifest["metadata"]["annotations"]["gemline/step"]]) == kind
        placed += is_placed
        for pod in pods_of(manifest):
            assert pod.get("nodeSelector") == (selector if is_placed else None)
            assert pod.get("tolerations") == ([taint] if is_placed else None)
    assert placed


def test_options_of_sbatch_are_those_of_the_kind_of_step() -> None:
    cluster = slurm(options={"training": {"constraint": "a100&nvlink", "qos": "high"}})
    for step in all_steps(SHARED_FOLDER):
        lines = step_script(cluster, step).splitlines()
        expected = {"#SBATCH --constraint=a100&nvlink", "#SBATCH --qos=high"}
        assert set(lines) & expected == (expected if step.is_distributed else set())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"options": {"training": {"nodes": "4"}}}, "nodes is set by other keys"),
        ({"options": {"spark": {"comment": "a\n#SBATCH --uid=0"}}}, "options.spark.comment"),
        ({"options": {"gpu": {"qos": "high"}}}, "options.gpu"),
        ({"placement": {"spark": {"tolerations": [{"key": "gpu"}]}}}, "needs a key and a value"),
        (
            {"placement": {"spark": {"tolerations": [{"operator": "Exists", "value": "x"}]}}},
            "Exists takes no value",
        ),
    ],
)
def test_placements_and_options_that_schedulers_would_refuse_are_refused(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected):
        slurm(**changes) if "options" in changes else kubernetes(**changes)


def test_objects_of_other_lakes_have_other_names() -> None:
    other = PipelinePaths(SPEC, "s3://logs/raw", "s3://other")
    names = [
        {manifest["metadata"]["name"] for manifest in manifests_of(kubernetes(), paths)}
        for paths in (OBJECT_STORE, OBJECT_STORE, other)
    ]
    assert names[0] == names[1] and not names[0] & names[2]


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
    manifest = next(m for m in manifests_of(kubernetes()) if m["kind"] == kind)
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
    steps = [step for step in all_steps() if step.name != "feature_store"]
    manifests = manifests_of(kubernetes())
    name_of = {
        m["metadata"]["annotations"]["gemline/step"]: m["metadata"]["name"] for m in manifests
    }
    for step, manifest in zip(steps, manifests, strict=True):
        assert tuple(command_of(manifest)) == step.command
        after = manifest["metadata"]["annotations"]["gemline/after"].split()
        assert after == [name_of[name] for name in earlier_steps(step, steps)]


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
        # srun's own options come before the program.
        is_launcher = name == "srun"
        body = (
            'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
            if is_launcher
            else f'echo "$@" >> {folder}/scontrol_calls'
        )
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


@pytest.mark.parametrize("master", [None, "spark://host:7077"])
@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [(0, 0, False), (2, 0, False), (75, 2, True), (75, 3, False)],
)
def test_only_temporary_failures_are_requeued(
    tmp_path: Path, code: int, restarts: int, is_requeued: bool, master: str | None
) -> None:
    """Also those of the download of JARs, which comes before spark-submit."""
    program = python_that_records(tmp_path, code)
    shutil.copy(program, program.with_name("spark-submit"))
    cluster = slurm(python=str(program), home=str(tmp_path), spark_master=master)
    script = step_script(cluster, all_steps()[0])
    assert run_script(script, tmp_path, SLURM_RESTART_COUNT=str(restarts)) == code
    assert (tmp_path / "scontrol_calls").exists() == is_requeued


def test_the_submit_script_submits_each_step_after_those_it_depends_on(tmp_path: Path) -> None:
    """sbatch is a stand-in that numbers its calls; a dependency is a number before."""
    steps = all_steps(SHARED_FOLDER)
    for name, text in files_of(slurm(logs=str(tmp_path)), SHARED_FOLDER).items():
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
        ("", "scheduler is None; known: kubernetes, slurm"),
        ("[", "is not YAML"),
        (None, "not found"),
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


def manifests_command(cluster: str, out: Path, *flags: str) -> list[str]:
    return [
        *("manifests", "--spec", str(SPEC), "--raw", "s3://logs", "--lake", "s3://lake"),
        *("--days", DAYS, "--cluster", str(ROOT / "conf/clusters" / cluster), "--out", str(out)),
        *flags,
    ]


@pytest.mark.parametrize(
    ("cluster", "flags", "expected"),
    [
        ("kubernetes.yaml", ("--raw", "/logs"), "--raw /logs: write a URL, or a path below"),
        ("slurm.yaml", ("--lake", "lake"), "--lake lake: write a URL, or an absolute path"),
        ("slurm.yaml", ("--pins", "{events: 3}"), "--pins: "),
        ("slurm.yaml", ("--out", "/dev/null/jobs"), "cannot be written: Not a directory"),
    ],
)
def test_a_run_that_a_cluster_cannot_do_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cluster: str,
    flags: tuple[str, ...],
    expected: str,
) -> None:
    assert main(manifests_command(cluster, tmp_path / "out", *flags)) == 2
    assert expected in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"nodes": 3, "processes_per_node": 2}, "6 processes: spec simulator has 4 buckets"),
        ({"processes_per_node": 2, "gpus": 1}, "both must be equal"),
    ],
)
def test_training_that_cannot_use_all_processes_is_refused(
    training: dict[str, int], expected: str
) -> None:
    with pytest.raises((UserError, ValidationError), match=expected):
        files_of(slurm(training={"cpus": 2, "memory_gb": 4} | training))


def test_spark_on_a_standalone_cluster_uses_the_python_of_the_cluster(tmp_path: Path) -> None:
    """spark-submit, beside Python, gets the JARs that Python prints, and the step's words."""
    program = python_that_records(tmp_path)
    program.write_text("#!/bin/sh\necho a.jar,b.jar\n")
    submit = tmp_path / "spark-submit"
    submit.write_text(f'#!/bin/sh\necho "$PYSPARK_PYTHON" "$@" > {tmp_path}/words\n')
    submit.chmod(0o755)
    cluster = slurm(python=str(program), home=str(tmp_path), spark_master="spark://host:7077")
    step = all_steps()[0]
    assert run_script(step_script(cluster, step), tmp_path) == 0
    words = (tmp_path / "words").read_text().split()
    assert words[0] == str(program) and words[1:3] == ["--master", "spark://host:7077"]
    assert words[words.index("--jars") + 1 :] == ["a.jar,b.jar", "gemline.py", *step.command]
    program.write_text("#!/bin/sh\nexit 2\n")
    assert run_script(step_script(cluster, step), tmp_path) == 2


def test_files_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = manifests_command("slurm.yaml", out)
    assert main(words) == 0
    before = sorted(path.name for path in out.iterdir())
    assert main(words) == 2 and "exists" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == before
