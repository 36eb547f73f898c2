"""What must be there before anything is installed; one sentence and the fix for each lack."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # nothing is installed yet
from etl.java import FIX, java_version

FREE_GB = 10  # the environment takes about 9


def lacks() -> list[str]:
    """What this machine lacks."""
    found = []
    if sys.platform != "linux":
        found.append(f"Gemline runs on Linux; this is {sys.platform}.")
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        version = ".".join(map(str, sys.version_info[:3]))
        found.append(
            f"Python 3.11, 3.12 or 3.13 is needed; {sys.executable} is {version}: "
            "name another with `make PYTHON=python3.12 …`."
        )
    if not java_version():
        found.append(f"Java 17 or newer is needed by Spark: {FIX}.")
    free = shutil.disk_usage(Path(__file__).parent).free / 1e9
    if free < FREE_GB:
        found.append(f"{FREE_GB} GB of free disk are needed; there are {free:.1f}: free some.")
    return found


if __name__ == "__main__":
    problems = lacks()
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(2 if problems else 0)
