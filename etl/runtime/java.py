"""What Spark's JVM needs: Java 17, the two Delta JARs, and an archive of loaded classes.

The JARs are pinned by SHA-256 and resolved once, by Spark's own Ivy. The archive (class data
sharing) saves the seconds that a JVM spends on loading and verifying Spark's classes; `python -m
etl.runtime.java` creates it at installation, once per version of Java and Spark.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from etl.errors import TemporaryError, UserError
from etl.runtime.cache import user_cache

DELTA_VERSION = "4.4.0"
# Maven coordinates and SHA-256.
JAR_SHA256 = {
    f"io.delta:delta-spark_4.2_2.13:{DELTA_VERSION}": (
        "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead"
    ),
    f"io.delta:delta-storage:{DELTA_VERSION}": (
        "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc"
    ),
}
FETCH_TIMEOUT_SECONDS = 600
# Transitive dependencies that Spark ships itself, or that only Delta's readers outside Spark need.
EXCLUDED_PACKAGES = (
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
RESOLVE_SCRIPT = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
for setting in sys.argv[1:]:
    builder = builder.config(*setting.split("=", 1))
builder.getOrCreate().stop()
"""

JAVA_INSTALL_HINT = (
    "install openjdk-17-jre-headless (or your system's package of it), or set JAVA_HOME"
)
ARCHIVE_TIMEOUT_SECONDS = 300
# Loads the classes that a small job on a Delta table needs; the JVM archives them when it exits.
CLASS_ARCHIVE_SCRIPT = """
import sys
from etl.runtime.spark import LOCAL_CONF, spark_session
LOCAL_CONF["spark.driver.extraJavaOptions"] += f" -XX:ArchiveClassesAtExit={sys.argv[1]}"
table = sys.argv[2]
spark = spark_session("class archive")
for _ in range(2):
    counts = spark.range(1000).selectExpr("id % 7 AS k").groupBy("k").count()
    counts.write.format("delta").mode("overwrite").save(table)
spark.read.format("delta").load(table).count()
"""


def jar_folder() -> Path:
    """The folder of the JARs: `GEMLINE_JARS`, or a folder of the user's cache."""
    return Path(os.environ.get("GEMLINE_JARS") or user_cache("jars"))


def jar_names() -> list[str]:
    """File names of the JARs, as Ivy writes them."""
    return ["{}_{}-{}.jar".format(*package.split(":")) for package in JAR_SHA256]


def delta_jars() -> list[Path]:
    """Paths of the JARs, after downloading them if the folder lacks one.

    Raises:
        TemporaryError: If they cannot be downloaded.
        UserError: If the checksum of one is not the pinned one.
    """
    folder = jar_folder()
    jars = [folder / name for name in jar_names()]
    if not all(jar.is_file() for jar in jars):
        fetch_jars(folder)
    for jar in jars:
        verify_checksum(jar)
    return jars


def verify_checksum(jar: Path) -> None:
    """Raise UserError if the SHA-256 of a JAR is not the pinned one."""
    pinned = dict(zip(jar_names(), JAR_SHA256.values(), strict=True))[jar.name]
    checksum = hashlib.sha256(jar.read_bytes()).hexdigest()
    if checksum != pinned:
        raise UserError(
            f"{jar} has SHA-256 {checksum}, not {pinned}: find out who wrote it, remove it, and "
            "repeat the command"
        )


def fetch_jars(folder: Path) -> None:
    """Download the JARs into a folder; raises TemporaryError with the reason that Ivy gives."""
    with tempfile.TemporaryDirectory() as ivy:
        reason = _resolve_with_ivy(Path(ivy))
        downloaded = [Path(ivy, "jars", name) for name in jar_names()]
        if not all(jar.is_file() for jar in downloaded):
            raise TemporaryError(
                f"the Delta JARs could not be downloaded ({reason}): put "
                f"{' and '.join(jar_names())} into {folder}, or set GEMLINE_JARS to their folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        # A folder of its own: another process may be fetching the JARs, too.
        with tempfile.TemporaryDirectory(dir=folder) as partial_folder:
            for jar in downloaded:
                verify_checksum(jar)
                partial = Path(partial_folder, jar.name)
                shutil.copyfile(jar, partial)
                partial.replace(folder / jar.name)


def _resolve_with_ivy(ivy: Path) -> str:
    """Resolve the JARs into the folder `ivy`; returns the reason of a failure."""
    settings = [
        f"spark.jars.packages={','.join(JAR_SHA256)}",
        f"spark.jars.excludes={','.join(EXCLUDED_PACKAGES)}",
        f"spark.jars.ivy={ivy}",
    ]
    command = [sys.executable, "-c", RESOLVE_SCRIPT, *settings]
    env = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=env,
            timeout=FETCH_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {FETCH_TIMEOUT_SECONDS} seconds"
    unresolved = [line.strip(": ") for line in process.stderr.splitlines() if "unresolved" in line]
    return unresolved[0] if unresolved else "no answer"


def java_version() -> str:
    """The version of Java; empty if it is missing or older than 17."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home, "bin", "java")) if home else "java"
    try:
        process = subprocess.run([command, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    version = re.search(r'version "((\d+)[^"]*)', process.stderr)
    return version[1] if version and int(version[2]) >= 17 else ""


def require_java() -> None:
    """Raise UserError if Java is missing or too old to start Spark."""
    if not java_version():
        raise UserError(f"Spark needs Java 17 or newer, which was not found: {JAVA_INSTALL_HINT}")


def class_archive_path() -> Path:
    """Path of the class archive for this version of Java and Spark; it need not exist."""
    import pyspark

    key = f"{java_version()} {pyspark.__version__} {Path(pyspark.__file__).parent}"
    name = hashlib.sha256(key.encode()).hexdigest()[:12]
    return user_cache("classes") / f"{name}.jsa"


def class_archive_options() -> tuple[str, ...]:
    """JVM options to use the class archive, if it exists; a JVM ignores one that does not match."""
    archive = class_archive_path()
    if not archive.is_file():
        return ()
    return f'"-XX:SharedArchiveFile={archive}"', "-Xshare:auto", "-Xlog:cds=off"


def create_class_archive() -> None:
    """Create the class archive unless it exists; raises UserError without Java."""
    require_java()
    archive = class_archive_path()
    if archive.is_file():
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        partial, table = Path(folder, "classes.jsa"), Path(folder, "table")
        command = [sys.executable, "-c", CLASS_ARCHIVE_SCRIPT, str(partial), str(table)]
        # The JVM writes the archive when it exits, after Python; the pipes close when it has ended.
        subprocess.run(command, capture_output=True, check=True, timeout=ARCHIVE_TIMEOUT_SECONDS)
        partial.replace(archive)


if __name__ == "__main__":
    create_class_archive()
