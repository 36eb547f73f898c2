"""The one Spark session: every setting that tables or tests rely on is here."""

import os
import sys
from pathlib import Path

from py4j.java_gateway import java_import
from pyspark.sql import SparkSession

from etl.jars import delta_jars
from etl.java import archive_options, need_java

ALWAYS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    # Otherwise each Column operation sends its Python call site to the JVM.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
# Short jobs on few cores: the optimising compiler would take one of them for a minute.
SHORT_JOBS = ("-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m", "-XX:+UseParallelGC")
QUIET = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
# A laptop: one process, loopback only, few partitions.
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "4g",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
    # Each task takes a page of 64 MB otherwise, and what is broadcast keeps it.
    "spark.buffer.pageSize": "4m",
    "spark.sql.shuffle.partitions": "8",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    "spark.driver.extraJavaOptions": " ".join((*SHORT_JOBS, QUIET)),
}


def spark_session(app: str) -> SparkSession:
    """The session, made on first call.

    Under spark-submit, where and on how much it runs is the submitter's choice, and the JARs
    come from `--jars`. Else it runs here, on the cores that `GEMLINE_SPARK_MASTER` names and with
    the heap that `GEMLINE_SPARK_MEMORY` names (`local[2]`, `2g`).
    """
    builder = SparkSession.builder.appName(app)
    settings = dict(ALWAYS)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        need_java()
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        jars = ",".join(map(str, delta_jars()))
        builder = builder.master(os.environ.get("GEMLINE_SPARK_MASTER", "local[*]"))
        memory = os.environ.get("GEMLINE_SPARK_MEMORY", LOCAL["spark.driver.memory"])
        options = " ".join((LOCAL["spark.driver.extraJavaOptions"], *archive_options()))
        settings |= LOCAL | {
            "spark.jars": jars,
            "spark.driver.memory": memory,
            "spark.driver.extraJavaOptions": options,
        }
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    # PySpark refers to this class by its simple name a thousand times in a build of tables. Without
    # an import each reference searches all JARs for it in the packages that come before its own.
    java_import(session.sparkContext._jvm, "org.apache.spark.api.python.PythonUtils")
    return session
