"""`gemline doctor`: what is installed on this machine, and how to install what is missing."""

import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etl.errors import UserError
from etl.runtime.java import JAVA_INSTALL_HINT, jar_folder, jar_names, java_version

EXTRA_PACKAGES = {
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
    "serve": ("safetensors", "onnxruntime", "lmdb", "fastapi", "uvicorn", "duckdb", "datasketches"),
    "airflow": ("apache-airflow", "apache-airflow-providers-apache-spark"),
}
ALTERNATIVE_PACKAGES = {"fbgemm-gpu-cpu": "fbgemm-gpu", "fbgemm-gpu": "fbgemm-gpu-cpu"}


Check = tuple[str, str, str]  # component, what was found (empty: missing), fix


def check_installation() -> None:
    """Print a table of all checks; raises UserError if one fails."""
    table = Table("component", "found", "fix", title="gemline doctor")
    missing = []
    for component, found, fix in [*machine_checks(), *package_checks()]:
        if found:
            table.add_row(component, found, "")
        else:
            table.add_row(component, "[red]missing[/red]", fix)
            missing.append(component)
    Console().print(table)
    if missing:
        raise UserError(f"missing: {', '.join(missing)}; see the fixes in the table above")


def machine_checks() -> list[Check]:
    """Python, Java, Delta JARs, free disk space, and the optional GPU."""
    python = platform.python_version()
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    folder = jar_folder()
    has_jars = all((folder / name).is_file() for name in jar_names())
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    return [
        (
            "Python 3.11 to 3.13",
            python if is_supported else "",
            f"this is {python}; make PYTHON=python3.12",
        ),
        ("Java 17", java_version(), JAVA_INSTALL_HINT),
        (
            "Delta JARs",
            str(folder) if has_jars else "",
            "downloaded by the first Spark step; without a network, copy them to GEMLINE_JARS",
        ),
        ("free disk", f"{free_gb:.0f} GB" if free_gb > 1 else "", "free some space"),
        ("GPU", gpu_name() or "none, runs on the CPU", ""),
    ]


def package_checks() -> list[Check]:
    """Installed version of each package, by the extra that installs it."""
    rows = []
    for extra, names in EXTRA_PACKAGES.items():
        for name in names:
            version = _installed_version(name)
            if not version and _installed_version(ALTERNATIVE_PACKAGES.get(name, "")):
                continue
            rows.append((f"{extra}: {name}", version, f"pip install 'gemline[{extra}]'"))
    return rows


def _installed_version(package: str) -> str:
    try:
        return metadata.version(package) if package else ""
    except metadata.PackageNotFoundError:
        return ""


def gpu_name() -> str:
    """Name of the first GPU; empty without an NVIDIA driver."""
    try:
        query = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    names = query.stdout.strip().splitlines() if query.returncode == 0 else []
    return names[0] if names else ""
