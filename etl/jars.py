"""The two JARs that make Spark speak Delta, resolved once by Spark's own Ivy."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from etl.cache import user_cache
from etl.errors import TemporaryError, UserError

DELTA = "4.4.0"
# Maven coordinates and the SHA-256 of the JAR.
PACKAGES = {
    f"io.delta:delta-spark_4.2_2.13:{DELTA}": (
        "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead"
    ),
    f"io.delta:delta-storage:{DELTA}": (
        "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc"
    ),
}
FETCH_SECONDS = 600
# What Spark ships itself, or Delta's readers outside of Spark need.
NOT_NEEDED = (
    "org.apache.hadoop:*",
    "org.antlr:*",
    "com.fasterxml.jackson.core:*",
    "com.fasterxml.jackson.datatype:*",
    "org.scala-lang:*",
    "org.slf4j:*",
    "org.apache.parquet:*",
    "io.unitycatalog:*",
    "com.github.ben-manes.caffeine:*",
    "org.openapitools:*",
    "io.delta:delta-kernel-api",
    "io.delta:delta-kernel-defaults",
    "io.delta:delta-kernel-unitycatalog",
)
RESOLVE = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
for setting in sys.argv[1:]:
    builder = builder.config(*setting.split("=", 1))
builder.getOrCreate().stop()
"""


def jar_folder() -> Path:
    """Where the JARs are kept: `GEMLINE_JARS`, or the user's cache."""
    return Path(os.environ.get("GEMLINE_JARS") or user_cache("jars"))


def jar_names() -> list[str]:
    """File names of the JARs, as Ivy writes them."""
    return ["{}_{}-{}.jar".format(*package.split(":")) for package in PACKAGES]


def delta_jars() -> list[Path]:
    """Paths of the JARs; they are fetched where the folder lacks them.

    Raises TemporaryError where they cannot be fetched, UserError where one is not the JAR that this
    version of the project was tested with.
    """
    folder = jar_folder()
    jars = [folder / name for name in jar_names()]
    if not all(jar.is_file() for jar in jars):
        fetch(folder)
    for jar in jars:
        refuse_other_content(jar)
    return jars


def refuse_other_content(jar: Path) -> None:
    """Raises UserError where the SHA-256 of a JAR is not the pinned one."""
    pinned = dict(zip(jar_names(), PACKAGES.values(), strict=True))[jar.name]
    found = hashlib.sha256(jar.read_bytes()).hexdigest()
    if found != pinned:
        raise UserError(
            f"{jar} has SHA-256 {found}, not {pinned}: remove it, and see who wrote it before you "
            "run the same command again"
        )


def fetch(folder: Path) -> None:
    """Resolve the JARs into a folder; raises TemporaryError with the reason that Ivy gives."""
    with tempfile.TemporaryDirectory() as ivy:
        reason = _resolve(Path(ivy))
        found = [Path(ivy, "jars", name) for name in jar_names()]
        if not all(jar.is_file() for jar in found):
            raise TemporaryError(
                f"the Delta JARs could not be fetched ({reason}): put "
                f"{' and '.join(jar_names())} into {folder}, or name their folder in GEMLINE_JARS"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for jar in found:
            refuse_other_content(jar)
            partial = folder / f".{jar.name}"
            shutil.copyfile(jar, partial)
            partial.replace(folder / jar.name)


def _resolve(ivy: Path) -> str:
    """Let Spark resolve the JARs into a folder; returns the reason where it could not."""
    settings = [
        f"spark.jars.packages={','.join(PACKAGES)}",
        f"spark.jars.excludes={','.join(NOT_NEEDED)}",
        f"spark.jars.ivy={ivy}",
    ]
    command = [sys.executable, "-c", RESOLVE, *settings]
    env = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=FETCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {FETCH_SECONDS} seconds"
    lines = (line.strip(": ") for line in done.stderr.splitlines() if "unresolved" in line)
    return next(lines, "no answer")
