"""What must be there before anything is installed; one sentence and the fix for each lack."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
    if java() < 17:
        found.append(
            "Java 17 or newer is needed by Spark: install openjdk-17-jre-headless (or what your "
            "system calls it), or point JAVA_HOME at one."
        )
    free = shutil.disk_usage(Path(__file__).parent).free / 1e9
    if free < FREE_GB:
        found.append(f"{FREE_GB} GB of free disk are needed; there are {free:.1f}: free some.")
    return found


def java() -> int:
    """Major version of the Java that would be started; 0 if there is none."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home, "bin", "java")) if home else "java"
    try:
        said = subprocess.run([command, "-version"], capture_output=True, text=True).stderr
    except OSError:
        return 0
    match = re.search(r'version "(\d+)', said)
    return int(match[1]) if match else 0


if __name__ == "__main__":
    problems = lacks()
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(2 if problems else 0)
