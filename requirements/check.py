"""Check the requirements of installation and of tests; print a sentence and the fix for each lack.

python requirements/check.py            before the environment is installed
python requirements/check.py --tests 2  before two workers run the tests
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # nothing is installed yet
from etl.runtime.java import JAVA_INSTALL_HINT, java_version

INSTALL_DISK_GB = 10  # the environment takes about 9
TEST_DISK_GB = 3  # tables, models and an Airflow's database, below the folder of temporary files
TEST_MEMORY_GB = 9  # two workers with torch, Spark in one, and the processes that they start
MEMORY_FIX = "end other programs, or run `make test WORKERS=1`, which needs about two thirds of it"


def lacks() -> list[str]:
    """What this machine lacks to install the environment."""
    found = _platform() + _java()
    free = shutil.disk_usage(Path(__file__).parent).free / 1e9
    if free < INSTALL_DISK_GB:
        found.append(
            f"{INSTALL_DISK_GB} GB of free disk space are needed, {free:.1f} GB are available: "
            "free some space."
        )
    return found


def lacks_for_tests(workers: int) -> list[str]:
    """What this machine lacks to run the tests with this many workers."""
    found = _java()
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / 1e9
    if free < TEST_DISK_GB:
        found.append(
            f"The tests need {TEST_DISK_GB} GB of free disk space in {folder}, {free:.1f} GB are "
            "available: free some space, or set TMPDIR to another folder."
        )
    needed = TEST_MEMORY_GB if workers > 1 else TEST_MEMORY_GB * 2 / 3
    available = available_memory_gb()
    if available < needed:
        found.append(
            f"The tests need {needed:.1f} GB of memory, {available:.1f} GB are "
            f"available: {MEMORY_FIX}."
        )
    return found


def available_memory_gb() -> float:
    """Memory that new programs can take without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kib * 1024 / 1e9


def _platform() -> list[str]:
    found = []
    if sys.platform != "linux":
        found.append(f"Gemline runs on Linux; this is {sys.platform}.")
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        version = ".".join(map(str, sys.version_info[:3]))
        found.append(
            f"Python 3.11, 3.12 or 3.13 is needed; {sys.executable} is {version}: "
            "name another with `make PYTHON=python3.12 …`."
        )
    return found


def _java() -> list[str]:
    return [] if java_version() else [f"Java 17 or newer is needed by Spark: {JAVA_INSTALL_HINT}."]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check this machine.")
    parser.add_argument(
        "--tests", type=int, metavar="WORKERS", help="check the requirements of tests"
    )
    workers = parser.parse_args().tests
    problems = lacks() if workers is None else lacks_for_tests(workers)
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(2 if problems else 0)
