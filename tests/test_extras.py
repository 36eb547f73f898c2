"""Each extra is enough for its modules: they import no package of another extra."""

import subprocess
import sys
import tomllib

import pytest
from setuptools import find_packages

from benchmarks.commands import benchmarks_of_the_repository
from tests.conftest import ROOT, SPEC

ENGINES = {"pyspark", "delta", "pandas"}
TRAINING = {"torchrec", "fbgemm_gpu", "torchmetrics", "mlflow", "lightgbm", "tensordict"}
REPORT = {"jinja2", "matplotlib"}
TABLES = {"numpy", "pyarrow", "deltalake"}
MODELS = {"torch", "sklearn", "safetensors"}
SERVICE = {"lmdb", "fastapi", "uvicorn", "prometheus_client", "duckdb", "datasketches"}
# Extra -> packages that are missing, and modules that must import without them.
WITHOUT = {
    "spark": (
        MODELS | TRAINING | REPORT | SERVICE | {"airflow"},
        "etl.ingest.run etl.attributes etl.labels etl.runtime.doctor features.items "
        "features.history.build features.examples features.roi.campaign_days",
    ),
    "train": (
        SERVICE | {"pyspark", "delta", "airflow"},
        "training.trainer.trainer training.baseline training.teacher.outputs "
        "ranking.trainer ranking.report.build",
    ),
    "serve": (
        ENGINES | TRAINING | REPORT | {"airflow", "torch", "sklearn"},
        "ranking.registry.ranker ranking.explain ranking.serving.app "
        "ranking.feature_store.materialize",
    ),
    "airflow": (ENGINES | TRAINING | MODELS | TABLES, "dags.orchestration.daily"),
    "none of them": (
        ENGINES | TRAINING | MODELS | TABLES | REPORT | SERVICE | {"airflow", "xxhash"},
        "gemline dags.commands etl.commands features.commands training.commands ranking.commands "
        "benchmarks.commands",
    ),
}
IMPORT_MODULES = """
import importlib, os, sys
missing, modules = set(sys.argv[1].split()), sys.argv[2].split()
class MissingPackages:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"{name} comes with another extra")
sys.meta_path.insert(0, MissingPackages())
for module in modules:
    importlib.import_module(module)
"""


@pytest.mark.parametrize("extra", WITHOUT)
def test_an_extra_is_enough_for_its_modules(extra: str) -> None:
    missing, modules = WITHOUT[extra]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_MODULES, " ".join(missing), modules],
        cwd=ROOT, capture_output=True, text=True, check=False, env={
            "PATH": "/usr/bin:/bin", "GEMLINE_SPEC": str(SPEC), "GEMLINE_RAW": "raw",
            "GEMLINE_LAKE": "lake", "GEMLINE_FIRST_DAY": "2026-01-01",
            "AIRFLOW_HOME": "/nonexistent",
        },
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_the_wheel_has_benchmarks_on_user_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = find_packages(str(ROOT), **project["tool"]["setuptools"]["packages"]["find"])
    assert {"etl", "ranking.serving", "benchmarks.public"} <= set(packages)
    assert not [p for p in packages if p.startswith(("tests", "benchmarks.studies"))]
    assert benchmarks_of_the_repository()
    monkeypatch.setitem(sys.modules, "benchmarks.studies", None)
    assert not benchmarks_of_the_repository()
