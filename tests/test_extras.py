"""Each extra is enough for its part: nothing that only another one brings is imported."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT, SPEC

ENGINES = {"pyspark", "delta", "pandas"}
TRAINING = {"torchrec", "fbgemm_gpu", "torchmetrics", "mlflow", "lightgbm", "tensordict"}
PAGES = {"jinja2", "matplotlib"}
TABLES = {"numpy", "pyarrow", "deltalake"}
LEARNED = {"torch", "sklearn", "safetensors"}
ALONE = {
    "spark": (
        LEARNED | TRAINING | PAGES | {"airflow"},
        "etl.ingest etl.attributes etl.labels features.items features.history.build "
        "features.examples etl.doctor",
    ),
    "train": (
        {"pyspark", "delta", "airflow"},
        "training.gem training.baseline training.evaluate training.knowledge.write ranking.train "
        "ranking.report.build",
    ),
    "serve": (
        ENGINES | TRAINING | PAGES | {"airflow", "torch", "sklearn"},
        "ranking.package.ranker ranking.explain ranking.serve.app ranking.online.build",
    ),
    "airflow": (ENGINES | TRAINING | LEARNED | TABLES, "dags.daily"),
    "none of them": (
        ENGINES | TRAINING | LEARNED | TABLES | PAGES | {"airflow"},
        "gemline dags.commands etl.commands features.commands training.commands ranking.commands",
    ),
}
CODE = """
import importlib, os, sys
absent, modules = set(sys.argv[1].split()), sys.argv[2].split()
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} comes with another extra")
sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
"""


@pytest.mark.parametrize("extra", ALONE)
def test_an_extra_is_enough_for_its_part(extra: str) -> None:
    absent, modules = ALONE[extra]
    done = subprocess.run(
        [sys.executable, "-c", CODE, " ".join(absent), modules],
        cwd=ROOT, capture_output=True, text=True, env={
            "PATH": "/usr/bin:/bin", "GEMLINE_SPEC": str(SPEC), "GEMLINE_RAW": "raw",
            "GEMLINE_LAKE": "lake", "GEMLINE_FIRST_DAY": "2026-01-01",
            "AIRFLOW_HOME": "/nonexistent",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
