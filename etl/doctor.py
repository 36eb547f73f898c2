"""What this machine has, and what it lacks with its fix."""

import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etl.errors import UserError
from etl.jars import jar_folder, jar_names
from etl.java import FIX, java_version

PACKAGES = {
    "spark": ("pyspark", "delta-spark", "deltalake", "pyarrow", "pandas"),
    "train": (
        "torch",
        "torchrec",
        "fbgemm-gpu-cpu",
        "fbgemm-gpu",
        "mlflow",
        "lightgbm",
        "jinja2",
        "matplotlib",
    ),
    "serve": ("safetensors", "scikit-learn"),
    "airflow": ("apache-airflow", "apache-airflow-providers-apache-spark"),
}
EITHER = {"fbgemm-gpu-cpu": "fbgemm-gpu", "fbgemm-gpu": "fbgemm-gpu-cpu"}


def examine() -> None:
    """Print a table of what was found; raises UserError if something is missing."""
    table = Table("what", "found", "fix", title="gemline doctor")
    missing = []
    for what, found, fix in [*machine(), *packages()]:
        table.add_row(what, found or "[red]missing[/red]", "" if found else fix)
        if not found:
            missing.append(what)
    Console().print(table)
    if missing:
        raise UserError(f"missing: {', '.join(missing)}; the table above tells the fixes")


def machine() -> list[tuple[str, str, str]]:
    """Python, Java, JARs, disk, and the GPU, which is optional."""
    python = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    jars = [jar for jar in jar_names() if (jar_folder() / jar).is_file()]
    return [
        (
            "Python 3.11 to 3.13",
            python if fits else "",
            f"this is {python}; make PYTHON=python3.12",
        ),
        ("Java 17", java_version(), FIX),
        (
            "Delta JARs",
            str(jar_folder()) if len(jars) == len(jar_names()) else "",
            "fetched at the first Spark step; without a network put them into GEMLINE_JARS",
        ),
        ("free disk", f"{free:.0f} GB" if free > 1 else "", "free some space"),
        ("GPU", gpu() or "none, runs on the CPU", ""),
    ]


def packages() -> list[tuple[str, str, str]]:
    """Version of each package, by the extra that brings it."""
    rows = []
    for extra, names in PACKAGES.items():
        for name in names:
            found = _version(name)
            if not found and _version(EITHER.get(name, "")):
                continue
            rows.append((f"{extra}: {name}", found, f"pip install 'gemline[{extra}]'"))
    return rows


def _version(package: str) -> str:
    try:
        return metadata.version(package) if package else ""
    except metadata.PackageNotFoundError:
        return ""


def gpu() -> str:
    """Name of the first GPU, if its driver answers."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return ""
    return said.stdout.strip().splitlines()[0] if said.returncode == 0 and said.stdout else ""
