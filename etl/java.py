"""The Java that Spark would start."""

import os
import re
import subprocess
from pathlib import Path

from etl.errors import UserError

FIX = "install openjdk-17-jre-headless (or what your system calls it), or point JAVA_HOME at one"


def java_version() -> str:
    """Its version; empty unless it is there, and 17 or newer."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home, "bin", "java")) if home else "java"
    try:
        said = subprocess.run([command, "-version"], capture_output=True, text=True).stderr
    except OSError:
        return ""
    version = re.search(r'version "((\d+)[^"]*)', said)
    return version[1] if version and int(version[2]) >= 17 else ""


def need_java() -> None:
    """Raises UserError where Spark could not be started."""
    if not java_version():
        raise UserError(f"Spark needs Java 17 or newer, and there is none: {FIX}")
