"""The two JARs that make Spark speak Delta, resolved once by Spark's own Ivy."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from etl.cache import user_cache
from etl.errors import UserError

DELTA = "4.4.0"
PACKAGES = (f"io.delta:delta-spark_4.2_2.13:{DELTA}", f"io.delta:delta-storage:{DELTA}")
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

    Raises UserError where they cannot be fetched.
    """
    folder = jar_folder()
    jars = [folder / name for name in jar_names()]
    if not all(jar.is_file() for jar in jars):
        fetch(folder)
    return jars


def fetch(folder: Path) -> None:
    """Resolve the JARs into a folder; raises UserError with what Ivy said."""
    with tempfile.TemporaryDirectory() as ivy:
        settings = [
            f"spark.jars.packages={','.join(PACKAGES)}",
            f"spark.jars.excludes={','.join(NOT_NEEDED)}",
            f"spark.jars.ivy={ivy}",
        ]
        env = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, *settings], capture_output=True, text=True, env=env
        )
        found = [Path(ivy, "jars", name) for name in jar_names()]
        if not all(jar.is_file() for jar in found):
            reason = next((s for s in done.stderr.splitlines() if "unresolved" in s), "no answer")
            raise UserError(
                f"the Delta JARs could not be fetched ({reason.strip(': ')}): put "
                f"{' and '.join(jar_names())} into {folder}, or name their folder in GEMLINE_JARS"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for jar in found:
            partial = folder / f".{jar.name}"
            shutil.copyfile(jar, partial)
            partial.replace(folder / jar.name)
