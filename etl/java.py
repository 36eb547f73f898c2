"""The Java that Spark starts, and the archive from which it loads Spark's classes.

A JVM spends seconds on loading and verifying the classes of Spark. An archive of them (class data
sharing) is made once for a version of Java and of Spark by `python -m etl.java`, at installation.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from etl.cache import user_cache
from etl.errors import UserError

FIX = "install openjdk-17-jre-headless (or what your system calls it), or point JAVA_HOME at one"
ARCHIVE_SECONDS = 300
# The classes that a small job on a Delta table loads.
JOB = """
import sys
from etl.session import LOCAL, spark_session
LOCAL["spark.driver.extraJavaOptions"] += f" -XX:ArchiveClassesAtExit={sys.argv[1]}"
table = sys.argv[2]
spark = spark_session("class archive")
for _ in range(2):
    counts = spark.range(1000).selectExpr("id % 7 AS k").groupBy("k").count()
    counts.write.format("delta").mode("overwrite").save(table)
spark.read.format("delta").load(table).count()
"""


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


def class_archive() -> Path:
    """Where the archive for this Java and this Spark is, or would be."""
    import pyspark

    facts = f"{java_version()} {pyspark.__version__} {Path(pyspark.__file__).parent}"
    name = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return user_cache("classes") / f"{name}.jsa"


def archive_options() -> tuple[str, ...]:
    """Options to use the archive, where there is one; a JVM ignores one that does not fit it."""
    archive = class_archive()
    if not archive.is_file():
        return ()
    return f'"-XX:SharedArchiveFile={archive}"', "-Xshare:auto", "-Xlog:cds=off"


def make_class_archive() -> None:
    """Make the archive unless it is there; raises UserError where there is no Java."""
    need_java()
    archive = class_archive()
    if archive.is_file():
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder, "classes.jsa")
        command = [sys.executable, "-c", JOB, str(made), str(Path(folder, "table"))]
        # The JVM writes the archive when it exits, after Python: its output ends with it.
        subprocess.run(command, capture_output=True, check=True, timeout=ARCHIVE_SECONDS)
        made.replace(archive)


if __name__ == "__main__":
    make_class_archive()
